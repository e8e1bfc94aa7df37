"""Tests of admission orders: given, pyramid (light microbatches at both ends), and from files."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp import inputs as text_files
from rrfp.errors import UsageError
from rrfp.inputs import resolve_admission
from rrfp.planning.modeled_costs import ModeledSteps
from rrfp.planning.step_admission import StepAdmission
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit, ListedOrders, admission_order, parse_admission, pyramid
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.conditions import admitted, order_by_costs, weights_ns
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import NO_JITTER, parse_jitter
from rrfp.train.checks import check_settings
from rrfp.train.pacing import make_pace
from rrfp.train.settings import TrainSettings
from tests.properties.cases import examples

ROOT = Path(__file__).parents[2]


def times_of_weights(weights: list[int]) -> TaskTimes:
    """Return times whose sums over stages and kinds rank microbatches as `weights`, although no
    single stage does."""
    return TaskTimes([weights, [5] * len(weights)], [[0] * len(weights)] * 2, [weights, weights])


def test_the_weight_of_a_microbatch_is_its_time_on_all_stages() -> None:
    times = TaskTimes([[9, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 7]], [[1, 1, 1], [1, 2, 9]])
    assert weights_ns(times) == [14, 7, 20]
    assert order_by_costs(StepCosts(times), Admit.PYRAMID, 0) == [1, 2, 0]
    assert list(order_by_costs(StepCosts(times), Admit.GIVEN, 0)) == [0, 1, 2]


def test_admitted_costs_are_permuted() -> None:
    costs = StepCosts(times_of_weights([3, 1, 2]), agreement_ns=5)
    assert admitted(costs, Admit.GIVEN, 0) is costs
    assert admitted(costs, Admit.PYRAMID, 0) == costs.permuted([1, 0, 2])
    listed = ListedOrders("mine", ((2, 1, 0), (1, 2, 0)))
    assert admitted(costs, listed, 1) == costs.permuted([1, 2, 0])
    assert admitted(costs, listed, 2) == costs.permuted([2, 1, 0])


def test_a_pyramid_of_drawn_costs_is_refused() -> None:
    costs = resolve_costs(f"drawn:{ROOT / 'traces' / 'gpt-pp4-bf.pftrace'}").step(Shape(4, 8), 0, 0)
    assert admitted(costs, Admit.GIVEN, 0) is costs
    admitted(costs, ListedOrders("mine", (tuple(range(8)),)), 0)
    with pytest.raises(UsageError, match=r"--admit pyramid sorts by .* choose --admit given"):
        admitted(costs, Admit.PYRAMID, 0)


COLUMNS = (
    ("language", "none", Admit.GIVEN),
    ("language", "lognormal:0.5", Admit.GIVEN),
    ("multimodal", "none", Admit.GIVEN),
    ("multimodal", "none", Admit.PYRAMID),
)
FIGURES = re.findall(
    r"^\| `(\S+)`.* \| (\d+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|$",
    (ROOT / "docs" / "reference" / "costs.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Rows of the table in docs/reference/costs.md: hint, hold, and a figure for each of `COLUMNS`."""


def test_the_table_of_the_presets_is_found() -> None:
    assert [line[:2] for line in FIGURES] == [
        (hint, hold) for hint in ("bf", "bfw", "bfw-deep") for hold in ("8", "12", "16")
    ]


@pytest.mark.parametrize(
    ("hint", "hold", "figures"),
    [
        pytest.param(hint, int(hold), figures, marks=[pytest.mark.slow] * (hold != "8"))
        for hint, hold, *figures in FIGURES
    ],
)
def test_presets_match_the_figures_of_the_documentation(
    hint: str, hold: int, figures: list[str]
) -> None:
    num_chunks, placement = (2, Placement.V) if hint == "bfw-deep" else (1, Placement.LOOP)
    ranking = hint_named(hint).for_shape(Shape(8, 32, num_chunks, placement))
    shape = Shape(8, 32, num_chunks, placement, kinds_of(ranking))
    settings = [
        Setting(
            shape=shape,
            policy=Policy(ranking, hold=hold),
            costs=resolve_costs(costs),
            jitter=parse_jitter(jitter),
            admit=admit,
        )
        for costs, jitter, admit in COLUMNS
    ]
    rows = run_settings(settings, range(20))
    assert [f"{row.ratio_to_load:.2f}" for row in rows] == figures


