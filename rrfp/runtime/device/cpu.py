"""The CPU as a device: everything is done when its call returns."""

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from rrfp.runtime.device.device import Event, Stream
from rrfp.runtime.device.host_copies import HostCopies
from rrfp.runtime.device.host_memory import HostMemory, memory_at

_LEAST_REUSED_BYTES = 128 * 2**10
"""The C library keeps smaller memory by itself."""
_MOST_SPARE_BYTES = 256 * 2**20

_STREAM = Stream(None)
_EVENT = Event(None)


class CpuDevice:
    """Implements `rrfp.runtime.device.device.Device`."""

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
