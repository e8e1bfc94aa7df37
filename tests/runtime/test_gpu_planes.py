"""The planes of CUDA IPC and NIXL carry, refuse and leave nothing behind, over stand-ins."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, cast

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import BLOCK_BYTES, CudaRuntime
from rrfp.runtime.device.interface import CPU, CpuDevice, Device, Stream
from rrfp.runtime.planes import cuda_ipc as file
from rrfp.runtime.planes import nixl as nixl_agent
from rrfp.runtime.planes import nixl as nixl_plane
from rrfp.runtime.planes import registry
from rrfp.runtime.planes.codec import Form
from rrfp.runtime.planes.cuda_ipc import CudaIpcFetcher, CudaIpcPlane
from rrfp.runtime.planes.nixl import NixlPlane
from rrfp.runtime.planes.plane import (
    Completion,
    Descriptor,
    Fetched,
    Fetcher,
    Offer,
    PlaneFailed,
    PlaneRefusal,
)
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import PlaneChoice, RankPlanes
from rrfp.runtime.protocols import Inbox, LinkFailed, Message, MessageArrived
from rrfp.schedule.tasks import Kind, Task
from tests.doubles import cuda_in_files
from tests.doubles.cuda_in_files import cudaError_t
from tests.doubles.simulated_device import SimulatedDevice
from tests.e2e.ranks import run_ranks
from tests.runtime.link_pairs import Mistake, exchange, pair, plane_choices, take
from tests.runtime.test_planes import OUTBOX_BYTES, filled, message, own_store, transport
from tests.runtime.test_simulated_device import MISTAKES

# The plane of CUDA IPC with files in the place of CUDA, and what is left in them.


CUDA_IPC = TransportName.CUDA_IPC
CHOICES = {"cpu": {CUDA_IPC: ((CUDA_IPC, TransportName.BOUNCE), (TransportName.BOUNCE,))}}
"""Simulated devices lie on the CPU. As on GPUs, bounce comes after."""


def put_files_in_place_of_cuda(directory: Path, set_attribute: Callable[..., None]) -> None:
    """Have files there in the place of CUDA."""
    os.environ[cuda_in_files.DIRECTORY] = str(directory)
    for name in ("cuda", "cuda.bindings"):
        set_attribute(sys.modules, name, ModuleType(name))
    set_attribute(sys.modules, "cuda.bindings.runtime", cuda_in_files)
    sys.modules["cuda.bindings"].runtime = cuda_in_files  # type: ignore[attr-defined] # bare
    registry.CHOICES = CHOICES


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CUDA in files; at the end nothing was freed while somebody had it open."""
    monkeypatch.setenv(cuda_in_files.DIRECTORY, "")
    monkeypatch.setattr(registry, "CHOICES", CHOICES)
    monkeypatch.setattr(cuda_in_files, "freed_open", [])
    put_files_in_place_of_cuda(tmp_path, monkeypatch.setitem)
    yield tmp_path
    assert cuda_in_files.freed_open == []


def memory_left(directory: Path) -> list[str]:
    """Memory that is allocated or open."""
    return [path.name for path in directory.iterdir()]


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, error: cudaError_t) -> None:
    monkeypatch.setattr(cuda_in_files, call, lambda *_: (error, None))


class Queue:
    """A link's queue that calls a function."""

    def __init__(self, put: Callable[[Completion], None]) -> None:
        self.put = put


MESSAGE = Message(0, Task(0, Kind.F, 0), ())


def planes() -> RankPlanes:
    return RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)


# The plane of CUDA IPC: its protocol over a stand-in for CUDA, in whose place are files, in one
# process and between two.


__all__ = ["cuda"]


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


def test_the_speed_is_reported(cuda: Path) -> None:
    with pair(make_planes=planes) as ranks:
        for transport in ranks.transports:
            (settled,) = plane_choices(transport).values()
            assert settled.plane is CUDA_IPC
            assert settled.gb_per_s
            assert settled.why == ""
    assert memory_left(cuda) == []


def test_a_peer_on_another_host_is_named_as_the_reason(cuda: Path) -> None:
    with pair(make_planes=planes, allow_unix=False) as ranks:
        expected = PlaneChoice(TransportName.BOUNCE, None, "rank 1 is on another host")
        assert plane_choices(ranks.transports[0]) == {1: expected}


def test_a_slab_has_blocks_of_its_own(cuda: Path) -> None:
    plane = CudaIpcPlane(CPU, 10_000)
    assert plane.slab.numel() == 10_000
    (path,) = cuda.iterdir()
    assert path.stat().st_size == BLOCK_BYTES
    assert not plane.slab.any()
    plane.close(are_detached=True)


