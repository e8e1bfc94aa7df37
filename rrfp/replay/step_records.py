"""What a recording holds of one step, arranged by who ran it."""

from collections import defaultdict
from dataclasses import dataclass

from rrfp.schedule.shape import Shape
from rrfp.trace.records import (
    Phase,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
)
from rrfp.trace.steps import Window


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank recorded of one step, each list in the order in which it was recorded."""

    info: RankInfo
    entry_ns: int
    """When it entered the schedule."""
    tasks: list[TaskRecord]
    waits: list[WaitRecord]
    receives: list[ReceiveRecord]
    stimuli: list[StimulusRecord]
    is_in_group: bool
    """Whether it agreed with other ranks on what to run."""
    budget_bytes: int = 0
    """Its bound in bytes; 0 without one."""
    unknown_sizes: int = 0
    """Of its microbatches on its chunks, when it had a bound in bytes."""


Members = tuple[RankStep, ...]
"""The ranks that run a pipeline rank's tasks together; the first one leads."""


@dataclass(frozen=True, slots=True)
class StepRecords:
    """One step that every rank finished."""

    step: int
    window: Window
    replicas: tuple[tuple[Members, ...], ...]
    """By data-parallel replica and pipeline rank. Replicas that share experts count as one."""

    def is_whole(self, shape: Shape) -> bool:
        """Whether every rank ran each task of the shape once."""
        return all(
            len(rank.tasks) == shape.num_tasks_of_a_rank
            and {(task.stage, task.kind, task.microbatch) for task in rank.tasks}
            == set(shape.tasks_of(pp_rank))
            for replica in self.replicas
            for pp_rank, members in enumerate(replica)
            for rank in members
        )


def split_by_step(records: RankRecords) -> defaultdict[int, RankStep]:
    """A rank's records by step; empty for a step that it did not record."""
    is_in_group = bool(records.agreements)
    steps: defaultdict[int, RankStep] = defaultdict(
        lambda: RankStep(records.info, 0, [], [], [], [], is_in_group)
    )
    for phase in records.phases:
        if phase.phase == Phase.SCHEDULE:
            steps[phase.step] = RankStep(
                *(records.info, phase.start_ns, [], [], [], [], is_in_group),
                *(phase.budget_bytes, phase.unknown_sizes),
            )
    for task in records.tasks:
        steps[task.step].tasks.append(task)
    for wait in records.waits:
        steps[wait.step].waits.append(wait)
    for receive in records.receives:
        steps[receive.step].receives.append(receive)
    for stimulus in records.stimuli:
        steps[stimulus.step].stimuli.append(stimulus)
    return steps