# Admission orders by name and from files, without any costs.


def never() -> list[float]:
    raise AssertionError("nobody needs the weights")


def test_admission_orders_are_resolved_by_name() -> None:
    assert resolve_admission("given", 3) is Admit.GIVEN
    assert resolve_admission("pyramid", 3) is Admit.PYRAMID
    assert list(admission_order(Admit.GIVEN, 5, 3, never)) == [0, 1, 2]
    assert admission_order(Admit.PYRAMID, 5, 3, lambda: [3.0, 1.0, 2.0]) == [1, 0, 2]


def test_a_pyramid_is_light_heavy_light() -> None:
    assert pyramid([30, 10, 50, 20, 40]) == [1, 0, 2, 4, 3]
    assert pyramid([7]) == [0]
    assert pyramid([2.5, 1.5]) == [1, 0]


def test_of_equal_microbatches_the_earlier_is_the_lighter() -> None:
    assert pyramid([1, 1, 1, 1, 1]) == [0, 2, 4, 3, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@examples(quick=100, thorough=1000)
def test_a_pyramid_rises_and_then_falls(weights: list[int]) -> None:
    order = pyramid(weights)
    assert sorted(order) == list(range(len(weights)))
    admitted = [weights[each] for each in order]
    top = admitted.index(max(admitted))
    assert admitted[: top + 1] == sorted(admitted[: top + 1])
    assert admitted[top:] == sorted(admitted[top:], reverse=True)


def test_a_file_has_one_line_per_step_and_repeats() -> None:
    listed = parse_admission("2,0,1\n\n 1 2  0 \r\n0, 2, 1,\n", "mine", 3)
    assert listed == ListedOrders("mine", ((2, 0, 1), (1, 2, 0), (0, 2, 1)))
    orders = [admission_order(listed, step, 3, never) for step in range(5)]
    assert orders == [(2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 2, 0)]


def test_without_a_number_the_first_line_gives_the_number_of_microbatches() -> None:
    listed = parse_admission("1 0", "mine")
    with pytest.raises(UsageError, match="mine admits 2 microbatches and step 7 has 3"):
        admission_order(listed, 7, 3, never)
    with pytest.raises(UsageError, match="line 2: '2' is not one of the 2 microbatches"):
        parse_admission("1 0\n0 2", "mine")


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=4), st.sampled_from([",", " "]))
@examples(quick=50, thorough=500)
def test_a_written_file_is_read_back(orders: list[list[int]], separator: str) -> None:
    text = "\n".join(separator.join(map(str, order)) for order in orders)
    assert parse_admission(text, "mine", 6).orders == tuple(map(tuple, orders))


@given(st.text(alphabet="012, \n-x", max_size=20))
@examples(quick=200, thorough=2000)
def test_a_file_is_read_or_refused(text: str) -> None:
    try:
        orders = parse_admission(text, "mine", 3).orders
    except UsageError:
        lines = [line for line in text.splitlines() if line.strip(" ,")]
        words = [sorted(line.replace(",", " ").split()) for line in lines]
        assert not words or any(each != ["0", "1", "2"] for each in words)
    else:
        assert all(sorted(order) == [0, 1, 2] for order in orders)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "mine admits nothing; write a line of microbatches"),
        ("\n , \n", "mine admits nothing"),
        ("0 1 2\n0 1", "mine, line 2 admits 2 of 3 microbatches; 2 is missing, add it"),
        ("0 1 2 3", "mine, line 1: '3' is not one of the 3 microbatches; write their numbers, "),
        ("0 1 1", "mine, line 1: 1 is listed twice; admit each microbatch once"),
        ("0 1 -2", "mine, line 1: '-2' is not one of the 3"),
        ("0 1 two", "'two' is not one of the 3"),
        ("0 1 2.0", "'2.0' is not one of the 3"),
        ("0 1 ²", "'²' is not one of the 3"),
        (f"0 1 {'9' * 5000}", r"'9{20}\.\.\.' is not one of the 3"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_admission(text, "mine", 3)


def test_files_are_found_by_suffix_or_by_existence(tmp_path: Path) -> None:
    for name in ("order.csv", "order.txt", "order"):
        path = tmp_path / name
        path.write_text("﻿1 0\n", encoding="utf-8")
        assert resolve_admission(str(path), 2) == ListedOrders(str(path), ((1, 0),))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not an admission order; choose given, pyramid, plan, or a file with a line of"),
        ("heavy", "'heavy' is not an admission order"),
        ("no\0path", "is not an admission order"),
        ("x" * 5000, "is not an admission order"),
        ("none.csv", "cannot read the admission file none.csv: No such file or directory"),
        ("/", "cannot read the admission file /: Is a directory"),
    ],
)
def test_an_unknown_admission_order_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        resolve_admission(text, 2)


