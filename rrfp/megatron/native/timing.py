"""When work began and ended: on the host where it runs there, on the GPU where that does it.

On CUDA the host only launches a task; when the GPU ran it is told by events on the current stream.
Nothing here waits for the GPU while a step runs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rrfp.runtime.protocols import Clock, monotonic

_LONGEST_LOOK_NS = 100_000


class Timer(Protocol):
    """Marks where the work has got to, and tells when that was, on the host's clock, later."""

    def mark(self) -> Any:
        """Where the work that was given so far ends."""

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        """The times of marks, in the order in which they were made; None where some are still to
        come, unless it may `wait` for them."""


class HostTimer:
    """Work is done when the call that does it returns."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock

    def mark(self) -> int:
        return self._clock()

    def times_ns(self, marks: Sequence[int], *, wait: bool) -> list[int]:
        return list(marks)


class CudaTimer:
    """Work is done when the current stream gets there.

    An event's time is that of a reference event, whose time on the host's clock is known, and the
    time between the two. The last mark whose time was told becomes the next reference. Before a
    step, whenever the GPU has nothing to do then, one is made anew, as the two clocks drift.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._spare: list[Any] = []
        torch.cuda.synchronize()
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = clock()

    def look_at_clock(self) -> None:
        """Compare the clocks, if the stream is idle: an event that passes at once does it. It is
        given up after a tenth of a millisecond."""
        if not torch.cuda.current_stream().query():
            return
        event = self.mark()
        began_ns = self._clock()
        while not event.query():
            if self._clock() - began_ns > _LONGEST_LOOK_NS:
                return
        self._reference, self._reference_ns = event, (began_ns + self._clock()) // 2

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else _new_event()
        event.record()
        return event

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        if marks and wait:
            marks[-1].synchronize()
        if not all(mark.query() for mark in marks):
            return None
        times = [
            self._reference_ns + round(self._reference.elapsed_time(mark) * 1_000_000)
            for mark in marks
        ]
        if marks:
            # What lies between two events is told in single precision: the closer, the better.
            self._spare += [self._reference, *marks[:-1]]
            self._reference, self._reference_ns = marks[-1], times[-1]
        return times


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
