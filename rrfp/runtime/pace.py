"""Paces make real tasks and messages as long as a model says.

A pace lengthens and never shortens. Every kind of dispatch calls it at the same two points: around
a task's work, and for each message before it is sent.
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


@dataclass(frozen=True, slots=True)
class Delays:
    """Random delays of one rank's tasks and messages, to show that results do not depend on them:
    uniform between 0 and `longest_s`, and reproducible by seed."""

    seed: int
    rank: int
    longest_s: float

    def generator(self, name: str) -> Callable[[], float]:
        """Return a function that draws the next delay, in seconds. Each name has its own sequence.
        Use one name per thread, so that a thread's sequence does not depend on other threads."""
        source = random.Random(f"{self.seed}/{self.rank}/{name}")
        return lambda: source.uniform(0.0, self.longest_s)

    def sleeper(self, name: str) -> Callable[[], None]:
        """Return a function that sleeps for the next delay of `generator(name)`."""
        draw = self.generator(name)
        return lambda: time.sleep(draw())


MOST_OVER_PACE = 0.02
"""If a larger share of tasks takes longer than modeled, the run's times are not the model's."""

_WAKE_UP_NS = 100_000
"""Rough time that a sleeping thread needs to wake up."""

_PR_SET_TIMERSLACK = 29
"""Linux's prctl option."""

Sleep = Callable[[int], None]
"""Delays work until a time of the clock, in ns. On a GPU the stream would wait, not the host."""


class StepPace(Protocol):
    """The pace of one step on one rank."""

    def task(self, task: Task) -> AbstractContextManager[None]:
        """Wrap a task's work, in the order in which the rank starts its tasks. Exits once the
        modeled time since entry has passed, and counts tasks that took longer."""
        ...

    def left_ns(self, task: Task, work_ns: int) -> int:
        """Return the time to add to a task whose work should take `work_ns`, on a device that runs
        beside the host. Called once for each task, in launch order, which counts as the order in
        which the tasks start."""
        ...

    def worked(self, task: Task, worked_ns: int) -> None:
        """Note the measured time of a task's work on a device that runs beside the host, and count
        tasks that took longer than modeled."""

    def expected_ns(self, task: Task) -> int | None:
        """Return the task's duration in ns if it is known before the task runs; else None."""
        ...

    def message_ns(self, task: Task) -> int:
        """Return the modeled duration, in ns, of the message that carries this task's input."""
        ...


class Pace(Hashable, Protocol):
    """Paces a rank's steps."""

    def sizes(self, step: int, shape: Shape) -> ActivationSizes | None:
        """Return the modeled activation bytes of the step's microbatches on this rank's chunks;
        None if the model has none."""
        ...

    def start_step(self, step: int, shape: Shape) -> StepPace:
        """Return the pace of a step that begins now; every rank calls this as it enters the
        step."""
        ...


def sleep_until(due_ns: int) -> None:
    """Sleep until a time of the monotonic clock, in ns; return at once if it is past. The last 0.1
    ms are a busy wait, because every task would otherwise exceed its modeled time by a wake-up."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        if left_ns > _WAKE_UP_NS:
            time.sleep((left_ns - _WAKE_UP_NS) / NS_PER_S)


def reduce_timer_slack() -> None:
    """Set the timer slack of this thread, and of threads that it starts later, to 1 ns: Linux
    otherwise delays wake-ups by up to 50 us, to batch them. Does nothing on other systems."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (AttributeError, OSError):
        return
