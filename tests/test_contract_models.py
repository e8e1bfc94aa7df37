"""What is trained, and how its ranks share it, against Megatron's own schedule: losses, gradient
norms and parameters are the same to the last bit."""

from pathlib import Path
from typing import Any

import pytest

from rrfp.megatron.settings import TrainSettings
from rrfp.schedule.shape import Shape
from tests.ranks import run_ranks
from tests.rigs import MICROBATCHES, backwards_in_reverse
from tests.training import SMALL, train_variants

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True},
    "bf16": {"dtype": "bf16"},
    "tied in bf16": {"tie_embeddings": True, "dtype": "bf16"},
    "recompute all": {"recompute": "full"},
    "recompute attention": {"recompute": "selective"},
    "lengths": {"variable_lengths": True, "seq_length": 64},
    "experts": {"experts": 4},
    "experts in bf16": {"experts": 4, "dtype": "bf16"},
    "experts recomputed": {"experts": 4, "recompute": "full"},
    "optimizer": {"distributed_optimizer": True},
    "optimizer in bf16": {"distributed_optimizer": True, "dtype": "bf16"},
    "optimizer with experts": {"distributed_optimizer": True, "experts": 4},
}
DENSE = ["tied", "bf16", "recompute all", "recompute attention", "lengths"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "models"),
    [
        pytest.param({"pp": 2}, DENSE, marks=pytest.mark.slow),
        # At two ranks Megatron's own interleaving mixes up its messages over gloo.
        pytest.param(
            {"pp": 3, "chunks": 2, "layers": 6, "microbatches": 6}, DENSE, marks=pytest.mark.slow
        ),
        pytest.param(
            {"pp": 2, "tp": 2, "sequence_parallel": True},
            ["tied in bf16", "recompute all", "lengths", "experts"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "dp": 2},
            ["tied", "optimizer", "optimizer in bf16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "ep": 2},
            ["experts in bf16", "experts recomputed", "optimizer with experts"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pp2", "pp3-c2", "pp2-tp2-sp", "pp2-dp2", "pp2-ep2"],
)
def test_every_model_learns_the_same(
    layout: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    settings = {**SMALL, "microbatches": MICROBATCHES, "steps": 2, **layout}
    chosen = TrainSettings(**settings)
    shape = Shape(chosen.pp, chosen.microbatches, chosen.chunks)
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", shape)
    schedules: list[dict[str, Any]] = [
        {"dispatch": "megatron"},
        {"hint": "bfw"},
        {"hint": reverse},
    ]
    variants = [MODELS[model] | schedule for model in models for schedule in schedules]
    by_rank = run_ranks(chosen.world_size, train_variants, settings, variants, timeout_s=300)
    for runs in by_rank:
        for index, model in enumerate(models):
            first = index * len(schedules)
            expected, *found = runs[first : first + len(schedules)]
            for schedule, run in zip(schedules[1:], found, strict=True):
                assert run.losses == expected.losses, (model, schedule)
                assert run.grad_norms == expected.grad_norms, (model, schedule)
                assert run.parameters_sha256 == expected.parameters_sha256, (model, schedule)
    learned = {tuple(run.losses) for run in by_rank[0]}
    # What is recomputed does not change what is learned.
    num_different = len({model.replace("recompute attention", "recompute all") for model in models})
    assert len(learned) == num_different
