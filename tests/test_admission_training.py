"""`--admit`: the same order for every dispatch, and the same training under it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.megatron.admission import run_order
from rrfp.megatron.pacing import make_pace
from rrfp.megatron.settings import TrainSettings
from rrfp.schedule.admission import Admit, pyramid
from rrfp.simulate.admission import weights_ns
from rrfp.simulate.cost_files import resolve_costs
from rrfp.simulate.jitter import NO_JITTER, parse_jitter
from tests.ranks import run_ranks
from tests.training import SMALL, RankRun, train_variants

SIZES: dict[str, Any] = {"pp": 2, "layers": 4, "microbatches": 4}


def test_what_is_known_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone)
    monkeypatch.setattr("rrfp.megatron.admission.step_groups", lambda *_: groups)
    order = run_order(TrainSettings(**SIZES))
    assert list(order(7, "abcd")) == [0, 1, 2, 3]
    path = tmp_path / "order.csv"
    path.write_text("3,2,1,0\n1,0,3,2\n")
    order = run_order(TrainSettings(**SIZES, admit=str(path)))
    assert [list(order(step, "abcd")) for step in range(3)] == [
        [3, 2, 1, 0],
        [1, 0, 3, 2],
        [3, 2, 1, 0],
    ]


def test_modelled_costs_say_what_is_heavy() -> None:
    settings = TrainSettings(**SIZES, admit="pyramid", pace="multimodal")
    costs = resolve_costs("multimodal")
    for replica in range(2):
        pace = make_pace(costs, NO_JITTER, Admit.PYRAMID, settings.seed, settings.shape, 1, replica)
        order = run_order(settings, pace)
        for step in range(3):
            times = costs.step(settings.shape, settings.seed + step, replica).times
            assert list(order(step, "abcd")) == pyramid(weights_ns(times))


def test_a_pace_that_models_nothing_says_nothing() -> None:
    settings = TrainSettings(**SIZES, jitter="J1")
    pace = make_pace(None, parse_jitter("J1"), Admit.GIVEN, settings.seed, settings.shape, 1, 0)
    assert list(run_order(settings, pace)(0, "abcd")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"admit_cost": "tokens"}, "--admit given sorts none; add --admit pyramid or leave"),
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
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        TrainSettings(**SIZES, **settings).validate()


VARIED = {**SMALL, "variable_lengths": True, "seq_length": 64, "microbatches": 6}
PYRAMIDS: list[dict[str, Any]] = [
    {"dispatch": "megatron"},
    {"hint": "bf"},
    {"hint": "bfw", "hold": 2},
    {"hint": "gpipe", "dispatch": "fixed"},
    {"hint": "bf", "admit_cost": "tokens"},
]


@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize(
    "layout",
    [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}],
    ids=lambda layout: "-".join(f"{name}{value}" for name, value in layout.items()),
)
def test_an_order_is_the_same_for_every_dispatch(layout: dict[str, Any]) -> None:
    settings = {**VARIED, **layout}
    num_ranks = settings["pp"] * settings.get("tp", 1) * settings.get("dp", 1)
    variants = [{"admit": "given"}, *({"admit": "pyramid", **each} for each in PYRAMIDS)]
    for given, first, *others in run_ranks(
        num_ranks, train_variants, settings, variants, timeout_s=300
    ):
        for run in others:
            assert learned(run) == learned(first)
        assert given.parameters_sha256 != first.parameters_sha256
        assert given.tokens == first.tokens
        # The first step starts from the same parameters: only the sequence of the sum differs.
        assert first.losses[0] == pytest.approx(given.losses[0], rel=1e-6)
        assert first.grad_norms[0] == pytest.approx(given.grad_norms[0], rel=1e-5)


def learned(run: RankRun) -> tuple[list[float], list[float], str]:
    return run.losses, run.grad_norms, run.parameters_sha256
