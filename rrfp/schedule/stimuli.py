"""Stimuli: what a dispatcher takes in."""

from typing import NamedTuple

from rrfp.schedule.tasks import Task


class InputArrived(NamedTuple):
    """A task's input from a neighbouring stage has arrived: on this rank (`member` 0), or on that
    member of the group that this rank leads."""

    task: Task
    member: int = 0


class Announced(NamedTuple):
    """The task whose output this one takes has begun on another rank."""

    task: Task
    expected_ns: int
    """When the input is expected here, on the clock of `Dispatcher.handle`."""
    patience_ns: int
    """How long this rank would wait for it."""


class ComputeIdle(NamedTuple):
    """The compute thread is free, and everything that has arrived was passed in."""


class DecideAhead(NamedTuple):
    """A task is running; decide on the next one already, if something is ready."""


class TaskAgreed(NamedTuple):
    """The compute thread is free, and the group's leader has decided on this task."""

    task: Task


Stimulus = InputArrived | Announced | ComputeIdle | DecideAhead | TaskAgreed
