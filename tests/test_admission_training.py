"""`--admit`: the same order for every dispatch. The training under it is a row of
test_learns_the_same.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit, pyramid
from rrfp.simulate.conditions import weights_ns
from rrfp.simulate.jitter import NO_JITTER, parse_jitter
from rrfp.train.checks import check_settings
from rrfp.train.pacing import make_pace
from rrfp.train.planning import run_order
from rrfp.train.settings import TrainSettings

SIZES: dict[str, Any] = {"pp": 2, "layers": 4, "microbatches": 4}


def test_what_is_known_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone)
    monkeypatch.setattr("rrfp.train.planning.step_groups", lambda *_: groups)
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
        pace = make_pace(
            costs, NO_JITTER, Admit.PYRAMID, settings.run.seed, settings.shape, 1, replica
        )
        order = run_order(settings, pace)
        for step in range(3):
            times = costs.step(settings.shape, settings.run.seed + step, replica).times
            assert list(order(step, "abcd")) == pyramid(weights_ns(times))


def test_a_pace_that_models_nothing_says_nothing() -> None:
    settings = TrainSettings(**SIZES, jitter="J1")
    pace = make_pace(None, parse_jitter("J1"), Admit.GIVEN, settings.run.seed, settings.shape, 1, 0)
    assert list(run_order(settings, pace)(0, "abcd")) == [0, 1, 2, 3]


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
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**SIZES, **settings))
