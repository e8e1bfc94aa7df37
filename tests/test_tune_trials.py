"""Uneven layouts, and proposals of `rrfp tune`, for real."""

import json
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.replay.cost_sources import resolve_costs
from rrfp.simulate.costs.layer_costs import CutCosts
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
from tests.trained import read_metrics, rrfp

SMALL = ("--hidden", "32", "--microbatches", "4", "--seq-length", "32", "--steps", "2")

HEAVY_HEAD = """
seconds = { F = 0.06, B = 0.06, W = 0.04 }
bytes = 1000000
[[ranks]]
last_share = 0.01
seconds = { F = 0.12, B = 0.12, W = 0.08 }
"""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"layout": "Et*3|t*2L", "layers": 5, "pp": 4}, "is of 2 stages, and 4 pipeline ranks"),
        ({"layout": "Et*3|t*2L", "layers": 6, "pp": 2}, "has 5 layers in all and --layers is 6"),
        ({"layout": "3,0,3", "layers": 6, "pp": 3}, "a stage in the middle without layers"),
        ({"layout": "ttt|tt", "layers": 5, "pp": 2}, "must begin with the embedding"),
        ({"layout": "2,2", "layers": 4, "pp": 2, "model": "vlm"}, "leave --layout out"),
        ({"layers": 5, "pp": 2}, "or divide them with --layout"),
    ],
)
def test_layouts_that_cannot_be(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_settings(TrainSettings(**flags))


def losses(directory: Path, *flags: str) -> list[float]:
    done = rrfp(directory, "train", *SMALL, "--no-trace", "--out", "run", "--force", *flags)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in read_metrics(directory / "run")]


@pytest.mark.slow
def test_an_uneven_layout_trains_the_same(tmp_path: Path) -> None:
    """In a loop, in a V with stages of no layers at both ends, and under Megatron's own schedule.

    The first loss is the same to the bit. The norm of the gradients, which clips them, is summed
    over ranks, so that later losses differ in their last digits.
    """
    even, *others = (
        losses(tmp_path, "--pp", "2", "--layers", "6", *flags)
        for flags in (
            (),
            ("--layout", "Et|t*5L"),
            ("--chunks=2", "--placement=v", "--hint=bfw-deep", "--layout=0,2,4,0"),
            ("--dispatch=megatron", "--layout=2,4"),
        )
    )
    for each in others:
        assert each[0] == even[0]
        assert each == pytest.approx(even, rel=1e-5)


@pytest.mark.slow
def test_trials_of_costs_and_of_a_run(tmp_path: Path) -> None:
    """The first proposals, paced; then the run of one as what is tuned."""
    (tmp_path / "costs.toml").write_text(HEAVY_HEAD)
    search = ("--simulations", "300", "--try", "1", "--steps", "2", "--format", "json")
    done = rrfp(
        *(tmp_path, "tune", "costs.toml", "--pp", "2", "--microbatches", "6", "--layers", "8"),
        *search,
    )
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["proposals"][0]
    assert sum(first["layers"]) == 8
    # Less would be faster than possible; cores may be busy.
    assert 0.98 * first["predicted_for_real_s"] < first["real_s"]
    assert first["real_s"] < 1.5 * first["predicted_for_real_s"]
    (written,) = (tmp_path / "runs" / "tune").iterdir()
    cut = resolve_costs(f"{written}")
    assert isinstance(cut, CutCosts)
    assert list(cut.split) == first["layers"]
    done = rrfp(tmp_path, "tune", first["run"], "--memory", "3", *search)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["own"]["is_run"]
    assert found["own"]["predicted_s"] == pytest.approx(found["own"]["measured_s"], rel=0.1)
    assert found["proposals"][0]["real_s"] > 0


@pytest.mark.slow
def test_what_was_not_trained_here_cannot_be_tried(tmp_path: Path) -> None:
    made = rrfp(tmp_path, "simulate", "--pp", "2", "--microbatches", "4", "--out", "simulated")
    assert made.returncode == 0
    done = rrfp(tmp_path, "tune", "simulated", "--memory", "2", "--try", "1")
    assert done.returncode == 2
    assert "run the job itself with the proposal's flags" in done.stderr
