"""Paces: real tasks and messages, held until the times of a model have passed.

A pace lengthens and never shortens. Every kind of dispatch consults it at the same two points:
around a task's work, and for each message before it leaves.
"""

import ctypes
import random
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S

# Random delays injected into tasks and messages, to show that a result does not depend on them.


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of one rank, uniform between 0 and `longest_s` and reproducible by seed."""

    seed: int
    rank: int
    longest_s: float

    def draws(self, name: str) -> Callable[[], float]:
        """A function that draws the next delay of this stream, in seconds. Give each thread its own
        stream, so that its sequence does not depend on other threads."""
        source = random.Random(f"{self.seed}/{self.rank}/{name}")
        return lambda: source.uniform(0.0, self.longest_s)

    def stream(self, name: str) -> Callable[[], None]:
        """A function that sleeps for the next delay of this stream."""
        draw = self.draws(name)
        return lambda: time.sleep(draw())


MOST_OVER_PACE = 0.02
"""If a larger share of tasks takes longer than modelled, the run's times are not the model's."""

_WAKE_UP_NS = 100_000
"""Roughly how long a sleeping thread takes to wake up."""

_PR_SET_TIMERSLACK = 29
"""Linux's prctl option."""

Sleep = Callable[[int], None]
"""Delays work until a time of the clock, in ns. On a GPU the stream would wait, not the host."""


class StepPace(Protocol):
    """The pace of one step on one rank."""

    def task(self, task: Task) -> AbstractContextManager[None]:
        """Wrap a task's work, in the order in which the rank starts its tasks. Exits once the
        modelled time since entry has passed, and counts tasks that took longer."""
        ...

    def left_ns(self, task: Task, work_ns: int) -> int:
        """How much longer a task is to take whose work is expected to take so long, on a device
        that cannot be asked while it works. Called once for each task, in the order in which the
        rank launches them, which is taken for their start."""
        ...

    def worked(self, task: Task, worked_ns: int) -> None:
        """Such a device has done a task's work, and it took so long: counts tasks that took longer
        than modelled."""

    def expected_ns(self, task: Task) -> int | None:
        """What the task is known to take before it runs; None where nothing is."""
        ...

    def message_ns(self, task: Task) -> int:
        """How long the message for this task takes."""
        ...


class Pace(Hashable, Protocol):
    """Paces a rank's steps."""

    def sizes(self, step: int, shape: Shape) -> ActivationSizes | None:
        """What the step's microbatches keep on this rank's chunks by the model, in bytes; None if
        it does not say it."""
        ...

    def start_step(self, step: int, shape: Shape) -> StepPace:
        """The pace of a step that begins now; every rank calls this when it enters the step."""
        ...


def sleep_until(due_ns: int) -> None:
    """Sleep until a time of the monotonic clock. Spends the last moments awake, or every task would
    overrun its modelled time by a wake-up."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        if left_ns > _WAKE_UP_NS:
            time.sleep((left_ns - _WAKE_UP_NS) / NS_PER_S)


def sharpen_sleep() -> None:
    """Make this thread, and threads that it starts later, wake up on time. Linux otherwise adds up
    to 50 us, to batch wake-ups. Does nothing on other systems."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (AttributeError, OSError):
        return
