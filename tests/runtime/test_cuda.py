"""CUDA is absent for a reason that is named; with it, the bindings and host memory work."""

import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.runtime.device import cuda
from rrfp.runtime.device import cuda_runtime as file
from rrfp.runtime.device import interface as host_copies
from rrfp.runtime.device.cuda import CudaDevice
from rrfp.runtime.device.cuda_runtime import (
    CudaPresence,
    CudaRuntime,
    CudaRuntimeError,
    Gpu,
    InstalledTorch,
    check_cuda,
    find_working_gpus,
    installed_torch,
)
from rrfp.runtime.device.interface import CPU, HELPER, Event, HostCopies, HostMemoryPool, Stream
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated
from rrfp.runtime.planes.cuda_ipc import CudaIpcPlane
from rrfp.runtime.planes.plane import PlaneRefusal
from tests.doubles import cuda_in_files
from tests.doubles.cuda_in_files import cudaError_t

WITH_CUDA = InstalledTorch("2.13.0+cu130", "13.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make up a driver, a build of torch and what CUDA answers."""

    def made_up(torch: InstalledTorch | None = WITH_CUDA, answer: object = ()) -> None:
        def call_isolated(*_: object, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(file, "_has_driver", lambda: True)
        monkeypatch.setattr(file, "installed_torch", lambda: torch)
        monkeypatch.setattr(file, "call_isolated", call_isolated)

    return made_up


def test_the_installed_torch_is_the_one_that_is_imported() -> None:
    assert installed_torch() == InstalledTorch(torch.__version__, torch.version.cuda)


@pytest.mark.skipif(file._has_driver(), reason="this machine has a driver")
def test_without_a_driver() -> None:
    assert check_cuda() == CudaPresence(
        (),
        "this machine has no NVIDIA driver (libcuda.so.1 is not there); start containers with "
        "--gpus all, or use --device cpu",
    )


def test_without_cuda_in_torch(machine: Callable[..., None]) -> None:
    machine(InstalledTorch("2.13.0+cpu", None))
    assert check_cuda().problem == (
        "torch 2.13.0+cpu is built without CUDA; install a build with it, or use --device cpu"
    )
    machine(None)
    assert check_cuda().problem == "torch is not installed; install a build with CUDA"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_with_every_gpu_hidden(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert check_cuda().problem == (
        f"CUDA_VISIBLE_DEVICES is '{hidden}' and hides every GPU; unset it, or use --device cpu"
    )


def test_with_a_driver_that_does_not_work(machine: Callable[..., None]) -> None:
    machine(answer=NoAnswerError("it did not answer within 120 s"))
    assert check_cuda().problem == (
        "CUDA cannot be used here (it did not answer within 120 s); see whether nvidia-smi works, "
        "or use --device cpu"
    )


def test_with_gpus(machine: Callable[..., None]) -> None:
    machine(answer=[{"name": "NVIDIA H200", "memory_bytes": 150 << 30, "uuid": "0-1"}])
    assert check_cuda() == CudaPresence((Gpu("NVIDIA H200", 150 << 30, "0-1"),), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_trying_cuda_out_refuses_without_a_driver() -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        find_working_gpus()


DEVICE_CALLS: dict[str, Callable[[CudaDevice], object]] = {
    "compute_stream": CudaDevice.compute_stream,
    "new_stream": CudaDevice.new_stream,
    "record": lambda device: device.record(Stream(None)),
    "record_timed": lambda device: device.record_timed(Stream(None)),
    "synchronize_clocks": CudaDevice.synchronize_clocks,
    "keep_busy": lambda device: device.keep_busy(Stream(None), 1),
    "empty": lambda device: device.empty([2], torch.uint8, Stream(None)),
    "memory_at": lambda device: device.memory_at(4096, 8),
    "empty_on_host": lambda device: device.empty_on_host(8),
    "selected": lambda device: device.selected().__enter__(),
    "use_on_compute_stream": lambda device: device.use_on_compute_stream([torch.zeros(1)]),
}
"""Calls that do not need the result of another call."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_every_call_of_the_device_refuses_without_a_driver(name: str) -> None:
    with pytest.raises(UsageError, match="the model is on cuda"):
        CudaDevice(torch.device("cuda", 0))
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    device._cycles_per_ns = None
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA|Event"):
        DEVICE_CALLS[name](device)


class Calls:
    """Stands for torch's calls, and writes them down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, partial(self._enter, name))

    @contextmanager
    def _enter(self, name: str, chosen: object) -> Iterator[None]:
        self.made.append(f"{name} {chosen}")
        yield
        self.made.append(f"leave {name}")


def a_device() -> CudaDevice:
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 3)
    device._cycles_per_ns = 1.0
    return device


def test_a_thread_is_at_the_device_before_it_takes_a_stream_and_after_it_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch makes a context on the device that a thread comes back to."""
    calls, device = Calls(monkeypatch), a_device()
    monkeypatch.setattr(cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    device.copy(torch.zeros(2), torch.ones(2), Stream("s"))
    device.keep_busy(Stream("s"), 1)
    device.empty([2], torch.uint8, Stream("s"))
    assert calls.made == ["device cuda:3", "stream s", "leave stream", "leave device"] * 3


def test_the_shortest_look_relates_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        def synchronize(self) -> None:
            pass

    us = 1000
    looks = [("a", 100, 400), ("b", 500, 525), ("c", 600, 700), ("d", 800, 811), ("e", 900, 901)]
    left = iter([cuda._ClockReading(event, start * us, end * us) for event, start, end in looks])  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Idle())
    monkeypatch.setattr(cuda, "_read_clock", lambda _: next(left))
    device = a_device()
    # Until one is good, or the time is up.
    device.synchronize_clocks()
    assert str(device._origin) == "d"
    assert (device._origin_ns, device.clock_error_ns) == (805_500, 5_500)
    left = iter([cuda._ClockReading(event, start * us, end * us) for event, start, end in looks])  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic_ns=iter([0, 0, 10**9]).__next__))
    device.synchronize_clocks()
    assert str(device._origin) == "b"
    assert (device._origin_ns, device.clock_error_ns) == (512_500, 12_500)


class Late:
    """Stands for an event of torch's that is complete when it is looked at for the n-th time."""

    def __init__(self, num_looks: float) -> None:
        self.num_looks = num_looks
        self.num_seen = self.num_slept = 0

    def query(self) -> bool:
        self.num_seen += 1
        return self.num_seen >= self.num_looks

    def synchronize(self) -> None:
        self.num_slept += 1


@pytest.mark.parametrize(
    ("soon", "num_looks", "num_seen", "num_slept"),
    [(True, 2, 2, 0), (True, 10, 3, 1), (False, 1, 0, 1)],
    ids=["is there soon", "takes longer", "is not expected soon"],
)
def test_what_will_soon_be_complete_is_watched_before_the_thread_sleeps(
    monkeypatch: pytest.MonkeyPatch, soon: bool, num_looks: int, num_seen: int, num_slept: int
) -> None:
    now = iter(range(0, 10 * cuda._WATCH_NS, cuda._WATCH_NS // 4))
    clock = SimpleNamespace(monotonic_ns=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(cuda, "time", clock)
    event = Late(num_looks)
    a_device().synchronize(Event(event), soon=soon)
    assert (event.num_seen, event.num_slept) == (num_seen, num_slept)


# A question to a process of its own: answered, or refused with the reason, and nothing is left.


LIMIT_S = 60.0


def echo(*words: Any) -> Any:
    os.write(1, b"what libraries print {")
    return words


def raise_it() -> NoReturn:
    raise ValueError("no such thing\nand a long story")


def crash() -> NoReturn:
    sys.stderr.write("a last word")
    os.abort()


def leave() -> NoReturn:
    sys.exit(3)


def hang(started: str) -> None:
    child = os.fork()
    if child:
        Path(started).write_text(str(child))
    time.sleep(LIMIT_S)


def start(started: str) -> None:
    child = subprocess.Popen(["sleep", f"{LIMIT_S:g}"])
    Path(started).write_text(str(child.pid))


def start_and_raise(started: str) -> NoReturn:
    start(started)
    raise_it()


def start_and_crash(started: str) -> NoReturn:
    start(started)
    crash()


def assert_is_ended(child: Path) -> None:
    """Wait for the process with this directory in /proc to end, but not until it ends by itself."""
    deadline_s = time.monotonic() + LIMIT_S / 2
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_is_printed_is_no_answer() -> None:
    assert call_isolated(echo, "a", [1, None], limit_s=LIMIT_S) == ["a", [1, None]]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (raise_it, "ValueError: no such thing"),
        (crash, "it was killed: Aborted"),
        (leave, "no reason given"),
    ],
)
def test_a_failure_is_reported_in_a_line(question: Any, reason: str) -> None:
    with pytest.raises(NoAnswerError) as refused:
        call_isolated(question, limit_s=LIMIT_S)
    assert str(refused.value) == reason


def close_nothing() -> None:
    os.close(987)


def test_what_the_system_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoAnswerError, match=r"at `os\.close\(987\)` \(test_cuda\.py, line "
    ) as raised:
        call_isolated(close_nothing, limit_s=LIMIT_S)
    assert raised.value.raised == "OSError"

    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(
        NoAnswerError, match=r"^no process can be started for it: BlockingIOError: "
    ):
        call_isolated(echo, limit_s=LIMIT_S)


def test_what_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    # On a busy machine the process may need more than 5 s to reach `hang`.
    for limit_s in (5, 10, 20, 40):
        with pytest.raises(NoAnswerError, match=rf"^it did not answer within {limit_s} s$"):
            call_isolated(hang, str(started), limit_s=limit_s)
        if started.exists() and started.read_text():
            break
    assert_is_ended(Path("/proc", started.read_text()))


@pytest.mark.parametrize("question", [start, start_and_raise, start_and_crash])
def test_what_ends_takes_what_it_started_along(question: Any, tmp_path: Path) -> None:
    started = tmp_path / "pid"
    with suppress(NoAnswerError):
        call_isolated(question, str(started), limit_s=LIMIT_S)
    assert_is_ended(Path("/proc", started.read_text()))


# The calls of CUDA's runtime that rrfp makes, on the real bindings without a driver.


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
    rooms = Path(__file__).parents[2] / "rrfp"
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


# Copies that two threads share are complete, whichever thread copies a part.


PART = host_copies._PART_BYTES
LEAST = host_copies._LEAST_SHARED_BYTES
GUARD = 64


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    """Also on a machine of one core."""
    monkeypatch.setattr(host_copies, "num_cores", lambda: 2)
    return HostCopies()


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def check(copies: HostCopies, num_bytes: int, seed: int = 0) -> None:
    """A copy is the same, and nothing beside it changes."""
    source = noise(num_bytes, seed)
    target = torch.full((num_bytes + 2 * GUARD,), 7, dtype=torch.uint8)
    copies.copy(target.data_ptr() + GUARD, source.data_ptr(), num_bytes)
    assert torch.equal(target[GUARD:-GUARD], source)
    assert bool((target[:GUARD] == 7).all())
    assert bool((target[-GUARD:] == 7).all())


@pytest.mark.parametrize(
    "num_bytes", [0, 1, LEAST - 1, LEAST, LEAST + 1, 5 * PART - 1, 5 * PART, 16_000_000]
)
def test_a_copy_of_any_size_is_whole(copies: HostCopies, num_bytes: int) -> None:
    for seed in range(3):
        check(copies, num_bytes, seed)


def test_copies_of_many_threads_do_not_mix(copies: HostCopies) -> None:
    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(lambda seed: check(copies, LEAST + 1000 * seed, seed), range(60)):
            pass


Move = Callable[[int, int, int], None]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Callable[[Move], None]:
    """Have each part moved by this."""

    def replace(move: Move) -> None:
        monkeypatch.setattr(host_copies, "ctypes", SimpleNamespace(memmove=move))

    return replace


def is_helper() -> bool:
    return threading.current_thread().name == HELPER


def test_both_threads_copy_parts_and_no_part_is_copied_twice(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    taken: list[tuple[int, bool]] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        time.sleep(0.02)
        taken.append((target, is_helper()))

    moving(move)
    copies.copy(0, 0, 8 * PART)
    assert sorted(begin for begin, _ in taken) == [part * PART for part in range(8)]
    assert {by_helper for _, by_helper in taken} == {True, False}


def test_the_part_of_the_helper_is_waited_for(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    has_begun = threading.Event()
    ended: list[bool] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        if is_helper():
            has_begun.set()
            time.sleep(0.2)
        else:
            has_begun.wait(10)
        ended.append(is_helper())

    moving(move)
    copies.copy(0, 0, LEAST)
    assert has_begun.is_set()
    assert ended.count(True) == 1
    assert len(ended) == LEAST // PART


def test_a_helper_that_is_busy_elsewhere_is_not_waited_for(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    first, may_end, helping = 10**9, threading.Event(), threading.Event()
    moved: list[int] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        if target >= first:
            if is_helper():
                helping.set()
                may_end.wait(10)
            else:
                helping.wait(10)
        else:
            assert not is_helper()
            moved.append(target)

    moving(move)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(copies.copy, first, first, LEAST)
        assert helping.wait(10)
        copies.copy(0, 0, LEAST)
        assert len(moved) == LEAST // PART
        assert not held.done()
        may_end.set()
        held.result(10)


def test_on_one_core_nobody_helps(
    monkeypatch: pytest.MonkeyPatch, moving: Callable[[Move], None]
) -> None:
    monkeypatch.setattr(host_copies, "num_cores", lambda: 1)
    sizes: list[int] = []
    moving(lambda target, source, num_bytes: sizes.append(num_bytes))
    HostCopies().copy(0, 0, 4 * LEAST)
    assert sizes == [4 * LEAST]


# Memory of the host that is used again.


class SmallPages(mmap.mmap):
    """As of a kernel that is built without huge pages."""

    def madvise(self, *_: int) -> NoReturn:
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert bool((HostMemoryPool(0).empty(2**20).fill_(1) == 1).all())
