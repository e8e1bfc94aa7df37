"""A device that behaves as a GPU does, on the CPU: for tests of its users.

Every stream is a thread that runs its work late, by delays drawn from a seed, so that whatever does
not wait for an event reads or writes too early. Copies come in halves. Memory is filled with
`POISON` when it is given out, and again when its tensor is gone: at once for the host, in stream
order for the streams that may use it. So a mistake shows as wrong bytes, soon and on every machine.
"""

import ctypes
import math
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import cast

import torch

from rrfp.runtime.device.interface import CPU, Event, Stream
from rrfp.runtime.pace import sleep_until

POISON = 0xA5
_CAPACITY_UNIT = 256
"""Memory is given out in multiples of it, and again only to requests of the same size."""


class _Stream:
    """A thread that runs what it is given, in order and late."""

    def __init__(self, name: str, seed: str, mean_delay_s: float) -> None:
        self._draws = random.Random(seed)
        self.mean_delay_s = mean_delay_s
        # Its `put` may interrupt itself: memory is given back wherever a tensor's last reference
        # goes, also in the garbage collector.
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._has_ended:
            self._run_rest()

    def delay(self) -> None:
        """Let some time pass: often none, now and then much."""
        if self.mean_delay_s and self._draws.random() < 0.5:
            time.sleep(self._draws.expovariate(1 / self.mean_delay_s))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        self._has_ended = True
        self._run_rest()

    def _run_rest(self) -> None:
        """Run work that was queued after the end: after a failure tensors are freed late, and their
        memory after them."""
        with suppress(Empty):
            while work := self._work.get_nowait():
                work()


class _TimedEvent(threading.Event):
    """Knows when it was set."""

    time_ns = 0

    def set(self) -> None:
        self.time_ns = time.monotonic_ns()
        super().set()


class _Memory:
    """A piece of the device's memory. The device keeps it: work that comes too late finds poison
    there, and not another process' error."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = bytearray(num_bytes)
        self.streams: set[_Stream] = set()
        """Streams that use it, besides the one that it was made for."""


class SimulatedDevice:
    """Implements `rrfp.runtime.device.interface.Device`. Its owner closes it."""

    torch_device = torch.device("cpu")
    is_synchronous = False
    clock_error_ns = 0

    def __init__(
        self, seed: int = 0, *, mean_delay_s: float = 100e-6, compute_delay_s: float | None = None
    ) -> None:
        """Work on a stream is late by `mean_delay_s` on average, on the compute stream by
        `compute_delay_s`."""
        self._seed = seed
        self._mean_delay_s = mean_delay_s
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[_Memory]] = defaultdict(list)
        """By their size. Appended to without the lock, which a finalizer must not take."""
        self._by_address: dict[int, _Memory] = {}
        self._poisoner = self._make("rrfp-simulated-memory", 0.0)
        self._compute = self._make(
            "rrfp-simulated-compute", mean_delay_s if compute_delay_s is None else compute_delay_s
        )

    def _make(self, name: str, mean_delay_s: float) -> _Stream:
        with self._lock:
            stream = _Stream(name, f"{self._seed}/{len(self._streams)}", mean_delay_s)
            self._streams.append(stream)
        return stream

    def compute_stream(self) -> Stream:
        return Stream(self._compute)

    def new_stream(self) -> Stream:
        return Stream(self._make(f"rrfp-simulated-{len(self._streams)}", self._mean_delay_s))

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        """Give a stream work of one's own, as a kernel."""
        queue = _stream(stream)

        def late() -> None:
            queue.delay()
            work()

        queue.put(late)

    def record(self, stream: Stream) -> Event:
        event = threading.Event()
        _stream(stream).put(event.set)
        return Event(event)

    def record_timed(self, stream: Stream) -> Event:
        event = _TimedEvent()
        _stream(stream).put(event.set)
        return Event(event)

    def time_ns(self, event: Event) -> int:
        return cast(_TimedEvent, event).time_ns

    def synchronize_clocks(self) -> None:
        self.synchronize(self.record(self.compute_stream()))

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        _stream(stream).put(lambda: sleep_until(time.monotonic_ns() + time_ns))

    def wait(self, stream: Stream, event: Event) -> None:
        passed = cast(threading.Event, event)
        _stream(stream).put(lambda: cast(None, passed.wait()))

    def query(self, event: Event) -> bool:
        return cast(threading.Event, event).is_set()

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        cast(threading.Event, event).wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        # By address, as a kernel that is queued keeps no tensor alive either.
        to, of, num_bytes = target.data_ptr(), source.data_ptr(), source.numel()
        half, queue = num_bytes // 2, _stream(stream)

        def copy_late() -> None:
            queue.delay()
            ctypes.memmove(to, of, half)
            queue.delay()
            ctypes.memmove(to + half, of + half, num_bytes - half)

        queue.put(copy_late)

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        shape = tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        capacity = math.ceil(num_bytes / _CAPACITY_UNIT) * _CAPACITY_UNIT
        try:
            memory = self._free[capacity].pop()
        except IndexError:
            memory = _Memory(capacity)
        view = (ctypes.c_char * num_bytes).from_buffer(memory.buffer)
        address = ctypes.addressof(view)
        ctypes.memset(address, POISON, num_bytes)
        memory.streams.clear()
        self._by_address[address] = memory
        # The view lives as long as a tensor of this memory.
        weakref.finalize(view, self._give_back, memory, address, _stream(stream)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(shape)

    def _give_back(self, memory: _Memory, address: int, owner: _Stream) -> None:
        """A tensor is gone: poison what it had, once those that may use it have done so."""
        done = []
        for stream in {owner, *memory.streams}:
            event = threading.Event()
            stream.put(event.set)
            done.append(event)

        def poison() -> None:
            for event in done:
                event.wait()
            ctypes.memset(address, POISON, len(memory.buffer))
            self._free[len(memory.buffer)].append(memory)

        # Beside the owner's stream, whose work must not wait for another stream's.
        self._poisoner.put(poison)

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        return CPU.memory_at(address, num_bytes)

    def selected(self) -> AbstractContextManager[object]:
        return nullcontext()

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        memory = self._by_address.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            memory.streams.add(_stream(stream))

    def use_on_compute_stream(self, tensors: Iterable[torch.Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                self.record_stream(tensor, self.compute_stream())

    def close(self) -> None:
        """End its streams, once they have run what they were given."""
        for stream in [*self._streams[1:], self._poisoner]:
            stream.close()


def _stream(stream: Stream) -> _Stream:
    return cast(_Stream, stream)
