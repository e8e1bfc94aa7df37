"""The distributed optimizer with its communication overlapped: gradients are reduced, and
parameters gathered, by the hooks of Megatron's DistributedDataParallel while tasks run."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rrfp.schedule.shape import Shape
from tests.ranks import run_ranks
from tests.rigs import MICROBATCHES, backwards_in_reverse
from tests.training import SMALL, RankRun, train_variants

PP2_DP2 = {
    **SMALL,
    "pp": 2,
    "dp": 2,
    "microbatches": MICROBATCHES,
    "distributed_optimizer": True,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_overlapped_reduction_and_gathering_learn_the_same(num_chunks: int, tmp_path: Path) -> None:
    shape = Shape(2, MICROBATCHES, num_chunks)
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", shape)
    hints = [{"hint": hint} for hint in ("bf", "bfw", reverse)]
    # Over two ranks Megatron's own interleaving mixes up its messages.
    first = {"dispatch": "megatron"} if num_chunks == 1 else {}
    settings = {**PP2_DP2, "chunks": num_chunks}
    for not_overlapped, *runs in run_ranks(
        4, train_overlapped, settings, [first, first, *hints], timeout_s=300
    ):
        for run in runs:
            assert run.losses == runs[0].losses
            assert run.grad_norms == runs[0].grad_norms
            assert run.parameters_sha256 == runs[0].parameters_sha256
        # Other buckets give each rank another share of the sum that a norm is.
        assert runs[0].losses == pytest.approx(not_overlapped.losses, rel=1e-5)
        assert runs[0].grad_norms == pytest.approx(not_overlapped.grad_norms, rel=1e-5)
        # Each rank has its own share of the last parameters only: the rest is not gathered yet.
        assert runs[0].parameters_sha256 != not_overlapped.parameters_sha256


def train_overlapped(settings: dict[str, Any], variants: list[dict[str, Any]]) -> list[RankRun]:
    """Train with each of the variants, with nothing overlapped in the first only."""
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from megatron.core import distributed, optimizer

    def from_the_second_on(configured: Callable[..., Any], **overlapped: Any) -> Any:
        calls = count()

        def made(**given: Any) -> Any:
            return configured(**given, **(overlapped if next(calls) > 0 else {}))

        return made

    ddp_config = from_the_second_on(
        distributed.DistributedDataParallelConfig,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=2000,
    )
    optimizer_config = from_the_second_on(optimizer.OptimizerConfig, overlap_param_gather=True)
    with (
        patch.object(distributed, "DistributedDataParallelConfig", ddp_config),
        patch.object(optimizer, "OptimizerConfig", optimizer_config),
    ):
        return train_variants(settings, variants)
