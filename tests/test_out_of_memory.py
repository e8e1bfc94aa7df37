"""What a rank says that runs out of memory."""

import pytest
import torch

from rrfp.runtime.out_of_memory import OutOfMemoryError, told_when_out_of_memory
from rrfp.schedule.tasks import Kind, Task

TASK = Task(3, Kind.F, 7)
GIB = 2**30


def fail(error: BaseException, held_bytes: int, held: float) -> str:
    with (
        pytest.raises(OutOfMemoryError) as raised,
        told_when_out_of_memory(5, TASK, held_bytes, held),
    ):
        raise error
    return str(raised.value)


def test_it_says_what_was_held_and_what_would_have_fitted() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert fail(error, 20 * GIB, 9.5) == (
        "rank 5 ran out of memory in 3F7, with 20 GiB of activations of 9.5 microbatches held; "
        "--hold 18GiB would have fitted (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


def test_without_sizes_it_counts_microbatches() -> None:
    told = fail(MemoryError("no memory"), 0, 4)
    assert "with activations of 4 microbatches held; --hold 3 would have fitted" in told


def test_where_one_microbatch_does_not_fit_no_hold_helps() -> None:
    told = fail(torch.OutOfMemoryError("CUDA out of memory"), GIB, 1)
    assert "no hold is smaller: use --recompute, smaller microbatches, or more ranks" in told


def test_a_real_allocation_that_fails_on_the_cpu_is_told() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="rank 5 ran out of memory in 3F7"),
        told_when_out_of_memory(5, TASK, 3 * GIB, 2),
    ):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nSearch for more",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_cuda_itself_does_not_get_is_told(message: str) -> None:
    assert "ran out of memory in 3F7" in fail(torch.AcceleratorError(message), GIB, 2)


class LostPeerError(RuntimeError):
    """As torch's own errors of collectives and accelerators, which derive from RuntimeError."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        NotImplementedError("no kernel"),
        LostPeerError("NCCL: connection closed"),
    ],
)
def test_other_errors_pass(error: RuntimeError) -> None:
    with (
        pytest.raises(type(error), match=str(error)) as raised,
        told_when_out_of_memory(5, TASK, 0, 1),
    ):
        raise error
    assert raised.value is error
