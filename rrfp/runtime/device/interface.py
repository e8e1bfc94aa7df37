"""The interface of a device, and the CPU as a device.

A *stream* is a queue of work that runs in order, beside the host and beside other streams. An
*event* marks a place in a stream: it is complete once all work before it has run. Only the device
that made a stream or an event looks inside.
"""

import ctypes
import math
import mmap
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NewType, Protocol, cast

import torch

from rrfp.system import num_cores

Stream = NewType("Stream", object)
Event = NewType("Event", object)


class Device(Protocol):
    """A device on which tensors lie. Any thread may call it."""

    torch_device: torch.device
    """The device of its tensors in torch."""
    is_synchronous: bool
    """True if work is done by the time its call returns, so that events are always complete."""
    clock_error_ns: int
    """Largest error of `time_ns`."""

    def compute_stream(self) -> Stream:
        """Return the stream to which the calling thread's torch operations go."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream that runs beside all others."""
        ...

    def record(self, stream: Stream) -> Event:
        """Make an event after the work queued on the stream so far."""
        ...

    def record_timed(self, stream: Stream) -> Event:
        """Make an event after the work queued on the stream so far, whose time of completion
        `time_ns` can return."""
        ...

    def time_ns(self, event: Event) -> int:
        """Return when a complete event of `record_timed` was completed, on the host's monotonic
        clock."""
        ...

    def synchronize_clocks(self) -> None:
        """Measure the offset between the device's clock and the host's again, and set
        `clock_error_ns`: the two drift, and the device measures long times coarsely. The host waits
        for the compute stream."""

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        """Queue a wait of this length, in ns, on the stream, before its next work."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Run later work of the stream only after the event. The host does not wait."""

    def query(self, event: Event) -> bool:
        """Return whether the event is complete, as the host sees it."""
        ...

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        """Block the calling thread until the event is complete. With `soon`, for events that take
        microseconds, it polls for a while before it sleeps."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy bytes on the stream; both are flat, of equal size and of uint8. The caller keeps
        both alive until the copy has run."""

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Allocate an uninitialized tensor for work of this stream. Once it is freed, its memory is
        used again for later work of the same stream."""
        ...

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """View memory at this address as a flat tensor of uint8, without ownership. Device memory
        may be a peer's, mapped into this process."""
        ...

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which this is the calling thread's current device, for calls that
        bypass torch."""
        ...

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate uninitialized host memory for direct copies to and from the device, pinned if
        needed: flat, uint8."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that another stream also uses this tensor: once the tensor is freed, its memory is
        used again only after the work that this stream has by then."""

    def use_on_compute_stream(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Call `record_stream` with the calling thread's compute stream for complete tensors of
        another stream."""


# Host memory that is used again, for large tensors.
#
# The C library returns memory of this size to the system when its tensor is freed, and the next
# tensor pays for every page of it again, which takes longer than to copy into it.

_SIZES_PER_DOUBLING = 4
"""Sizes of reserved memory for each doubling: at most a fifth of the memory is unused."""


class HostMemoryPool:
    """Allocates tensors, and reclaims their memory when they are freed, on any thread."""

    def __init__(self, max_spare_bytes: int) -> None:
        """At most `max_spare_bytes` that no tensor uses stay allocated."""
        self._max_spare_bytes = max_spare_bytes
        # A finalizer may run within any call of any thread, so that no lock guards these. The only
        # possible error is that a little more or less memory stays allocated.
        self._spare: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        """Free memory by size."""
        self._num_spare_bytes = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate an uninitialized flat tensor of uint8, of at least one byte, in spare memory of
        its size if there is any. The memory becomes spare when no tensor uses it."""
        size = _round_up_size(num_bytes)
        try:
            memory = self._spare[size].pop()
            self._num_spare_bytes -= size
        except IndexError:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # A kernel that is built without huge pages refuses the advice.
                with suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * num_bytes).from_buffer(memory)
        # The view lives as long as a tensor that has its memory.
        weakref.finalize(view, self._reclaim, memory, size).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _reclaim(self, memory: mmap.mmap, size: int) -> None:
        """Keep the memory of a freed tensor for later ones, or drop it beyond `max_spare_bytes`. A
        finalizer calls it, on any thread."""
        if self._num_spare_bytes + size <= self._max_spare_bytes:
            self._num_spare_bytes += size
            self._spare[size].append(memory)


