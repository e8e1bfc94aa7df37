"""Instructions: what a dispatcher answers with."""

from typing import NamedTuple

from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Task


class RunTask(NamedTuple):
    """Run this task now. Counts are as of the decision."""

    task: Task
    chunk: int
    hint_position: int
    """Its place in the hint's order; -1 if the dispatcher has no order."""
    ready: int
    """How many tasks were ready, this one included; a task that a bound withholds is not."""
    skipped: int
    """How many unfinished tasks the hint's order puts before it; -1 without an order."""
    depth: int
    """D, this task included."""
    held: int
    """Activations held, this task included, in slots of one chunk."""
    ready_forwards: int
    """The forwards among `ready`."""
    ready_backwards: int
    """The backwards among `ready`."""
    held_bytes: int = 0
    """The sizes of the activations held, this task included; 0 where sizes are not known."""


class Wait(NamedTuple):
    """Run nothing; ask again when something arrives."""

    cause: Cause
    deadline_ns: int | None = None
    """Ask again at this time at the latest, because something may run by then; None: nothing may
    before something arrives."""


class Waited(NamedTuple):
    """An idle interval has ended; attribute it to this cause."""

    cause: Cause
    start_ns: int
    end_ns: int


class StepDone(NamedTuple):
    """Every task of the step has been dispatched."""


Instruction = RunTask | Wait | Waited | StepDone
