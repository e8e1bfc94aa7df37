"""Creates and changes Megatron's parallel state, for `rrfp train` and `rrfp bench`.

The drop-in only reads the parallel state, through `rrfp.megatron.adapters.groups`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron.core import parallel_state

from rrfp.megatron.adapters.groups import virtual_pipeline_size


@contextmanager
def virtual_pipeline(size: int | None) -> Iterator[None]:
    """Set the virtual pipeline size (chunks per rank) in Megatron's parallel state for the block,
    and the current chunk to the first. None means no virtual pipeline. Both are restored after the
    block."""
    before = (
        virtual_pipeline_size(),
        parallel_state.get_virtual_pipeline_model_parallel_rank(),
    )
    _set_virtual_pipeline(size, None if size is None else 0)
    try:
        yield
    finally:
        _set_virtual_pipeline(*before)


def _set_virtual_pipeline(size: int | None, chunk: int | None) -> None:
    """Set the number of chunks per rank, and the current chunk, in Megatron's parallel state."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(size)
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)


class RankPlace(NamedTuple):
    """This process's rank in each of its groups."""

    pp_rank: int
    tp_rank: int
    dp_rank: int
    ep_rank: int


def create_groups(
    *, pp: int, tp: int, cp: int, ep: int, num_chunks: int | None, timeout_s: float
) -> RankPlace:
    """Create the groups of Megatron's parallel state and return this process's rank in each. Every
    process of the run must call it. `num_chunks` becomes the virtual pipeline size. The timeout is
    rounded to minutes, at least one."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    return RankPlace(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def destroy_groups() -> None:
    """Destroy the groups of Megatron's parallel state, if it has any."""
    parallel_state.destroy_model_parallel()


def context_parallel_size() -> int:
    """The context-parallel size in Megatron's parallel state."""
    return int(parallel_state.get_context_parallel_world_size())
