"""What a dispatcher answers with: the instructions."""

from typing import NamedTuple

from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Task


class RunTask(NamedTuple):
    """Run this task now. The counts are those of the moment of decision."""

    task: Task
    chunk: int
    hint_position: int
    """Its place in the hint's order, -1 when the dispatcher was given none."""
    ready: int
    """Tasks that were ready, this one included."""
    skipped: int
    """Unfinished tasks that the hint's order puts before it, -1 when there is no order."""
    depth: int
    """D once this task has run."""
    held: int
    """Activations held once this task has run, in chunks."""
    ready_forwards: int
    """Of those; what a bound withholds is not ready."""
    ready_backwards: int


class Wait(NamedTuple):
    """Nothing can run; ask again when something has arrived."""

    cause: Cause


class Waited(NamedTuple):
    """Account this idle interval, which is over, to its cause."""

    cause: Cause
    start_ns: int
    end_ns: int


class StepDone(NamedTuple):
    """Every task of the step was dispatched."""


Instruction = RunTask | Wait | Waited | StepDone
