"""A GPU as a device, through torch: the only module of the runtime that uses `torch.cuda`.

The runtime's own threads select the device for each call. Otherwise their current device is the
first GPU, and torch would make a context there when it leaves a stream of another GPU.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import torch

from rrfp.errors import UsageError
from rrfp.runtime.device.interface import Event, Stream

_GOOD_ERROR_NS = 10_000
"""Error of a clock reading that is good enough."""
_READINGS_NS = 1_000_000
"""Time to try for a better reading. With other ranks on the same GPU each reading waits for its
turn."""
_WATCH_NS = 300_000
"""Time to poll for an event that will soon be complete: as long as a wake-up from sleep takes
(docs/gpu.md). So a wait takes at most twice the shortest possible time."""


class CudaDevice:
    """A GPU as a device, with torch's CUDA streams and events. Implements
    `rrfp.runtime.device.interface.Device`."""

    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        """Raises UsageError if there is no such GPU."""
        if torch.version.cuda is None:
            raise UsageError(
                f"the model is on {device} and this torch ({torch.__version__}) is built without"
                " CUDA; install a build with it, or choose device cpu"
            )
        num_devices = torch.cuda.device_count()
        index = device.index or 0
        if index >= num_devices:
            raise UsageError(
                f"the model is on {device} and torch sees {num_devices} GPUs; see nvidia-smi and"
                " CUDA_VISIBLE_DEVICES, or choose device cpu"
            )
        self.torch_device = torch.device("cuda", index)
        self.clock_error_ns = 0
        # One moment on both clocks.
        self._origin: torch.cuda.Event
        self._origin_ns = 0
        self._cycles_per_ns: float | None = None

    def compute_stream(self) -> Stream:
        """Return the calling thread's current CUDA stream on this GPU."""
        return Stream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> Stream:
        """Make a CUDA stream beside all others."""
        return Stream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call] # torch's own

    def record(self, stream: Stream) -> Event:
        """Record an event without timing after the work queued on the stream."""
        # A thread that waits for it sleeps instead of spinning: ranks may share cores.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's own
        event.record(_cuda(stream))
        return Event(event)

    def record_timed(self, stream: Stream) -> Event:
        """Record an event with timing, for `time_ns`, after the work queued on the stream."""
        event = _timed_event()
        event.record(_cuda(stream))
        return Event(event)

    def time_ns(self, event: Event) -> int:
        """Return when a complete event of `record_timed` was completed, in ns of the host's
        monotonic clock, by the offset of the last `synchronize_clocks`."""
        # elapsed_time is in ms, with the precision of a float32.
        passed_ms = float(self._origin.elapsed_time(cast(torch.cuda.Event, event)))
        return self._origin_ns + round(passed_ms * 1e6)

    def synchronize_clocks(self) -> None:
        """Wait for the compute stream, and read both clocks until the error is 10 us or 1 ms has
        passed. The best reading is the origin of `time_ns`; its error is stored."""
        stream = _cuda(self.compute_stream())
        stream.synchronize()
        until_ns = time.monotonic_ns() + _READINGS_NS
        best = _read_clock(stream)
        while best.error_ns > _GOOD_ERROR_NS and time.monotonic_ns() < until_ns:
            best = min(best, _read_clock(stream), key=lambda each: each.error_ns)
        self._origin = best.event
        self._origin_ns = (best.before_ns + best.after_ns) // 2
        self.clock_error_ns = best.error_ns

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        """Queue a kernel on the stream that spins for this many ns. The first call measures the
        speed of the GPU's cycle counter, and waits for that."""
        if self._cycles_per_ns is None:
            self._cycles_per_ns = self._measure_cycles_per_ns()
        with self.selected(), torch.cuda.stream(_cuda(stream)):
            _sleep(round(time_ns * self._cycles_per_ns))

    def _measure_cycles_per_ns(self) -> float:
        """Measure the cycles of the GPU's `_sleep` in a nanosecond, on a new stream; waits for
        it."""
        num_cycles = 10_000_000
        stream = _cuda(self.new_stream())
        with self.selected(), torch.cuda.stream(stream):
            _sleep(num_cycles)  # The first one is compiled or loaded.
            start, end = _timed_event(), _timed_event()
            start.record(stream)
            _sleep(num_cycles)
            end.record(stream)
        end.synchronize()
        return num_cycles / (float(start.elapsed_time(end)) * 1e6)

    def wait(self, stream: Stream, event: Event) -> None:
        """Run later work of the stream only after the event. The host does not wait."""
        _cuda(stream).wait_event(cast(torch.cuda.Event, event))

    def query(self, event: Event) -> bool:
        """Return whether the event is complete, without waiting."""
        return bool(cast(torch.cuda.Event, event).query())  # type: ignore[no-untyped-call] # as above

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        """Block the calling thread until the event is complete. With `soon` it polls for up to 0.3
        ms, and lets other threads run between, before it sleeps."""
        until_ns = time.monotonic_ns() + (_WATCH_NS if soon else 0)
        while time.monotonic_ns() < until_ns:
            if self.query(event):
                return
            time.sleep(0)  # Let other threads run.
        cast(torch.cuda.Event, event).synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on the stream; the host does not wait."""
        with self.selected(), torch.cuda.stream(_cuda(stream)):
            target.copy_(source, non_blocking=True)

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Allocate an uninitialized tensor on this GPU for work of the stream."""
        with self.selected(), torch.cuda.stream(_cuda(stream)):
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """View GPU memory at this address as a flat tensor of uint8, without ownership. Raises
        RuntimeError if torch made a copy."""
        # With the device's index: otherwise torch would ask CUDA for the owner of the memory, and
        # copy through a peer's stream.
        tensor = torch.as_tensor(_Memory(address, num_bytes), device=self.torch_device)
        if tensor.data_ptr() != address:
            raise RuntimeError("torch has copied memory that it was to use")
        return tensor

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which this GPU is the calling thread's current device."""
        return torch.cuda.device(self.torch_device)

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate uninitialized pinned host memory as a flat tensor of uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that the stream also uses this tensor, so that torch's caching allocator reuses its
        memory only after that work."""
        tensor.record_stream(_cuda(stream))

    def use_on_compute_stream(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Note for the CUDA tensors among these that the calling thread's compute stream uses them,
        so that their memory is reused only after that work. None and CPU tensors are skipped."""
        compute = self.compute_stream()
        for tensor in tensors:
            # The caching allocator would reuse it for the stream that made it.
            if tensor is not None and tensor.is_cuda:
                self.record_stream(tensor, compute)


