"""A rank that runs out of memory: what was held, and which hold would have fitted."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.schedule.policy import Bytes, format_bytes
from rrfp.schedule.tasks import Task

_SHARE = 0.9
"""Of what was held when memory ran out: the rest is for the task's own temporary tensors."""
_MIB = 2**20
_WORDS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that have no class of their own: of torch's memory on the CPU, and of CUDA's memory
beside torch's, as for kernels that are loaded late."""


class OutOfMemoryError(RrfpError):
    """The device's memory did not suffice for a task."""


@contextmanager
def told_when_out_of_memory(
    rank: int, task: Task, held_bytes: int, held_microbatches: float
) -> Iterator[None]:
    """Wrap a task that begins with these activations held; `held_bytes` is 0 if not known. Raises
    OutOfMemoryError instead of what an allocator raises."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"rank {rank} ran out of memory in {task}, with "
            f"{_held(held_bytes, held_microbatches)}; {_advice(held_bytes, held_microbatches)} "
            f"({first_line(str(error))})"
        ) from error


def _is_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether an allocator raised it."""
    told = str(error)
    of_memory = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, of_memory) or any(words in told for words in _WORDS)


def _held(held_bytes: int, held_microbatches: float) -> str:
    size = "" if held_bytes == 0 else f"{format_bytes(held_bytes)} of "
    return f"{size}activations of {held_microbatches:g} microbatches held"


def _advice(held_bytes: int, held_microbatches: float) -> str:
    fitting = int(_SHARE * held_bytes) // _MIB * _MIB
    if held_microbatches > 1 and fitting > 0:
        return f"--hold {Bytes(fitting)} would have fitted"
    if held_microbatches > 1:
        return f"--hold {max(1, int(held_microbatches) - 1)} would have fitted"
    return "no hold is smaller: use --recompute, smaller microbatches, or more ranks"