def _round_up_size(num_bytes: int) -> int:
    """Return the smallest reserved size of at least this many bytes: whole pages, and four sizes
    for each doubling."""
    doubling = max(num_bytes - 1, mmap.PAGESIZE * _SIZES_PER_DOUBLING).bit_length() - 1
    step = (1 << doubling) // _SIZES_PER_DOUBLING
    return -(-num_bytes // step) * step


# Copies within host memory by two threads, if a second core has time.
#
# One core spends a copy waiting for memory. So a helper thread copies, too: each takes one part
# after another, until there are no more. A helper that gets no core takes no part, and the caller
# waits at most for the part that the helper is copying.

HELPER = "rrfp-copy"
"""The name of the helper thread, which lives as long as its process."""

_PART_BYTES = 2**20
_LEAST_SHARED_BYTES = 4 * _PART_BYTES
"""The helper makes smaller copies hardly faster."""


class _Copy:
    """One copy between addresses that stay valid until it is done."""

    def __init__(self, target: int, source: int, num_bytes: int) -> None:
        self._target = target
        self._source = source
        self._num_bytes = num_bytes
        # `next` of this iterator is atomic.
        self._parts: Iterator[int] = iter(range(0, num_bytes, _PART_BYTES))
        self.help_lock = Lock()
        """Held while the helper copies parts."""

    def copy_parts(self) -> None:
        """Copy the parts, of 1 MiB, that no thread has taken yet, one after the other. Two threads
        may call it at once."""
        for begin in self._parts:
            num_bytes = min(_PART_BYTES, self._num_bytes - begin)
            ctypes.memmove(self._target + begin, self._source + begin, num_bytes)


class HostCopies:
    """The copies of one process. Any thread may call it."""

    def __init__(self) -> None:
        self._to_help: SimpleQueue[_Copy] = SimpleQueue()
        self._start_lock = Lock()
        self._has_helper: bool | None = None

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes between addresses; done when it returns. From 4 MiB on a helper thread copies,
        too, if this process has a second core."""
        if num_bytes < _LEAST_SHARED_BYTES or not self._start_helper():
            ctypes.memmove(target, source, num_bytes)
            return
        copy = _Copy(target, source, num_bytes)
        self._to_help.put(copy)
        copy.copy_parts()
        # A helper that comes later finds no part left.
        with copy.help_lock:
            pass

    def _start_helper(self) -> bool:
        """Start the helper thread in the first call; return False, without one, if this process has
        only one core."""
        with self._start_lock:
            if self._has_helper is None:
                self._has_helper = num_cores() > 1
                if self._has_helper:
                    Thread(target=self._help, name=HELPER, daemon=True).start()
            return self._has_helper

    def _help(self) -> None:
        """Help with each queued copy; runs on the helper thread until the process ends."""
        while True:
            copy = self._to_help.get()
            with copy.help_lock:
                copy.copy_parts()


# The CPU as a device: all work is done when its call returns.

_LEAST_REUSED_BYTES = 128 * 2**10
"""The C library reuses smaller memory by itself."""
_MAX_SPARE_BYTES = 256 * 2**20

_STREAM = Stream(None)
_EVENT = Event(None)


class CpuDevice:
    """The CPU as a device: all work is done when its call returns. Implements `Device`."""

    torch_device = torch.device("cpu")
    is_synchronous = True
    clock_error_ns = 0

    def __init__(self) -> None:
        self._memory = HostMemoryPool(_MAX_SPARE_BYTES)
        self._copies = HostCopies()

    def compute_stream(self) -> Stream:
        """Return the CPU's only stream, a placeholder."""
        return _STREAM

    def new_stream(self) -> Stream:
        """Return the CPU's only stream, a placeholder; makes nothing."""
        return _STREAM

    def record(self, stream: Stream) -> Event:
        """Return the same event in every call, which is complete."""
        return _EVENT

    def record_timed(self, stream: Stream) -> Event:
        """Return an event that is the current time of the monotonic clock."""
        return Event(time.monotonic_ns())

    def time_ns(self, event: Event) -> int:
        """Return the time at which `record_timed` made this event."""
        return cast(int, event)

    def synchronize_clocks(self) -> None:
        """Do nothing: the device's clock is the host's."""

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        """Sleep for this many ns on the calling thread."""
        time.sleep(time_ns / 1e9)

    def wait(self, stream: Stream, event: Event) -> None:
        """Do nothing: the event is complete."""

    def query(self, event: Event) -> bool:
        """Return True: every event is complete."""
        return True

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        """Do nothing: the event is complete."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy the source's bytes, done when it returns; large copies use a second thread if there
        is a second core."""
        # torch's copy_ is slower for much memory, and its several threads wait for busy cores.
        self._copies.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Allocate an uninitialized tensor, from 128 KiB on in memory that is reused after its
        tensor is freed."""
        shape = tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._memory.empty(num_bytes).view(dtype).view(shape)

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """View host memory at this address as a flat tensor of uint8, without ownership."""
        view = (ctypes.c_char * num_bytes).from_address(address)
        return torch.frombuffer(view, dtype=torch.uint8)

    def selected(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: there is one CPU."""
        return nullcontext()

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate an uninitialized flat tensor of uint8, in memory that is not pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: no work outlasts its call."""

    def use_on_compute_stream(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Do nothing: no work outlasts its call."""


CPU = CpuDevice()
"""The CPU device of this process."""
