"""When work began and ended, on a GPU that is made up: one that is late, and whose clock drifts."""

from struct import pack, unpack
from typing import Any

import pytest
import torch

from rrfp.megatron.native.schedule import CudaTimer, HostTimer


class Gpu:
    """Passes an event `latency_ns` after it was recorded; its clock runs 1% fast."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.latency_ns = 50_000

    def clock(self) -> int:
        self.now_ns += 100
        return self.now_ns

    def query(self) -> bool:
        return self.latency_ns < 1_000_000

    def current_stream(self) -> "Gpu":
        return self


class Event:
    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.passes_ns = self.gpu.now_ns + self.gpu.latency_ns

    def query(self) -> bool:
        return self.gpu.clock() >= self.passes_ns

    def synchronize(self) -> None:
        self.gpu.now_ns = max(self.gpu.now_ns, self.passes_ns)

    def elapsed_time(self, end: "Event") -> float:
        return (end.passes_ns - self.passes_ns) * 1.01 / 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    event = type("OfGpu", (Event,), {"gpu": gpu})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    return gpu


def mark_after(timer: CudaTimer, gpu: Gpu, time_ns: int) -> Any:
    gpu.now_ns += time_ns
    return timer.mark()


def test_times_are_known_once_the_gpu_has_passed_the_marks(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    begin_ns = gpu.now_ns
    marks = [mark_after(timer, gpu, 1_000_000) for _ in range(3)]
    assert timer.times_ns(marks, wait=False) is None
    times_ns = timer.times_ns(marks, wait=True)
    assert times_ns is not None
    # When the GPU passed them, and not when the host recorded them.
    expected = [begin_ns + count * 1_000_000 + 50_000 for count in (1, 2, 3)]
    assert times_ns == pytest.approx(expected, abs=0.011 * 3_000_000 + 10_000)
    assert times_ns[0] < times_ns[1] < times_ns[2]


def test_the_clocks_are_compared_anew_while_the_gpu_is_idle(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    gpu.now_ns += 60_000_000_000

    def error_ns() -> int:
        mark = mark_after(timer, gpu, 1_000)
        (time_ns,) = timer.times_ns([mark], wait=True) or [0]
        return int(abs(time_ns - mark.passes_ns))

    assert error_ns() > 500_000_000
    timer.look_at_clock()
    assert error_ns() < 50_000


def test_a_busy_gpu_is_not_waited_for(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    gpu.latency_ns = 900_000
    before_ns = gpu.now_ns
    timer.look_at_clock()
    assert gpu.now_ns - before_ns < 200_000
    gpu.latency_ns = 5_000_000
    before_ns = gpu.now_ns
    timer.look_at_clock()
    assert gpu.now_ns == before_ns


def test_events_are_used_again(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    first, second = timer.mark(), timer.mark()
    assert timer.times_ns([first, second], wait=True) is not None
    # The last one is what the next ones are counted from.
    assert timer.mark() is first
    assert timer.mark() is not second


def test_long_runs_are_told_as_precisely(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells the time between two events in single precision."""

    def elapsed_ms(start: Event, end: Event) -> float:
        (told,) = unpack("f", pack("f", (end.passes_ns - start.passes_ns) / 1e6))
        return float(told)

    monkeypatch.setattr(Event, "elapsed_time", elapsed_ms)
    timer = CudaTimer(gpu.clock)
    errors_ns = []
    for step in range(1000):
        mark = mark_after(timer, gpu, 10_000_000_000 + 137_003 * step)
        (time_ns,) = timer.times_ns([mark], wait=True) or [0]
        errors_ns.append(time_ns - mark.passes_ns)
    assert max(errors_ns) - min(errors_ns) < 100_000 < 10_000 * 10**9 * 2**-24 / 2


def test_the_host_needs_no_waiting() -> None:
    times = iter(range(5, 8))
    timer = HostTimer(lambda: next(times))
    assert timer.times_ns([timer.mark(), timer.mark()], wait=False) == [5, 6]