def test_an_arrival_is_reported_when_the_host_has_seen_the_copy(cuda: Path) -> None:
    """A fetcher that detaches lets its copies end."""
    device = SimulatedDevice(mean_delay_s=2e-3)
    owner, reader = CudaIpcPlane(device, BLOCK_BYTES), CudaIpcPlane(device, BLOCK_BYTES)
    owner.slab.fill_(7)
    fetcher = reader.attach(owner.offer(), 0, 1.0).fetcher
    told: list[bool] = []
    descriptor = Descriptor((Form(torch.uint8, (4096,)),), 256)

    def fetched(completion: Completion) -> None:
        assert isinstance(completion, Fetched)
        (tensor,) = completion.tensors
        assert tensor is not None
        told.append(bool((tensor == 7).all()))

    fetcher.fetch(descriptor, MESSAGE, Queue(fetched))
    assert told == [True]
    fetcher.detach()
    fetcher.detach()  # once is enough
    fetcher.fetch(descriptor, MESSAGE, Queue(fetched))
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
    fetcher = plane.attach(plane.offer(), 0, 1.0).fetcher
    assert isinstance(fetcher, CudaIpcFetcher)
    happened: list[str] = []
    close = cuda_in_files.cudaIpcCloseMemHandle

    def closed(address: int) -> tuple[int]:
        happened.append("closed")
        return close(address)

    monkeypatch.setattr(cuda_in_files, "cudaIpcCloseMemHandle", closed)

    def copy() -> None:
        time.sleep(0.05)
        happened.append("copied")

    device.launch(copy, fetcher._stream)
    fetcher.detach()
    assert happened == ["copied", "closed"]
    plane.close(are_detached=True)
    device.close()


@pytest.mark.timeout(20)
def test_a_lost_link_does_not_wait_for_a_device_that_hangs(cuda: Path) -> None:
    device = SimulatedDevice(mean_delay_s=0.0)
    plane = CudaIpcPlane(device, BLOCK_BYTES)
    fetcher = plane.attach(plane.offer(), 0, 1.0).fetcher
    assert isinstance(fetcher, CudaIpcFetcher)
    goes_on = threading.Event()
    device.launch(lambda: cast(None, goes_on.wait()), fetcher._stream)
    fetcher.detach(waits=False)
    assert fetcher._slab is None
    goes_on.set()
    plane.close(are_detached=False)
    device.close()


def test_a_message_beyond_the_slab_is_an_error_of_the_link(cuda: Path) -> None:
    owner, reader = CudaIpcPlane(CPU, 1024), CudaIpcPlane(CPU, 1024)
    fetcher = reader.attach(owner.offer(), 3, 1.0).fetcher
    told: list[str] = []

    def failed(completion: Completion) -> None:
        assert isinstance(completion, PlaneFailed)
        told.append(str(completion.error))

    fetcher.fetch(Descriptor((Form(torch.uint8, (4096,)),), 0), MESSAGE, Queue(failed))
    assert told[0].startswith("rank 3 posted 0F0 beyond its outbox of 1024 bytes")
    fetcher.detach()


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
        assert isinstance(event, MessageArrived), event
        (tensor,) = event.message.tensors
        assert tensor is not None
        assert bool((tensor == event.message.task.microbatch).all())
        made.consumed(1 - rank, 0)
    plane = str(plane_choices(made)[1 - rank].plane)
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
    assert isinstance(event, LinkFailed)
    made.close(farewell=False)
    return str(event.error), len(cuda_in_files.freed_open)


def test_what_a_lost_peer_had_open_is_not_freed(tmp_path: Path) -> None:
    found, _ = run_ranks(2, _killed, str(tmp_path))
    assert found is not None
    told, num_freed_open = found
    assert told.startswith("rank 1 closed its connection without a farewell")
    assert num_freed_open == 0


