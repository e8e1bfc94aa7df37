"""The CPU as a device: everything is done when its call returns."""

import time
from collections.abc import Iterable
from typing import cast

import torch

from rrfp.runtime.device.device import Event, Stream

_STREAM = Stream(None)
_EVENT = Event(None)


class CpuDevice:
    """Implements `rrfp.runtime.device.device.Device`."""

    torch_device = torch.device("cpu")
    is_synchronous = True
    clock_error_ns = 0

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

    def synchronize(self, event: Event) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def empty(self, shape: Iterable[int], dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def empty_on_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def take_over(self, tensors: Iterable[torch.Tensor | None]) -> None:
        pass