class _Memory:
    """Wraps a raw CUDA pointer for torch, without ownership."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _ClockReading(NamedTuple):
    """An event that a device has completed, and times of the host before and after that."""

    event: torch.cuda.Event
    before_ns: int
    after_ns: int

    @property
    def error_ns(self) -> int:
        """Largest distance in ns of the event from the middle of the two times, rounded up."""
        return (self.after_ns - self.before_ns + 1) // 2


def _read_clock(stream: torch.cuda.Stream) -> _ClockReading:
    """Record an event on an idle stream, wait for it, and return it with the host's times before
    and after. Polls, because a sleeping thread would wake up much later."""
    event = _timed_event()
    before_ns = time.monotonic_ns()
    event.record(stream)
    while not event.query():  # type: ignore[no-untyped-call] # torch's own
        pass
    return _ClockReading(event, before_ns, time.monotonic_ns())


def _timed_event() -> torch.cuda.Event:
    """Make an event with timing; a thread that waits for it sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call] # torch's own


def _sleep(num_cycles: int) -> None:
    """Queue a kernel on the current stream that spins for this many cycles."""
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call] # torch's own


def _cuda(stream: Stream) -> torch.cuda.Stream:
    """Return the stream as torch's type, unchanged and unchecked."""
    return cast(torch.cuda.Stream, stream)
