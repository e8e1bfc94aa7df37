"""The plane of CUDA IPC: its protocol over a stand-in for CUDA, in whose place are files, what it
says of a CUDA that refuses, and the real bindings without a driver."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.runtime.device.cpu import CPU, CpuDevice
from rrfp.runtime.device.cuda_runtime import BLOCK_BYTES, CudaRuntime, CudaRuntimeError
from rrfp.runtime.device.simulated import SimulatedDevice
from rrfp.runtime.planes import cuda_ipc_plane as file
from rrfp.runtime.planes import nixl_plane, rank_planes
from rrfp.runtime.planes.cuda_ipc_plane import CudaIpcPlane, CudaIpcPuller
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.nixl_plane import NixlPlane
from rrfp.runtime.planes.packing import Form
from rrfp.runtime.planes.plane import Offer, PlaneRefusal, Pull
from rrfp.runtime.planes.rank_planes import RankPlanes
from rrfp.runtime.planes.settling import Settled
from rrfp.runtime.protocols import Arrived, Failed, Inbox
from rrfp.schedule.tasks import Kind, Task
from tests import cuda_in_files
from tests.cuda_in_files import cudaError_t
from tests.link_pairs import pair, take
from tests.ranks import run_ranks
from tests.simulated_ranks import Mistake, exchange
from tests.test_planes import OUTBOX_BYTES, filled, message, own_store, transport
from tests.test_simulated_device import MISTAKES

CUDA_IPC = TransportName.CUDA_IPC
CHOICES = {"cpu": {CUDA_IPC: ((CUDA_IPC, TransportName.BOUNCE), (TransportName.BOUNCE,))}}
"""Simulated devices lie on the CPU. As on GPUs, bounce comes after."""
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def put_files_in_place_of_cuda(directory: Path, set_attribute: Callable[..., None]) -> None:
    """Have files there in the place of CUDA."""
    os.environ[cuda_in_files.DIRECTORY] = str(directory)
    for name in ("cuda", "cuda.bindings"):
        set_attribute(sys.modules, name, ModuleType(name))
    set_attribute(sys.modules, "cuda.bindings.runtime", cuda_in_files)
    sys.modules["cuda.bindings"].runtime = cuda_in_files  # type: ignore[attr-defined] # bare
    rank_planes.CHOICES = CHOICES


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CUDA in files; at the end nothing was freed while somebody had it open."""
    monkeypatch.setenv(cuda_in_files.DIRECTORY, "")
    monkeypatch.setattr(rank_planes, "CHOICES", CHOICES)
    monkeypatch.setattr(cuda_in_files, "freed_open", [])
    put_files_in_place_of_cuda(tmp_path, monkeypatch.setitem)
    yield tmp_path
    assert cuda_in_files.freed_open == []


def memory_left(directory: Path) -> list[str]:
    """What is allocated or open."""
    return [path.name for path in directory.iterdir()]


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, error: cudaError_t) -> None:
    monkeypatch.setattr(cuda_in_files, call, lambda *_: (error, None))


def planes() -> RankPlanes:
    return RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)


# What arrives.


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 1 else pytest.mark.slow) for seed in range(5)]
)
def test_nothing_is_corrupt_and_all_is_freed(cuda: Path, seed: int) -> None:
    findings = exchange(
        seed,
        500,
        Mistake(),
        make_plane=lambda device, size, _: CudaIpcPlane(device, size),
        plane=CUDA_IPC,
    )
    assert (findings.num_arrived, findings.num_corrupt) == (500, 0)
    assert memory_left(cuda) == []


def test_a_rank_that_says_farewell_before_it_detaches_is_found(cuda: Path) -> None:
    exchange(
        0,
        100,
        MISTAKES["detach after free"],
        make_plane=lambda device, size, _: CudaIpcPlane(device, size),
        plane=CUDA_IPC,
    )
    assert cuda_in_files.freed_open
    cuda_in_files.freed_open.clear()


def test_the_speed_is_told(cuda: Path) -> None:
    with pair(make_planes=planes) as ranks:
        for transport in ranks.transports:
            (settled,) = transport.settled.values()
            assert settled.plane is CUDA_IPC
            assert settled.gb_per_s
            assert settled.why == ""
    assert memory_left(cuda) == []


def test_a_peer_on_another_host_is_told_of(cuda: Path) -> None:
    with pair(make_planes=planes, allow_unix=False) as ranks:
        why = "rank 1 is on another host"
        assert ranks.transports[0].settled == {1: Settled(TransportName.BOUNCE, None, why)}


def test_a_slab_has_blocks_of_its_own(cuda: Path) -> None:
    plane = CudaIpcPlane(CPU, 10_000)
    assert plane.slab.numel() == 10_000
    (path,) = cuda.iterdir()
    assert path.stat().st_size == BLOCK_BYTES
    assert not plane.slab.any()
    plane.close(are_detached=True)


class GpuInFiles(CpuDevice):
    """A device that says that it is a GPU."""

    torch_device = torch.device("cuda", 1)


