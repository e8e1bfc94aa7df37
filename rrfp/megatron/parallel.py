"""Joins the process groups of a run: torch's gloo world, and Megatron's groups inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.megatron.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Layout:
    """This process' place among all of them. Ranks are numbered tensor-parallel first, then
    data-parallel, then pipeline (Megatron's default order)."""

    pp: int
    tp: int
    dp: int
    pp_rank: int
    tp_rank: int
    dp_rank: int

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def rank(self) -> int:
        return (self.pp_rank * self.dp + self.dp_rank) * self.tp + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


@contextmanager
def parallel_groups(settings: TrainSettings, timeout_s: float = 300.0) -> Iterator[Layout]:
    """Join the groups, seed Megatron's random states, and leave the groups at the end.

    The addresses come from the environment that torch's elastic launcher sets (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT). `timeout_s` bounds every collective. `prepare_host` comes first.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        if dist.get_world_size() != settings.world_size:
            raise RrfpError(
                f"{dist.get_world_size()} processes were started for {settings.world_size} ranks "
                f"(pp {settings.pp} x tp {settings.tp} x dp {settings.dp}); start as many as ranks"
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tp,
            pipeline_model_parallel_size=settings.pp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        layout = Layout(
            pp=settings.pp,
            tp=settings.tp,
            dp=settings.dp,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
        )
        assert layout.rank == dist.get_rank()
        torch.manual_seed(settings.seed)
        model_parallel_cuda_manual_seed(settings.seed, force_reset_rng=True)
        yield layout
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
