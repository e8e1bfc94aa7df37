"""What NIXL reads on a GPU: memory that CUDA gives, and none of torch's."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rrfp.runtime.device.cuda_runtime import BLOCK_BYTES
from rrfp.runtime.device.interface import CpuDevice, Device
from rrfp.runtime.planes import nixl as nixl_plane
from rrfp.runtime.planes.nixl import NixlPlane
from rrfp.runtime.planes.plane import PlaneRefusal
from tests.cuda_in_files import cudaError_t
from tests.cuda_ipc_in_files import cuda, memory_left, refuse

__all__ = ["cuda"]


class GpuInFiles(CpuDevice):
    """A device that says that it is a GPU."""

    torch_device = torch.device("cuda", 1)


class Agent:
    """In the place of NIXL's."""

    made: ClassVar[list[tuple[torch.Tensor, ...]]] = []

    def __init__(self, _: str, __: Device, *slabs: torch.Tensor) -> None:
        self.made.append(slabs)

    def close(self) -> None:
        pass


def test_nixl_reads_memory_of_a_gpu_that_is_none_of_torchs(
    cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_plane, "NixlAgent", Agent)
    Agent.made.clear()
    plane = NixlPlane(GpuInFiles(), 10_000)
    ((lent, landing),) = Agent.made
    assert plane.slab is lent
    assert [lent.numel(), landing.numel()] == [10_000, 10_000]
    assert {path.stat().st_size for path in cuda.iterdir()} == {BLOCK_BYTES}
    assert len(memory_left(cuda)) == 2
    plane.close(are_detached=True)
    assert memory_left(cuda) == []
    # Peers that were lost may have it open.
    NixlPlane(GpuInFiles(), 10_000).close(are_detached=False)
    assert len(memory_left(cuda)) == 2


def test_nixl_without_memory_of_a_gpu_is_refused(
    cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "cudaMalloc", cudaError_t.cudaErrorMemoryAllocation)
    with pytest.raises(PlaneRefusal, match=r"no outbox for NIXL \(cudaMalloc: cudaErrorMemory"):
        NixlPlane(GpuInFiles(), 10_000)
    assert memory_left(cuda) == []
