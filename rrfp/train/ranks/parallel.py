"""Joins the process groups of a run: torch's world, and Megatron's groups within it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.runtime.rendezvous import reachable_address
from rrfp.schedule.shape import Placement, Shape
from rrfp.train.ranks.devices import backend_of
from rrfp.train.ranks.gloo import one_device_at
from rrfp.train.ranks.stores import open_store
from rrfp.train.settings import TrainSettings

_CPU = torch.device("cpu")
_SEED_STRIDE = 100
"""The difference between seeds of neighbouring pipeline ranks, as in Megatron's training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This process' place in the parallel layout. Ranks are numbered tensor-parallel first, then
    data-parallel, then pipeline (Megatron's default order). Expert-parallel ranks are neighbouring
    replicas."""

    pp: int
    tp: int
    dp: int
    ep: int
    chunks: int
    placement: Placement
    pp_rank: int
    tp_rank: int
    dp_rank: int
    ep_rank: int
    device: torch.device = _CPU
    """Where its model and data are."""

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def rank(self) -> int:
        return self.first_rank(self.pp_rank) + self.dp_rank * self.tp + self.tp_rank

    def first_rank(self, pp_rank: int) -> int:
        """The smallest global rank of a pipeline rank."""
        return pp_rank * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this process holds, by chunk."""
        return self._shape.stages_of(self.pp_rank)

    @property
    def last_stage_pp_rank(self) -> int:
        """The pipeline rank of the last stage, where the losses are."""
        return self._shape.rank_of(self.num_stages - 1)

    @property
    def _shape(self) -> Shape:
        return Shape(self.pp, 1, self.chunks, self.placement)


@contextmanager
def parallel_groups(
    settings: TrainSettings, timeout_s: float = 900.0, device: torch.device = _CPU
) -> Iterator[Layout]:
    """Join the groups, seed Megatron's random states, and leave the groups at the end.

    RANK and WORLD_SIZE come from the environment; our launcher or torchrun (MASTER_ADDR,
    MASTER_PORT) says where the store is. gloo listens at one address: loopback if there is one
    host. `timeout_s` bounds every collective. `device` is what `take_device` returned.
    """
    with one_device_at(variables.LOOPBACK if settings.run.nnodes == 1 else reachable_address()):
        _join_the_world(backend_of(settings.run), timeout_s)
        with _megatrons_groups(settings, timeout_s, device) as layout:
            yield layout


def _join_the_world(backend: str, timeout_s: float) -> None:
    timeout, store = timedelta(seconds=timeout_s), open_store(timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


@contextmanager
def _megatrons_groups(
    settings: TrainSettings, timeout_s: float, device: torch.device
) -> Iterator[Layout]:
    from megatron.core import parallel_state

    asked = settings.layout
    try:
        if dist.get_world_size() != asked.world_size:
            raise RrfpError(
                f"{dist.get_world_size()} processes were started for {asked.world_size} ranks "
                f"(pp {asked.pp} x tp {asked.tp} x cp {asked.cp} x dp {asked.num_replicas}); start "
                "as many as ranks"
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.layout.tp,
            pipeline_model_parallel_size=settings.layout.pp,
            virtual_pipeline_model_parallel_size=virtual_pipeline_size(settings),
            context_parallel_size=settings.layout.cp,
            expert_model_parallel_size=settings.layout.ep,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        layout = Layout(
            pp=settings.layout.pp,
            tp=settings.layout.tp,
            dp=settings.layout.num_replicas,
            ep=settings.layout.ep,
            chunks=settings.layout.chunks,
            placement=settings.layout.placement,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            device=device,
        )
        assert layout.rank == dist.get_rank()
        seed_random_states(settings, layout)
        yield layout
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed_random_states(settings: TrainSettings, layout: Layout) -> None:
    """Reset torch's and Megatron's random states; joining the groups does this too."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed = settings.run.seed + _SEED_STRIDE * layout.pp_rank
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def virtual_pipeline_size(settings: TrainSettings) -> int | None:
    """The number of chunks to tell Megatron: only for a loop over several ranks, because it
    supports neither a V nor chunks on a single rank."""
    is_megatrons = (
        settings.layout.placement == Placement.LOOP
        and settings.layout.pp > 1
        and settings.layout.chunks > 1
    )
    return settings.layout.chunks if is_megatrons else None
