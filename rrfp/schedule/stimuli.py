"""What a dispatcher takes in: the stimuli."""

from typing import NamedTuple

from rrfp.schedule.tasks import Task


class InputArrived(NamedTuple):
    """What a neighbouring stage sends for a task is here (`member` 0: on this rank; another: on
    that member of the group this rank leads)."""

    task: Task
    member: int = 0


class ComputeIdle(NamedTuple):
    """The compute thread is free, and everything that has arrived was handed in."""


class DecideAhead(NamedTuple):
    """A task is running; decide for the next one already, if something is ready."""


class TaskAgreed(NamedTuple):
    """The compute thread is free, and the group's leader has decided for this task."""

    task: Task


Stimulus = InputArrived | ComputeIdle | DecideAhead | TaskAgreed
