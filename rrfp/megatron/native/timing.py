"""When work began and ended, on the host or on the GPU, whichever runs it.

On CUDA the host only launches a task; events on the current stream tell when the GPU ran it.
Nothing here waits for the GPU while a step runs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rrfp.runtime.protocols import Clock, monotonic

_LONGEST_LOOK_NS = 100_000


class Timer(Protocol):
    """Marks points in the work, and later gives their times on the host's clock."""

    knows_at_once: bool
    """Whether the time of a mark is known when it is made."""

    def mark(self) -> Any:
        """Mark the end of the work issued so far."""

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        """The times of marks, passed in the order in which they were made. Without `wait`, None if
        some are not known yet."""


class HostTimer:
    """For work that is done when its call returns."""

    knows_at_once = True

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock

    def mark(self) -> int:
        return self._clock()

    def times_ns(self, marks: Sequence[int], *, wait: bool) -> list[int]:
        return list(marks)


class CudaTimer:
    """For work that is done when the current stream reaches it.

    An event's time is that of a reference event, whose time on the host's clock is known, plus the
    time between the two. The last mark whose time was read becomes the next reference. Before a
    step, if the GPU is idle, a new reference is made, because the two clocks drift.
    """

    knows_at_once = False

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._spare: list[Any] = []
        torch.cuda.synchronize()
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = clock()

    def look_at_clock(self) -> None:
        """Compare the clocks if the stream is idle, by an event that completes at once. Gives up
        after a tenth of a millisecond."""
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
            # The time between two events has single precision: the closer they are, the better.
            self._spare += [self._reference, *marks[:-1]]
            self._reference, self._reference_ns = marks[-1], times[-1]
        return times


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