def test_binary_and_oversized_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "order.csv").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(UsageError, match=r"order\.csv: it is not UTF-8 text"):
        resolve_admission(str(tmp_path / "order.csv"), 2)
    monkeypatch.setattr(text_files, "_MOST_BYTES", 2**20)
    (tmp_path / "order.csv").write_bytes(b"0 1\n" * 2**19)
    with pytest.raises(UsageError, match=r"order\.csv is larger than 1 MiB; name another one"):
        resolve_admission(str(tmp_path / "order.csv"), 2)
    with pytest.raises(UsageError, match="/dev/zero is not a regular file"):
        resolve_admission("/dev/zero", 2)


# `--admit` in training: the order is the same for every dispatch. megatron/test_learns_the_same.py
# trains with it.


SIZES: dict[str, Any] = {"pp": 2, "layers": 4, "microbatches": 4}


def order_of(
    settings: TrainSettings, step: int, modeled: ModeledSteps | None = None, groups: Any = None
) -> list[int]:
    """Return the admission order of a step of four items."""
    num = settings.data.microbatches
    items: Any = SimpleNamespace(items=lambda: "abcd")
    admission = StepAdmission(settings.step, num, modeled)
    return list(admission.order(step, items, num, groups, dict, torch.device("cpu")))


def test_orders_that_need_no_data(tmp_path: Path) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone)
    assert order_of(TrainSettings(**SIZES), 7) == [0, 1, 2, 3]
    path = tmp_path / "order.csv"
    path.write_text("3,2,1,0\n1,0,3,2\n")
    listed = TrainSettings(**SIZES, admit=str(path))
    assert [order_of(listed, step, groups=groups) for step in range(3)] == [
        [3, 2, 1, 0],
        [1, 0, 3, 2],
        [3, 2, 1, 0],
    ]


def test_a_pyramid_uses_modelled_costs() -> None:
    settings = TrainSettings(**SIZES, admit="pyramid", pace="multimodal")
    costs = resolve_costs("multimodal")
    for replica in range(2):
        pace = make_pace(
            costs, NO_JITTER, Admit.PYRAMID, settings.run.seed, settings.shape, 1, replica
        )
        assert pace is not None
        for step in range(3):
            times = costs.step(settings.shape, settings.run.seed + step, replica).times
            assert order_of(settings, step, pace.modeled) == pyramid(weights_ns(times))


def test_a_pace_without_costs_keeps_the_given_order() -> None:
    settings = TrainSettings(**SIZES, jitter="J1")
    pace = make_pace(None, parse_jitter("J1"), Admit.GIVEN, settings.run.seed, settings.shape, 1, 0)
    assert pace is not None
    assert order_of(settings, 0, pace.modeled) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"admit_cost": "tokens"},
            "--admit given does not sort them; add --admit pyramid or leave",
        ),
        (
            {"admit": "pyramid", "admit_cost": "patches"},
            "counts those of images and --model gpt has none; leave it out",
        ),
        (
            {"admit": "pyramid", "admit_cost": "work", "pace": "language"},
            "--pace language knows what microbatches cost; leave --admit-cost out",
        ),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**SIZES, **settings))
