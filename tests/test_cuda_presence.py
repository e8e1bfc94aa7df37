"""Why CUDA cannot be used: each reason in its sentence, and without a driver every call refuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.runtime.device import cuda
from rrfp.runtime.device import cuda_runtime as file
from rrfp.runtime.device.cuda import CudaDevice
from rrfp.runtime.device.cuda_runtime import (
    CudaPresence,
    Gpu,
    InstalledTorch,
    computing_gpus,
    cuda_presence,
    cuda_problem,
    installed_torch,
)
from rrfp.runtime.device.interface import Event, Stream
from rrfp.runtime.isolated_call import NoAnswerError

WITH_CUDA = InstalledTorch("2.13.0+cu130", "13.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make up a driver, a build of torch and what CUDA answers."""

    def made_up(torch: InstalledTorch | None = WITH_CUDA, answer: object = ()) -> None:
        def probe(*_: object, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(file, "_has_driver", lambda: True)
        monkeypatch.setattr(file, "installed_torch", lambda: torch)
        monkeypatch.setattr(file, "probe", probe)

    return made_up


def test_the_installed_torch_is_the_one_that_is_imported() -> None:
    assert installed_torch() == InstalledTorch(torch.__version__, torch.version.cuda)


@pytest.mark.skipif(file._has_driver(), reason="this machine has a driver")
def test_without_a_driver() -> None:
    assert cuda_presence() == CudaPresence(
        (),
        "this machine has no NVIDIA driver (libcuda.so.1 is not there); start containers with "
        "--gpus all, or use --device cpu",
    )


def test_without_cuda_in_torch(machine: Callable[..., None]) -> None:
    machine(InstalledTorch("2.13.0+cpu", None))
    assert cuda_problem() == (
        "torch 2.13.0+cpu is built without CUDA; install a build with it, or use --device cpu"
    )
    machine(None)
    assert cuda_problem() == "torch is not installed; install a build with CUDA"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_with_every_gpu_hidden(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert cuda_problem() == (
        f"CUDA_VISIBLE_DEVICES is '{hidden}' and hides every GPU; unset it, or use --device cpu"
    )


def test_with_a_driver_that_does_not_work(machine: Callable[..., None]) -> None:
    machine(answer=NoAnswerError("it did not answer within 120 s"))
    assert cuda_problem() == (
        "CUDA cannot be used here (it did not answer within 120 s); see whether nvidia-smi works, "
        "or use --device cpu"
    )


def test_with_gpus(machine: Callable[..., None]) -> None:
    machine(answer=[{"name": "NVIDIA H200", "memory_bytes": 150 << 30, "uuid": "0-1"}])
    assert cuda_presence() == CudaPresence((Gpu("NVIDIA H200", 150 << 30, "0-1"),), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_trying_cuda_out_refuses_without_a_driver() -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        computing_gpus()


DEVICE_CALLS: dict[str, Callable[[CudaDevice], object]] = {
    "compute_stream": CudaDevice.compute_stream,
    "new_stream": CudaDevice.new_stream,
    "record": lambda device: device.record(Stream(None)),
    "record_timed": lambda device: device.record_timed(Stream(None)),
    "relate_clocks": CudaDevice.relate_clocks,
    "keep_busy": lambda device: device.keep_busy(Stream(None), 1),
    "empty": lambda device: device.empty([2], torch.uint8, Stream(None)),
    "memory_at": lambda device: device.memory_at(4096, 8),
    "empty_on_host": lambda device: device.empty_on_host(8),
    "selected": lambda device: device.selected().__enter__(),
    "take_over": lambda device: device.take_over([torch.zeros(1)]),
}
"""What needs nothing that another call would have given."""


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
    left = iter([cuda._Look(event, start * us, end * us) for event, start, end in looks])  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Idle())
    monkeypatch.setattr(cuda, "_look", lambda _: next(left))
    device = a_device()
    # Until one is good, or the time is up.
    device.relate_clocks()
    assert str(device._origin) == "d"
    assert (device._origin_ns, device.clock_error_ns) == (805_500, 5_500)
    left = iter([cuda._Look(event, start * us, end * us) for event, start, end in looks])  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic_ns=iter([0, 0, 10**9]).__next__))
    device.relate_clocks()
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
