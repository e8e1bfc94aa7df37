"""A dispatcher's stimuli as records, and back, so that a recorded rank can be replayed."""

from rrfp.errors import RrfpError
from rrfp.schedule.stimuli import (
    Announced,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Stimulus,
    TaskAgreed,
)
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, StimulusRecord, TaskRecord
from rrfp.trace.steps import step_name

_KINDS = {kind.value: kind for kind in Kind}
"""A plain dictionary: the enum's own lookup would dominate the time of reading a replay."""


def record_of(time_ns: int, step: int, stimulus: Stimulus) -> StimulusRecord:
    """The record of a stimulus that a dispatcher takes in at this time."""
    stage, kind, microbatch, member, expected_in_ns, patience_ns = -1, "", -1, 0, 0, 0
    match stimulus:
        case InputArrived():
            (stage, kind, microbatch), member = stimulus
        case TaskAgreed():
            ((stage, kind, microbatch),) = stimulus
        case Announced():
            # A time may be moved to another clock, but a duration stays.
            (stage, kind, microbatch), expected_ns, patience_ns = stimulus
            expected_in_ns = expected_ns - time_ns
    name = stimulus.__class__.__name__
    return StimulusRecord(
        *(time_ns, step, name, kind, stage, microbatch, member, expected_in_ns, patience_ns)
    )


def stimulus_of(record: StimulusRecord) -> Stimulus:
    """The stimulus that was recorded. Raises RrfpError if the record's name is not a stimulus."""
    match record.name:
        case "ComputeIdle":
            return ComputeIdle()
        case "DecideAhead":
            return DecideAhead()
        case "TaskAgreed":
            return TaskAgreed(task_of(record))
        case "InputArrived":
            return InputArrived(task_of(record), record.member)
        case "Announced":
            expected_ns = record.time_ns + record.expected_in_ns
            return Announced(task_of(record), expected_ns, record.patience_ns)
    raise RrfpError(
        f"the trace has a stimulus '{record.name}' of {step_name(record.step)}, which no "
        "dispatcher takes; see 'rrfp trace check'"
    )


def task_of(record: TaskRecord | ReceiveRecord | StimulusRecord) -> Task:
    """The task that a record is about. Raises RrfpError if its kind is unknown."""
    kind = _KINDS.get(record.kind)
    if kind is None:
        raise RrfpError(
            f"the trace has a task of kind '{record.kind}' in {step_name(record.step)}; it must be "
            f"one of {', '.join(Kind)}; see 'rrfp trace check'"
        )
    return Task(record.stage, kind, record.microbatch)
