"""What the runtime needs of a device: queues of work, the order between them, memory, copies.

A *stream* is a queue of work that runs in order, beside the host and beside other streams. An
*event* marks a place in a stream: it is complete once all work before it has run. Only the device
that made a stream or an event looks inside.
"""

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NewType, Protocol, cast

import torch

from rrfp.runtime.device.host_memory import HostCopies, HostMemory, memory_at

Stream = NewType("Stream", object)
Event = NewType("Event", object)


class Device(Protocol):
    """A device on which tensors lie. Any thread may call it."""

    torch_device: torch.device
    """Where torch says that its tensors lie."""
    is_synchronous: bool
    """Whether work is done by the time its call returns, so that events are always complete."""
    clock_error_ns: int
    """How far `time_ns` may be off."""

    def compute_stream(self) -> Stream:
        """The stream to which the calling thread's operations of torch go."""
        ...

    def new_stream(self) -> Stream:
        """A stream beside all others."""
        ...

    def record(self, stream: Stream) -> Event:
        """Mark what the stream has been given so far."""
        ...

    def record_timed(self, stream: Stream) -> Event:
        """Likewise, and `time_ns` says later when the stream came there."""
        ...

    def time_ns(self, event: Event) -> int:
        """When a complete event of `record_timed` was completed, on the host's monotonic clock."""
        ...

    def relate_clocks(self) -> None:
        """Relate the device's clock to the host's anew: the two drift, and what a device tells of
        long times is coarse. The host waits for what the compute stream was given."""

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        """Let the stream do nothing for so long before what it is given next."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what the stream is given from now on run only after the event. The host does not
        wait."""

    def query(self, event: Event) -> bool:
        """Whether the event is complete, as the host sees it."""
        ...

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        """Let the host wait until the event is complete. With `soon`, of what takes microseconds,
        the thread looks again and again for a while before it sleeps."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy bytes on the stream; both are flat, of equal size and of uint8. Neither is kept
        alive until the copy has run: that is the caller's."""

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Memory for work of this stream. Once its tensor is gone it is given out again, to work
        that comes later on the same stream."""
        ...

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Memory that lies at this address for as long as whoever asks says: flat, uint8. Of a
        device's it may be a peer's, which this device's copies reach."""
        ...

    def selected(self) -> AbstractContextManager[object]:
        """Within it this is the calling thread's device, for calls that go past torch."""
        ...

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that copies to and from the device reach directly: flat, uint8."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Also another stream uses this memory: what that has been given by the time at which the
        tensor is gone runs before the memory is given out again."""

    def take_over(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """What the calling thread computes from now on uses tensors that are complete, and came
        from another stream."""


# The CPU as a device: everything is done when its call returns.


_LEAST_REUSED_BYTES = 128 * 2**10
"""The C library keeps smaller memory by itself."""
_MOST_SPARE_BYTES = 256 * 2**20

_STREAM = Stream(None)
_EVENT = Event(None)


class CpuDevice:
    """Implements `rrfp.runtime.device.interface.Device`."""

    torch_device = torch.device("cpu")
    is_synchronous = True
    clock_error_ns = 0

    def __init__(self) -> None:
        self._memory = HostMemory(_MOST_SPARE_BYTES)
        self._copies = HostCopies()

    def compute_stream(self) -> Stream:
        return _STREAM

    def new_stream(self) -> Stream:
        return _STREAM

    def record(self, stream: Stream) -> Event:
        return _EVENT

    def record_timed(self, stream: Stream) -> Event:
        return Event(time.monotonic_ns())

    def time_ns(self, event: Event) -> int:
        return cast(int, event)

    def relate_clocks(self) -> None:
        pass

    def keep_busy(self, stream: Stream, time_ns: int) -> None:
        time.sleep(time_ns / 1e9)

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def query(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        # torch's copy_ is slower where much memory goes round, and where torch has several threads
        # it waits for cores on which something computes.
        self._copies.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        shape = tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._memory.empty(num_bytes).view(dtype).view(shape)

    def memory_at(self, address: int, num_bytes: int) -> torch.Tensor:
        return memory_at(address, num_bytes)

    def selected(self) -> AbstractContextManager[object]:
        return nullcontext()

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def take_over(self, tensors: Iterable[torch.Tensor | None]) -> None:
        pass


CPU = CpuDevice()
"""The one of this process."""
