"""Replays what a dispatcher took in, as it was recorded."""

from collections.abc import Iterable

from rrfp.schedule.dispatcher import (
    ComputeIdle,
    DecideAhead,
    Dispatcher,
    InputArrived,
    RunTask,
    Stimulus,
    TaskAgreed,
)
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import StimulusRecord


def stimulus_of(record: StimulusRecord) -> Stimulus:
    """The stimulus that was recorded."""
    if record.name == "ComputeIdle":
        return ComputeIdle()
    if record.name == "DecideAhead":
        return DecideAhead()
    task = Task(record.stage, Kind(record.kind), record.microbatch)
    if record.name == "TaskAgreed":
        return TaskAgreed(task)
    assert record.name == "InputArrived"
    return InputArrived(task, record.member)


def replayed(stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher) -> list[Task]:
    """The tasks that a fresh dispatcher runs when it takes in one step's stimuli again."""
    return [
        instruction.task
        for record in stimuli
        for instruction in dispatcher.handle(record.time_ns, stimulus_of(record))
        if isinstance(instruction, RunTask)
    ]
