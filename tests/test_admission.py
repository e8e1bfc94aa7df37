"""Admission: light microbatches at both ends of the step, by what is known of them beforehand."""

import re
from pathlib import Path

import pytest

from rrfp.errors import UsageError
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit, ListedOrders
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.conditions import admitted, order_by_costs, weights_ns
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.world import TaskTimes

ROOT = Path(__file__).parent.parent


def of_weights(weights: list[int]) -> TaskTimes:
    """Times whose sums over stages and kinds are these, though no stage's alone are."""
    return TaskTimes([weights, [5] * len(weights)], [[0] * len(weights)] * 2, [weights, weights])


def test_a_microbatch_weighs_what_it_takes_on_all_stages() -> None:
    times = TaskTimes([[9, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 7]], [[1, 1, 1], [1, 2, 9]])
    assert weights_ns(times) == [14, 7, 20]
    assert order_by_costs(StepCosts(times), Admit.PYRAMID, 0) == [1, 2, 0]
    assert list(order_by_costs(StepCosts(times), Admit.GIVEN, 0)) == [0, 1, 2]


def test_what_is_admitted_is_what_costs_say_of_it() -> None:
    costs = StepCosts(of_weights([3, 1, 2]), agreement_ns=5)
    assert admitted(costs, Admit.GIVEN, 0) is costs
    assert admitted(costs, Admit.PYRAMID, 0) == costs.permuted([1, 0, 2])
    listed = ListedOrders("mine", ((2, 1, 0), (1, 2, 0)))
    assert admitted(costs, listed, 1) == costs.permuted([1, 2, 0])
    assert admitted(costs, listed, 2) == costs.permuted([2, 1, 0])


def test_nobody_can_sort_by_what_is_drawn() -> None:
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
"""Of docs/reference/costs.md: the hint, what is held, and a figure for each of `COLUMNS`."""


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
def test_the_presets_come_to_what_the_documentation_says(
    hint: str, hold: int, figures: list[str]
) -> None:
    num_chunks, placement = (2, Placement.V) if hint == "bfw-deep" else (1, Placement.LOOP)
    ranking = hint_named(hint).on(Shape(8, 32, num_chunks, placement))
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
