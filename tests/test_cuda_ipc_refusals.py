"""What the plane of CUDA IPC says of a CUDA that refuses, and of offers that it cannot take."""

import sys
from pathlib import Path

import pytest

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import CudaRuntime
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes import cuda_ipc as file
from rrfp.runtime.planes.cuda_ipc import CudaIpcPlane
from rrfp.runtime.planes.negotiation import Settled
from rrfp.runtime.planes.plane import Offer, PlaneRefusal
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Arrived
from tests import cuda_in_files
from tests.cuda_in_files import cudaError_t
from tests.cuda_ipc_in_files import CUDA_IPC, cuda, memory_left, planes, refuse
from tests.doubles.simulated_device import SimulatedDevice
from tests.link_pairs import pair, take
from tests.test_planes import OUTBOX_BYTES, filled, message

__all__ = ["cuda"]


def settled_with(why: str) -> dict[int, Settled]:
    """Of a link that takes the next plane."""
    return {1: Settled(TransportName.BOUNCE, None, why)}


MEMORY = "cudaErrorMemoryAllocation, invalid argument"
MAPPING = "cudaErrorMapBufferObjectFailed, mapping of buffer object failed"


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (
            "cudaSetDevice",
            cudaError_t.cudaErrorInvalidDevice,
            "cudaSetDevice: cudaErrorInvalidDevice, invalid argument",
        ),
        (
            "cudaGetDeviceProperties",
            cudaError_t.cudaErrorInvalidValue,
            "cudaGetDeviceProperties: cudaErrorInvalidValue, invalid argument",
        ),
        (
            "cudaMalloc",
            cudaError_t.cudaErrorMemoryAllocation,
            f"CUDA gives no outbox of {OUTBOX_BYTES} bytes (cudaMalloc: {MEMORY})",
        ),
        (
            "cudaIpcGetMemHandle",
            cudaError_t.cudaErrorMapBufferObjectFailed,
            f"CUDA exports no memory (cudaIpcGetMemHandle: {MAPPING})",
        ),
        (
            "cudaGetDeviceCount",
            cudaError_t.cudaErrorInvalidValue,
            "the CUDA memory of rank 0 cannot be opened (cudaGetDeviceCount: cudaErrorInvalidValue,"
            " invalid argument)",
        ),
        (
            "cudaIpcOpenMemHandle",
            cudaError_t.cudaErrorMapBufferObjectFailed,
            f"the CUDA memory of rank 0 cannot be opened (cudaIpcOpenMemHandle: {MAPPING})",
        ),
    ],
)
def test_a_call_that_fails_is_named_and_the_next_plane_serves(
    cuda: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: cudaError_t,
    why: str,
) -> None:
    refuse(monkeypatch, call, error)
    with pair(make_planes=planes) as ranks:
        assert ranks.transports[0].settled == settled_with(why)
        ranks.transports[0].send(1, message(5, filled(OUTBOX_BYTES // 2, 5)))
        assert isinstance(take(ranks.inboxes[1], 1)[0], Arrived)
    assert memory_left(cuda) == []


def test_a_gpu_without_peer_access_is_named(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CPU.selected():
        other = CudaRuntime(1).name
    plane = CudaIpcPlane(CPU, 1024)
    offer = plane.offer()
    offer = Offer(offer.plane, {**offer.values, "gpu": other})
    puller, _ = plane.attach(offer, 4, 1.0)
    puller.detach()
    monkeypatch.setattr(cuda_in_files, "cudaDeviceCanAccessPeer", lambda *_: (0, 0))
    with pytest.raises(PlaneRefusal) as refusal:
        plane.attach(offer, 4, 1.0)
    assert str(refusal.value) == (
        "GPU-00000000-0000-0000-0000-000000000000 has no peer access to"
        " GPU-01010101-0101-0101-0101-010101010101 of rank 4; see nvidia-smi topo -m"
    )
    # Its own memory a GPU reaches, though CUDA does not call that a peer's.
    puller, _ = plane.attach(plane.offer(), 4, 1.0)
    puller.detach()
    plane.close(are_detached=True)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"handle": None}, "rank 4 sent no handle of CUDA memory"),
        ({"bytes": "many"}, "rank 4 sent no handle of CUDA memory"),
        ({"bytes": 0}, "rank 4 sent a handle of 0 bytes"),
        ({"gpu": 0}, "rank 4 sent no handle of CUDA memory"),
        ({"handle": "bits"}, "the CUDA memory of rank 4 cannot be opened (non-hexadecimal"),
        ({"handle": "00ff"}, "the CUDA memory of rank 4 cannot be opened (a handle has 64 bytes"),
        (
            {"pid_namespace": "pid:[1]"},
            "CUDA IPC needs one PID namespace, and rank 4 is in pid:[1], its receiver in pid:[",
        ),
    ],
)
def test_an_offer_that_cannot_be_taken(cuda: Path, told: dict[str, object], why: str) -> None:
    plane = CudaIpcPlane(CPU, 1024)
    offer = plane.offer()
    with pytest.raises(PlaneRefusal) as refusal:
        plane.attach(Offer(offer.plane, {**offer.values, **told}), 4, 1.0)
    assert str(refusal.value).startswith(why)
    plane.close(are_detached=True)
    assert memory_left(cuda) == []


def test_a_copy_that_fails_is_a_refusal_and_the_memory_is_closed(cuda: Path) -> None:
    class Fails(SimulatedDevice):
        def copy(self, *_: object) -> None:
            raise RuntimeError("CUDA error: peer mapping resources exhausted\nmore words")

        def synchronize(self, _: object, *, soon: bool = False) -> None:
            raise RuntimeError("CUDA error: peer mapping resources exhausted")

    device = Fails()
    plane = CudaIpcPlane(device, 1024)
    with pytest.raises(PlaneRefusal) as refusal:
        plane.attach(plane.offer(), 4, 1.0)
    assert str(refusal.value) == (
        "the CUDA memory of rank 4 cannot be copied (CUDA error: peer mapping resources exhausted)"
    )
    plane.close(are_detached=True)
    device.close()
    assert memory_left(cuda) == []


def test_memory_that_is_not_given_back_is_told(
    cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that has failed fails again; the run has its error already."""
    plane = CudaIpcPlane(CPU, 1024)
    puller, _ = plane.attach(plane.offer(), 4, 1.0)
    for call in ("cudaIpcCloseMemHandle", "cudaFree"):
        refuse(monkeypatch, call, cudaError_t.cudaErrorInvalidValue)
    puller.detach()
    plane.close(are_detached=True)
    assert [record.getMessage() for record in caplog.records] == [
        "the CUDA memory of rank 4 was not closed: cudaIpcCloseMemHandle: cudaErrorInvalidValue,"
        " invalid argument",
        "the outbox was not freed: cudaFree: cudaErrorInvalidValue, invalid argument",
    ]


def test_without_a_pid_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_PID_NAMESPACE", tmp_path / "none")
    with pytest.raises(PlaneRefusal, match=r"the PID namespace is unknown \(.*\); mount /proc"):
        CudaIpcPlane(CPU, 1024)


def test_without_the_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(PlaneRefusal) as refusal:
        CudaIpcPlane(CPU, 1024)
    assert str(refusal.value).startswith("cuda-bindings cannot be imported (")
    assert str(refusal.value).endswith("); pip install 'rrfp[cuda]'")


def test_on_a_cpu_it_is_refused() -> None:
    with pytest.raises(UsageError, match="transport cuda-ipc does not carry tensors on cpu"):
        RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)
