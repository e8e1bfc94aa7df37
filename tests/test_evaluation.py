"""Held-out data: looking at it tells the same under every dispatch, and disturbs no training."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrfp.errors import RrfpError, UsageError
from rrfp.train.loop import Evaluation
from rrfp.train.settings import TrainSettings
from tests.ranks import run_ranks
from tests.training import RankRun, train_variants

SETTINGS: dict[str, Any] = {
    "model": "vlm",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "microbatches": 4,
    "steps": 3,
    "dropout": 0.1,
}
EVERY_STEP = {"heldout_every": 1}


def assert_same(rank: int, reference: RankRun, run: RankRun) -> None:
    assert run.losses == reference.losses, f"rank {rank}"
    assert run.parameters_sha256 == reference.parameters_sha256, f"rank {rank}"
    # After the last step all have looked.
    assert run.heldout_losses[-1:] == reference.heldout_losses[-1:], f"rank {rank}"


def assert_unrecorded(rank: int, run: RankRun, plain: RankRun) -> None:
    """The trace has the steps of the training alone, under their own numbers."""
    tasks, expected = (
        sorted((task.step, task.stage, task.kind, task.microbatch) for task in some.tasks())
        for some in (run, plain)
    )
    assert tasks == expected, f"rank {rank}"
    assert {record.step for record in run.records} == {0, 1, 2}, f"rank {rank}"


def test_an_evaluation_disturbs_no_training() -> None:
    """On one rank of two chunks, with dropout."""
    settings = {**SETTINGS, "pp": 1, "chunks": 2}
    ((plain, looked),) = run_ranks(1, train_variants, settings, [{}, EVERY_STEP], timeout_s=110)
    assert_same(0, plain, looked)
    assert_unrecorded(0, looked, plain)
    assert len(plain.heldout_losses) == 1
    assert len(set(looked.heldout_losses)) == 3


def test_what_cannot_be_looked_at_is_told_before_the_training() -> None:
    layout: Any = SimpleNamespace(dp=2, dp_rank=1)
    nothing: Any = None
    asked: list[int] = []

    def heldout(number: int) -> Any:
        asked.append(number)
        if number == 40:
            raise UsageError("the image is damaged")

    with pytest.raises(UsageError, match="is damaged"):
        Evaluation(TrainSettings(microbatches=12), layout, nothing, heldout, nothing)
    assert asked == [*range(12, 24), *range(36, 41)]


def test_a_loss_that_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(
        dp=1, dp_rank=0, pp_rank=0, last_stage_pp_rank=1, first_rank=lambda pp_rank: pp_rank
    )
    model: Any = SimpleNamespace(chunks=[])
    nothing: Any = None
    evaluation = Evaluation(TrainSettings(), layout, model, lambda _: nothing, nothing)
    monkeypatch.setattr(evaluation, "_step", lambda _: torch.tensor([math.nan, 1.0]))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_: None)
    with pytest.raises(RrfpError, match=r"held-out loss is nan.*; try a smaller --lr"):
        evaluation.loss()


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_every_dispatch_sees_the_same_heldout_loss(dp: int) -> None:
    settings = {**SETTINGS, "pp": 2, "dp": dp, "dropout": 0.0}
    variants: list[dict[str, Any]] = [
        {"dispatch": "megatron"},
        {"dispatch": "megatron", **EVERY_STEP},
        {"hint": "bf", **EVERY_STEP},
        {"hint": "bfw", **EVERY_STEP},
        {"hint": "zb-h1", "w": "ranked", **EVERY_STEP},
        {"dispatch": "fixed", "hint": "zb-h1", **EVERY_STEP},
    ]
    by_rank = run_ranks(2 * dp, train_variants, settings, variants, timeout_s=240)
    for rank, (plain, looked, *runs) in enumerate(by_rank):
        assert_same(rank, plain, looked)
        assert_unrecorded(rank, looked, plain)
        for run in runs:
            assert_same(rank, looked, run)
            assert run.heldout_losses == looked.heldout_losses
            assert {record.step for record in run.records} == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_images_are_worth_something(tmp_path: Path) -> None:
    """From the defaults, captions that training has not seen are told far better with them."""
    losses = {}
    for name, flags in {"seen": [], "blank": ["--blank-images"]}.items():
        out = tmp_path / name
        command = (
            *(sys.executable, "-m", "rrfp", "train", "--model", "vlm", "--hint", "bfw"),
            *("--seed", "1", "--no-trace", "--out", str(out)),
            *flags,
        )
        said = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        losses[name] = last["heldout_loss"]
        assert f"Held-out loss {losses[name]:.4f}" in said.stderr
    assert losses["seen"] < 0.8 * losses["blank"]
