"""The calls of CUDA's runtime that rrfp makes, on the real bindings without a driver."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rrfp.runtime.device.cuda_runtime import CudaRuntime, CudaRuntimeError
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes.cuda_ipc import CudaIpcPlane
from rrfp.runtime.planes.plane import PlaneRefusal
from tests import cuda_in_files
from tests.cuda_in_files import cudaError_t

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


CALLS: dict[str, Callable[[CudaRuntime], object]] = {
    "cudaSetDevice": CudaRuntime.select,
    "cudaMalloc": lambda cuda: cuda.allocate(1),
    "cudaFree": lambda cuda: cuda.free(4096),
    "cudaIpcGetMemHandle": lambda cuda: cuda.export(4096),
    "cudaIpcOpenMemHandle": lambda cuda: cuda.open(bytes(64)),
    "cudaIpcCloseMemHandle": lambda cuda: cuda.close(4096),
    "cudaGetDeviceProperties": lambda cuda: cuda.name,
    "cudaGetDeviceCount": lambda cuda: cuda.lacks_access_to("GPU-1"),
    "cudaDeviceCanAccessPeer": lambda cuda: cuda.call("cudaDeviceCanAccessPeer", 0, 1),
    # Of `rrfp doctor`.
    "cudaStreamCreateWithFlags": lambda cuda: cuda.call("cudaStreamCreateWithFlags", 1),
    "cudaStreamSynchronize": lambda cuda: cuda.call("cudaStreamSynchronize", 0),
    "cudaDeviceSynchronize": lambda cuda: cuda.call("cudaDeviceSynchronize"),
    "cudaMemset": lambda cuda: cuda.call("cudaMemset", 4096, 0, 1),
    "cudaMemcpyAsync": lambda cuda: cuda.call(
        "cudaMemcpyAsync", 4096, 8192, 1, cuda.bindings.cudaMemcpyKind.cudaMemcpyDefault, 0
    ),
    "cudaEventCreate": lambda cuda: cuda.call("cudaEventCreate"),
    "cudaEventRecord": lambda cuda: cuda.call("cudaEventRecord", 0, 0),
    "cudaEventElapsedTime": lambda cuda: cuda.call("cudaEventElapsedTime", 0, 0),
}
DRIVER = "cudaErrorInsufficientDriver, CUDA driver version is insufficient"


@without_gpu
@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_without_a_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    with pytest.raises(CudaRuntimeError, match=f"cudaSetDevice: {DRIVER}"):
        CudaRuntime(0)
    select = CudaRuntime.select
    monkeypatch.setattr(CudaRuntime, "select", lambda _: None)
    cuda = CudaRuntime(0)
    monkeypatch.setattr(CudaRuntime, "select", select if name == "cudaSetDevice" else cuda.select)
    with pytest.raises(CudaRuntimeError, match=f"{name}: {DRIVER}"):
        CALLS[name](cuda)


def test_every_call_is_among_them() -> None:
    rooms = Path(__file__).parent.parent / "rrfp"
    called = {
        name
        for path in rooms.rglob("*.py")
        for name in re.findall(r'call\(\s*"(cuda\w+)"', path.read_text())
    }
    assert called == CALLS.keys()


@without_gpu
def test_the_plane_refuses_without_a_driver() -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    with pytest.raises(PlaneRefusal, match=f"^cudaSetDevice: {DRIVER}"):
        CudaIpcPlane(CPU, 1024)


def test_what_stands_in_for_the_bindings_has_what_they_have() -> None:
    """Names, and what they take: a handle tells where its octets lie, and nothing else."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    for name in dir(cuda_in_files):
        if name.startswith("cuda"):
            assert hasattr(runtime, name), name
    for error in cudaError_t:
        assert int(getattr(runtime.cudaError_t, error.name)) == error
    assert runtime.cudaIpcMemHandle_t().getPtr()
    assert len(runtime.cudaDeviceProp().uuid.bytes) == 16
    assert runtime.cudaIpcMemLazyEnablePeerAccess == cuda_in_files.cudaIpcMemLazyEnablePeerAccess