def choice_because(why: str) -> dict[int, PlaneChoice]:
    """Make the expected choice of a link that uses the next plane."""
    return {1: PlaneChoice(TransportName.BOUNCE, None, why)}


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
        assert plane_choices(ranks.transports[0]) == choice_because(why)
        ranks.transports[0].send(1, message(5, filled(OUTBOX_BYTES // 2, 5)))
        assert isinstance(take(ranks.inboxes[1], 1)[0], MessageArrived)
    assert memory_left(cuda) == []


def test_a_gpu_without_peer_access_is_named(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CPU.selected():
        other = CudaRuntime(1).name
    plane = CudaIpcPlane(CPU, 1024)
    offer = plane.offer()
    offer = Offer(offer.plane, {**offer.values, "gpu": other})
    fetcher = plane.attach(offer, 4, 1.0).fetcher
    fetcher.detach()
    monkeypatch.setattr(cuda_in_files, "cudaDeviceCanAccessPeer", lambda *_: (0, 0))
    with pytest.raises(PlaneRefusal) as refusal:
        plane.attach(offer, 4, 1.0)
    assert str(refusal.value) == (
        "GPU-00000000-0000-0000-0000-000000000000 has no peer access to"
        " GPU-01010101-0101-0101-0101-010101010101 of rank 4; see nvidia-smi topo -m"
    )
    # Its own memory a GPU reaches, though CUDA does not call that a peer's.
    fetcher = plane.attach(plane.offer(), 4, 1.0).fetcher
    fetcher.detach()
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
def test_an_offer_that_cannot_be_accepted(cuda: Path, told: dict[str, object], why: str) -> None:
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
    plane = CudaIpcPlane(device, 1024)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlaneRefusal) as refusal:
        plane.attach(plane.offer(), 4, 1.0)
    assert str(refusal.value) == (
        "the CUDA memory of rank 4 cannot be copied (CUDA error: peer mapping resources exhausted)"
    )
    plane.close(are_detached=True)
    device.close()
    assert memory_left(cuda) == []


def test_memory_that_cannot_be_freed_is_a_warning(
    cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that has failed fails again; the run has its error already."""
    plane = CudaIpcPlane(CPU, 1024)
    fetcher = plane.attach(plane.offer(), 4, 1.0).fetcher
    for call in ("cudaIpcCloseMemHandle", "cudaFree"):
        refuse(monkeypatch, call, cudaError_t.cudaErrorInvalidValue)
    fetcher.detach()
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
    assert str(refusal.value).endswith("); pip install '.[cuda]' in a checkout of rrfp")


def test_on_a_cpu_it_is_refused() -> None:
    with pytest.raises(UsageError, match="transport cuda-ipc does not carry tensors on cpu"):
        RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)


# What becomes of reads by NIXL that go wrong, on an agent that stands in for NIXL's own.


PATIENCE_S = 20.0
SLAB_BYTES = 2**16
TASK = Task(1, Kind.F, 0)


class OwnReads:
    """Reads memory of this process. Implements what `NixlAgent` uses of NIXL's agent."""

    def __init__(self, name: str, may_answer: threading.Event) -> None:
        self._name = name
        self._may_answer = may_answer

    def register_memory(self, slab: torch.Tensor) -> None: ...

    def deregister_memory(self, registered: None) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._may_answer.wait(PATIENCE_S)
        return metadata

    def get_xfer_descs(self, descriptors: Sequence[Any], memory: str) -> Any:
        return descriptors[0]

    def initialize_xfer(self, kind: str, own: Any, theirs: Any, remote: str) -> "OwnReads":
        ctypes.memmove(own[0], theirs[0], own[1])
        return self

    states = ("PROC", "DONE")
    """States that a transfer returns as it begins, and later."""
    num_released = 0

    def transfer(self, handle: Self) -> str:
        return self.states[0]

    def check_xfer_state(self, handle: Self) -> str:
        return self.states[1]

    def release(self) -> None:
        OwnReads.num_released += 1


class FullDevice(CpuDevice):
    """Has no memory left while `is_full` is True."""

    is_full = False

    def empty(self, shape: Any, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return super().empty(shape, dtype, stream)


@pytest.fixture
def may_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    answers = threading.Event()
    answers.set()
    monkeypatch.setattr(nixl_agent, "_make_agent", lambda name: OwnReads(name, answers))
    yield answers
    answers.set()


def fetched(fetcher: Fetcher) -> Completion:
    """Send a message of one tensor, and return its outcome."""
    told: list[Completion] = []
    is_told = threading.Event()

    def put_completion(completion: Completion) -> None:
        told.append(completion)
        is_told.set()

    descriptor = Descriptor((Form(torch.uint8, (100,)),), 0)
    fetcher.fetch(descriptor, Message(0, TASK, ()), Queue(put_completion))
    assert is_told.wait(PATIENCE_S), "nobody was told"
    return told[0]


def test_a_message_that_cannot_be_copied_fails_its_link_and_no_other(
    may_answer: threading.Event,
) -> None:
    source, device = NixlPlane(CpuDevice(), SLAB_BYTES), FullDevice()
    reader = NixlPlane(device, SLAB_BYTES)
    try:
        source.slab.fill_(7)
        fetcher, rate, answer = reader.attach(source.offer(), 3, PATIENCE_S)
        assert rate
        assert answer is None
        device.is_full = True
        failed = fetched(fetcher)
        assert isinstance(failed, PlaneFailed)
        error = failed.error
        assert str(error) == (
            "what rank 3 sent for 1F0 was read and cannot be taken over (OutOfMemoryError: CUDA"
            " out of memory.)"
        )
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        device.is_full = False
        arrived = fetched(fetcher)
        assert isinstance(arrived, Fetched)
        (tensor,) = arrived.tensors
        assert tensor is not None
        assert bool((tensor == 7).all())
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


@pytest.mark.parametrize("states", [("ERR", "ERR"), ("PROC", "ERR")])
def test_a_read_that_fails_is_let_go_of(
    may_answer: threading.Event, monkeypatch: pytest.MonkeyPatch, states: tuple[str, str]
) -> None:
    source, reader = (NixlPlane(CpuDevice(), SLAB_BYTES) for _ in range(2))
    try:
        fetcher = reader.attach(source.offer(), 3, PATIENCE_S).fetcher
        monkeypatch.setattr(OwnReads, "states", states)
        monkeypatch.setattr(OwnReads, "num_released", 0)
        failed = fetched(fetcher)
        assert isinstance(failed, PlaneFailed)
        assert "rank 3 was lost while its outbox was read" in str(failed.error)
        assert OwnReads.num_released == 1
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


@pytest.mark.parametrize(
    ("num_bytes", "complaint"),
    [
        (2 * SLAB_BYTES, "give all ranks the same outbox_mb"),
        (0, "rank 1 sent an outbox of 0 bytes"),
        (-256, "rank 1 sent an outbox of -256 bytes"),
    ],
)
def test_an_outbox_of_another_size_is_refused(
    may_answer: threading.Event, num_bytes: int, complaint: str
) -> None:
    source, reader = (NixlPlane(CpuDevice(), SLAB_BYTES) for _ in range(2))
    offer = source.offer()
    try:
        with pytest.raises(PlaneRefusal, match=complaint):
            reader.attach(
                replace(offer, values={**offer.values, "bytes": num_bytes}), 1, PATIENCE_S
            )
    finally:
        source.close(are_detached=True)
        reader.close(are_detached=True)


def test_a_nixl_that_does_not_answer_is_refused(may_answer: threading.Event) -> None:
    source, reader = (NixlPlane(CpuDevice(), SLAB_BYTES) for _ in range(2))
    try:
        may_answer.clear()
        with pytest.raises(PlaneRefusal, match=r"rank 1 .*it did not answer"):
            reader.attach(source.offer(), 1, 0.1)
    finally:
        may_answer.set()
        source.close(are_detached=True)
        reader.close(are_detached=True)


# What NIXL reads on a GPU: memory that CUDA gives, and none of torch's.


class GpuInFiles(CpuDevice):
    """A device that says that it is a GPU."""

    torch_device = torch.device("cuda", 1)


class Agent:
    """In the place of NIXL's."""

    made: ClassVar[list[tuple[torch.Tensor, ...]]] = []

    def __init__(self, _: str, __: Device, *slabs: torch.Tensor) -> None:
        self.made.append(slabs)

    def start(self) -> None: ...

    def close(self) -> bool:
        return True


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


@pytest.mark.parametrize("call", ["memory_at", "empty"])
def test_memory_that_torch_refuses_is_freed_and_refuses_nixl(
    cuda: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory\nmore words")

    device = GpuInFiles() if call == "memory_at" else CpuDevice()
    monkeypatch.setattr(device, call, refuses)
    with pytest.raises(PlaneRefusal, match=r"^torch gives no outbox for NIXL \(out of memory\)$"):
        NixlPlane(device, 10_000)
    assert memory_left(cuda) == []


@pytest.mark.parametrize("hangs_at", ["start", "close"])
def test_memory_that_a_hanging_agent_may_use_is_not_freed(
    cuda: Path, may_answer: threading.Event, monkeypatch: pytest.MonkeyPatch, hangs_at: str
) -> None:
    def hangs(*_: object) -> None:
        may_answer.wait(PATIENCE_S)

    monkeypatch.setattr(nixl_agent, "_CLOSE_S", 0.1)
    may_answer.clear()
    if hangs_at == "start":
        monkeypatch.setattr(nixl_agent, "_START_S", 0.1)
        monkeypatch.setattr(OwnReads, "register_memory", hangs)
        with pytest.raises(PlaneRefusal, match="NIXL does not start"):
            NixlPlane(GpuInFiles(), 10_000)
    else:
        monkeypatch.setattr(OwnReads, "deregister_memory", hangs)
        NixlPlane(GpuInFiles(), 10_000).close(are_detached=True)
    assert len(memory_left(cuda)) == 2