class Agent:
    """In the place of NIXL's."""

    made: ClassVar[list[tuple[torch.Tensor, ...]]] = []

    def __init__(self, _: str, *slabs: torch.Tensor) -> None:
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


def test_an_arrival_is_told_when_the_host_has_seen_the_copy(cuda: Path) -> None:
    """And a puller that is detached lets its copies end."""
    device = SimulatedDevice(mean_delay_s=2e-3)
    owner, reader = CudaIpcPlane(device, BLOCK_BYTES), CudaIpcPlane(device, BLOCK_BYTES)
    owner.slab.fill_(7)
    puller, _ = reader.attach(owner.offer(), 0, 1.0)
    told: list[bool] = []
    pull = Pull(0, Task(0, Kind.F, 0), 0, (Form(torch.uint8, (4096,)),), 256, 0, is_lent=False)

    def pulled(_: Pull, tensors: object) -> None:
        assert isinstance(tensors, list)
        told.append(bool((tensors[0] == 7).all()))

    puller.pull(pull, pulled, lambda _: None)
    assert told == [True]
    puller.detach()
    puller.detach()  # once is enough
    puller.pull(pull, pulled, lambda _: None)
    assert told == [True]
    owner.close(are_detached=True)
    reader.close(are_detached=True)
    device.close()
    assert memory_left(cuda) == []


def test_memory_is_closed_once_no_copy_reads_it(
    cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(mean_delay_s=0.0)
    plane = CudaIpcPlane(device, BLOCK_BYTES)
    puller, _ = plane.attach(plane.offer(), 0, 1.0)
    assert isinstance(puller, CudaIpcPuller)
    happened: list[str] = []
    close = cuda_in_files.cudaIpcCloseMemHandle

    def told(address: int) -> tuple[int]:
        happened.append("closed")
        return close(address)

    monkeypatch.setattr(cuda_in_files, "cudaIpcCloseMemHandle", told)

    def copy() -> None:
        time.sleep(0.05)
        happened.append("copied")

    device.launch(copy, puller._stream)
    puller.detach()
    assert happened == ["copied", "closed"]
    plane.close(are_detached=True)
    device.close()


def test_a_message_beyond_the_slab_is_an_error_of_the_link(cuda: Path) -> None:
    owner, reader = CudaIpcPlane(CPU, 1024), CudaIpcPlane(CPU, 1024)
    puller, _ = reader.attach(owner.offer(), 3, 1.0)
    pull = Pull(0, Task(0, Kind.F, 0), 0, (Form(torch.uint8, (4096,)),), 0, 0, is_lent=False)
    told: list[str] = []
    puller.pull(pull, lambda _, error: told.append(str(error)), lambda _: None)
    assert told[0].startswith("rank 3 posted 0F0 beyond its outbox of 1024 bytes")
    puller.detach()


# Between processes.


def _in_a_rank(directory: str) -> None:
    put_files_in_place_of_cuda(Path(directory), dict.__setitem__)


def _exchange(directory: str) -> list[str]:
    _in_a_rank(directory)
    rank, inbox = int(os.environ["RANK"]), Inbox()
    made = transport(rank, 2, own_store(), inbox, CUDA_IPC)
    size = OUTBOX_BYTES // 4
    for number in range(12):
        made.send(1 - rank, message(number, filled(size, number)))
    for event in take(inbox, 12)[:12]:  # and then perhaps a farewell
        assert isinstance(event, Arrived), event
        (tensor,) = event.message.tensors
        assert tensor is not None
        assert bool((tensor == event.message.task.microbatch).all())
        made.consumed(1 - rank, 0)
    plane = str(made.settled[1 - rank].plane)
    made.close()
    return [plane, *map(str, cuda_in_files.freed_open)]


def test_two_processes_exchange_and_free_in_order(tmp_path: Path) -> None:
    assert run_ranks(2, _exchange, str(tmp_path)) == [["cuda-ipc"]] * 2
    assert memory_left(tmp_path) == []


def _killed(directory: str) -> tuple[str, int] | None:
    """Rank 1's child is killed while it has rank 0's slab open."""
    _in_a_rank(directory)
    rank, inbox = int(os.environ["RANK"]), Inbox()
    if rank == 1 and os.fork():
        os.wait()
        return None
    made = transport(rank, 2, own_store(), inbox, CUDA_IPC)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    event, *_ = take(inbox, 1)
    assert isinstance(event, Failed)
    made.close(farewell=False)
    return str(event.error), len(cuda_in_files.freed_open)


def test_what_a_lost_peer_had_open_is_not_freed(tmp_path: Path) -> None:
    found, _ = run_ranks(2, _killed, str(tmp_path))
    assert found is not None
    told, num_freed_open = found
    assert told.startswith("rank 1 closed its connection without a farewell")
    assert num_freed_open == 0


# What is refused.


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

        def synchronize(self, _: object) -> None:
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


# The bindings themselves, without a driver.


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


def test_on_a_cpu_it_is_refused() -> None:
    with pytest.raises(UsageError, match="transport cuda-ipc does not carry tensors on cpu"):
        RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)
