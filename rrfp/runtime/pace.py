"""Steps whose tasks and messages take the time of a model, while real work and messages flow.

A pace stretches; it never shortens. It is asked in the same places under every dispatch: around the
work of a task, and for each message before it leaves.
"""

import ctypes
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S

MOST_OVER_PACE = 0.02
"""Where a larger share of tasks takes longer than its model, times are not the model's."""

_WAKE_UP_NS = 100_000
"""About what it takes to wake up a sleeping thread."""

_PR_SET_TIMERSLACK = 29
"""Of Linux's prctl."""

Sleep = Callable[[int], None]
"""Lets the work go on at a moment of the clock, in ns, and not before. On a GPU the stream would
wait and not the host."""


class StepPace(Protocol):
    """The pace of one step on one rank."""

    def task(self, task: Task) -> AbstractContextManager[None]:
        """Around a task's work, in the sequence in which the rank starts them. It is left when the
        modelled time since its entry has passed, and counts work that took longer."""
        ...

    def message_ns(self, task: Task) -> int:
        """How long the message for this task takes."""
        ...


class Pace(Hashable, Protocol):
    """Paces a rank's steps."""

    def start_step(self, step: int, shape: Shape) -> StepPace:
        """The pace of a step that begins now; every rank calls it at its entry into the step."""
        ...


def sleep_until(due_ns: int) -> None:
    """Sleep until a moment of the monotonic clock; not at all when it has passed. The end of it is
    spent awake, or every task would take longer than its model by the time of a wake-up."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        if left_ns > _WAKE_UP_NS:
            time.sleep((left_ns - _WAKE_UP_NS) / NS_PER_S)


def sharpen_sleep() -> None:
    """Let this thread, and those that it starts from now on, wake up when they asked to: Linux
    else takes up to 50 us more, to wake several threads at once. Elsewhere nothing is done."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (AttributeError, OSError):
        return
