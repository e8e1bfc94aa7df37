"""What is recorded: a few record types, one tuple each, and the recording that holds them.

All times are integer nanoseconds. A rank records on its own host's monotonic clock. In a
`Recording` every time has been moved to the reference clock (that of rank 0's host) by the rank's
`clock_offset_ns`, and counts from the start of the run. `step` numbers training steps and
evaluations separately (`rrfp.trace.records`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rrfp.errors import RrfpError, numbered
from rrfp.schedule.tasks import (
    Announced,
    Cause,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Kind,
    Stimulus,
    Task,
    TaskAgreed,
)

NS_PER_S = 1_000_000_000


class TaskRecord(NamedTuple):
    """A task that ran, and what its dispatcher knew when it chose the task."""

    start_ns: int
    end_ns: int
    step: int
    kind: str
    stage: int
    chunk: int
    microbatch: int
    hint_position: int
    """Place in the hint's order on this rank (of a round-based hint: when all times are equal)."""
    ready: int
    """Tasks ready at the decision, this one included: `ready_forwards` plus ready B and W."""
    skipped: int
    """Unfinished tasks that the hint ranks above this one (its deviation from the hint)."""
    depth: int
    """D, this task included: chunk-forwards minus chunk-backwards run in the step."""
    held: int
    """Activations kept from F until W (B if W is not split off), this task included, in chunks."""
    ready_forwards: int
    ready_backwards: int
    held_bytes: int = 0
    """Bytes of the activations kept, this task included; 0 where sizes are not known."""
    waiting_bytes: int = 0
    """Bytes of gradients that waited for those of earlier microbatches when the task began."""


class WaitRecord(NamedTuple):
    """An idle interval with one cause."""

    start_ns: int
    end_ns: int
    step: int
    cause: str


class SendRecord(NamedTuple):
    """A message from its first byte written, or copied into a slot of the outbox, to its last
    written. (kind, stage, microbatch) is the task that consumes it; `sequence` counts the messages
    of the directed link rank -> peer."""

    start_ns: int
    end_ns: int
    step: int
    kind: str
    stage: int
    microbatch: int
    peer: int
    sequence: int
    num_bytes: int
    plane: str = "inline"
    """What carried its tensors (`rrfp.runtime.planes.registry`)."""
    queued_ns: int = 0
    """How long it waited on this rank before: for the link, for a slot, for a device."""
    copy_ns: int = 0
    """How long it was copied into its slot; the rest, up to the end, is the wire's."""


class ReceiveRecord(NamedTuple):
    """A message from its header's arrival to its last byte; fields as in `SendRecord`, with the
    link peer -> rank."""

    start_ns: int
    end_ns: int
    step: int
    kind: str
    stage: int
    microbatch: int
    peer: int
    sequence: int
    num_bytes: int
    plane: str = "inline"
    queued_ns: int = 0
    """How long it waited on this rank to be pulled."""
    copy_ns: int = 0
    """How long it was pulled out of its sender's slot, or taken to the device."""


class AgreementRecord(NamedTuple):
    """One agreed task: when the leader sent its decision, or a follower took it up. Waiting for a
    decision is a wait of cause `coordination`."""

    start_ns: int
    end_ns: int
    step: int
    kind: str
    stage: int
    microbatch: int
    position: int
    """Place in the group's agreed sequence of the step."""


class StimulusRecord(NamedTuple):
    """A stimulus that the dispatcher took in; in order, they replay a rank exactly. `name` is the
    stimulus' class. Without a task, stage and microbatch are -1 and kind is empty. `member` is the
    group member that reported it (0: this rank)."""

    time_ns: int
    step: int
    name: str
    kind: str
    stage: int
    microbatch: int
    member: int
    expected_in_ns: int = 0
    """Of an announcement: in how long its input was expected; negative where it was overdue."""
    patience_ns: int = 0
    """Of an announcement: how long the rank would wait for it."""


class Phase(StrEnum):
    """What takes a rank's time besides tasks and waits."""

    SCHEDULE = "schedule"
    """From the rank's entry into the schedule to its return: its share of the step's window."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    LAUNCH = "launch"
    """The host handed a task to the device, which runs tasks beside it."""
    PLAN = "plan"
    """The planner's process searched for the step's order of entry, while the step before ran."""
    SCRIPT = "script"
    """In a recorded job: from a call's return to the next call. The script's own time, with its
    optimizer."""


class PhaseRecord(NamedTuple):
    """Part of a step other than tasks and waits. One `SCHEDULE` phase closes each step."""

    start_ns: int
    end_ns: int
    step: int
    phase: str
    budget_bytes: int = 0
    """Of a `SCHEDULE` phase: the most bytes of activations that the rank could keep in the step; 0
    where no bound in bytes was in force."""
    unknown_sizes: int = 0
    """Of a `SCHEDULE` phase: the sizes that were not known yet, and counted as all of the bound."""


class CostRecord(NamedTuple):
    """What recording has cost this rank so far: the number of records, and the measured time of
    taking and writing them."""

    time_ns: int
    step: int
    num_records: int
    cost_ns: int


class LossRecord(NamedTuple):
    """How many of a step's last records this rank had no room for. They include the phase that
    closes the step, without which the step counts as unfinished on this rank."""

    time_ns: int
    step: int
    num_lost: int


class Doing(StrEnum):
    """What a rank may have begun besides a task, a wait (then it is a `Cause`) or a `Phase`."""

    TASK = "task"
    SETTING_UP = "setting_up"
    """Before its first step."""
    EVALUATION = "evaluation"
    METRICS = "metrics"
    """Exchanging the figures of a step, which every rank waits for."""
    CHECKPOINT = "checkpoint"
    CLOSING = "closing"
    BETWEEN = "between phases"
    """Nothing that lasts: after a phase, before the next thing was begun."""


class BegunRecord(NamedTuple):
    """What a rank has begun. While it trains only its flight record has these. A trace has the one
    that the rank never ended, up to the last that is known of the run."""

    start_ns: int
    end_ns: int
    step: int
    doing: str
    """`Doing`, a `Phase`, or the cause of a wait."""
    kind: str = ""
    """The task that runs, or the one whose output is waited for; empty and -1 for neither."""
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    """The rank that is waited for."""


Record = (
    TaskRecord
    | WaitRecord
    | SendRecord
    | ReceiveRecord
    | AgreementRecord
    | StimulusRecord
    | PhaseRecord
    | CostRecord
    | LossRecord
    | BegunRecord
)


def num_times(record: Any) -> int:
    """How many of a record's first fields are times: start and end, or one."""
    return 2 if hasattr(record, "end_ns") else 1


RECORD_TYPES: dict[str, type[Record]] = {
    "task": TaskRecord,
    "wait": WaitRecord,
    "send": SendRecord,
    "receive": ReceiveRecord,
    "agreement": AgreementRecord,
    "stimulus": StimulusRecord,
    "phase": PhaseRecord,
    "cost": CostRecord,
    "loss": LossRecord,
    "begun": BegunRecord,
}
"""The name of each record type in spill files."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Who recorded: a process, its place in the layout, and its clock."""

    rank: int
    pp_rank: int
    tp_rank: int
    dp_rank: int
    stages: tuple[int, ...]
    host: str
    pid: int
    clock_offset_ns: int = 0
    """Add this to the rank's times to move them to the reference clock."""
    clock_error_ns: int = 0
    """How far its times may be off then: half the shortest round trip of the offset's measurement,
    0 on the reference host, and on a GPU the error of its clock against the host's."""


@dataclass(slots=True)
class RankRecords:
    """Everything one rank recorded, each list in the order in which it was recorded."""

    info: RankInfo
    tasks: list[TaskRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    sends: list[SendRecord] = field(default_factory=list)
    receives: list[ReceiveRecord] = field(default_factory=list)
    agreements: list[AgreementRecord] = field(default_factory=list)
    stimuli: list[StimulusRecord] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    costs: list[CostRecord] = field(default_factory=list)
    losses: list[LossRecord] = field(default_factory=list)
    begun: list[BegunRecord] = field(default_factory=list)
    """What the rank never ended: one at most, of a run that ended amid it."""

    def by_name(self) -> dict[str, list[Any]]:
        """Each list (not a copy) by its type's name in `RECORD_TYPES`."""
        return {
            "task": self.tasks,
            "wait": self.waits,
            "send": self.sends,
            "receive": self.receives,
            "agreement": self.agreements,
            "stimulus": self.stimuli,
            "phase": self.phases,
            "cost": self.costs,
            "loss": self.losses,
            "begun": self.begun,
        }


@dataclass(slots=True)
class Recording:
    """A run: its settings (as in run.json) and the records of every rank, by rank."""

    settings: dict[str, object]
    ranks: list[RankRecords]


# Steps of a run: how they are numbered and named, and when each one ran.
#
# In every record, training steps are numbered 0, 1, 2, ... Evaluations, which run forwards only,
# have negative numbers: -1 is evaluation 0, -2 is evaluation 1, ... So step numbers do not rise
# with time. Earlier versions numbered evaluations among the training steps.


Window = tuple[int, int]
"""Start and end, in nanoseconds of the trace."""

STEP, EVALUATION = "step", "evaluation"
"""The two sorts of step."""


def evaluation_step(number: int) -> int:
    """The step number of a run's evaluation `number`, counted from 0."""
    return -1 - number


def is_evaluation(step: int) -> bool:
    return step < 0


def told_step(step: int) -> tuple[str, int]:
    """The sort of a step, and its number within that sort: `("evaluation", 0)`."""
    return (EVALUATION, -1 - step) if step < 0 else (STEP, step)


def step_name(step: int) -> str:
    """`step 3`, `evaluation 0`."""
    sort, number = told_step(step)
    return f"{sort} {number}"


def step_names(steps: Iterable[int]) -> str:
    """`steps 3, 4`, `evaluation 0`, or both, each in order."""
    numbers: dict[str, list[int]] = {STEP: [], EVALUATION: []}
    for sort, number in map(told_step, in_order(steps)):
        numbers[sort].append(number)
    return " and ".join(numbered(sort, found) for sort, found in numbers.items() if found)


def count_of(steps: Collection[int]) -> str:
    """`1 step`, `3 evaluations`, or both."""
    num_evaluations = sum(map(is_evaluation, steps))
    counts = {STEP: len(steps) - num_evaluations, EVALUATION: num_evaluations}
    told = [counted(number, sort) for sort, number in counts.items() if number]
    return " and ".join(told) or counted(0, STEP)


def counted(number: int, sort: str) -> str:
    """`1 step`, `3 evaluations`."""
    return f"{number} {sort}{'' if number == 1 else 's'}"


def in_order(steps: Iterable[int]) -> list[int]:
    """Training steps in their order, then evaluations in theirs."""
    return sorted(steps, key=lambda step: (is_evaluation(step), abs(step)))


def spread_evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of a run's steps, spread evenly over them.

    Each comes from the middle of its share of the run, because the first step warms up caches.
    """
    num = min(len(steps), most)
    return [steps[(2 * part + 1) * len(steps) // (2 * num)] for part in range(num)]


def step_windows(recording: Recording) -> dict[int, Window]:
    """By step: the window of each step that every rank finished."""
    return windows_of(
        (
            (records.info.rank, phase.step, phase.start_ns, phase.end_ns)
            for records in recording.ranks
            for phase in records.phases
            if phase.phase == Phase.SCHEDULE
        ),
        len(recording.ranks),
    )


def windows_of(schedules: Iterable[tuple[int, int, int, int]], num_ranks: int) -> dict[int, Window]:
    """By step: the window of each step that all `num_ranks` ranks finished.

    `schedules` are the run's `SCHEDULE` phases: rank, step, start and end in ns. A window extends
    from the first rank's entry into the schedule to the last one's return from it.
    """
    windows: dict[int, Window] = {}
    finished: defaultdict[int, set[int]] = defaultdict(set)
    for rank, step, start_ns, end_ns in schedules:
        finished[step].add(rank)
        first_ns, last_ns = windows.get(step, (start_ns, end_ns))
        windows[step] = min(first_ns, start_ns), max(last_ns, end_ns)
    return {step: windows[step] for step in sorted(windows) if len(finished[step]) == num_ranks}


# A dispatcher's stimuli as records, and back, so that a recorded rank can be replayed.


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


# The counts of a dispatcher, for ranks that follow a fixed schedule without one.


class FixedScheduleCounts:
    """Counts over the tasks of one rank's step, fed in the order in which they run."""

    def __init__(self, releases: Kind) -> None:
        """`releases` is the kind of task that frees an activation: W if the backward is split,
        otherwise B."""
        self._releases = releases
        self.num_run = 0
        self.depth = 0
        """D: chunk-forwards minus chunk-backwards run."""
        self.held = 0
        self.peak_held = 0
        """The most activations held so far, in slots of one chunk and one microbatch."""

    def ran(self, kind: Kind) -> tuple[int, int, int, int, int, int, int]:
        """Count a task; return the fields of its `TaskRecord` from `hint_position` on."""
        place = self.num_run
        self.num_run += 1
        self.depth += (kind is Kind.F) - (kind is Kind.B)
        self.held += (kind is Kind.F) - (kind is self._releases)
        self.peak_held = max(self.peak_held, self.held)
        # A fixed schedule considers one task and skips none.
        ready, skipped = 1, 0
        of_kind = int(kind is Kind.F), int(kind is Kind.B)
        return place, ready, skipped, self.depth, self.held, *of_kind

    def cause_of_transfer(self, num_tasks: int) -> Cause:
        """The cause of a wait for a transfer at this point of a step of `num_tasks` tasks."""
        if self.num_run == 0:
            return Cause.WARMUP
        return Cause.DRAIN if self.num_run == num_tasks else Cause.TRANSFER


# The bytes that activations keep, from the sums that a rank's tasks were recorded with.
#
# In a step, F adds what a microbatch keeps on a chunk. B leaves what is owed to W, and W gives back
# that. So the change from one task to the next tells every size exactly. A dispatcher's sizes never
# grow from F to W; measured ones may, where W needs more than F kept.


class KeptChange(NamedTuple):
    """What one task changed."""

    task: TaskRecord
    change: int
    """In bytes."""
    kept: int
    """What the microbatch still keeps on this chunk; negative if the sums do not add up."""


def are_known(tasks: Iterable[TaskRecord]) -> bool:
    """Whether the sizes of any of these tasks are known."""
    return any(task.held_bytes for task in tasks)


def kept_changes(tasks: Iterable[TaskRecord]) -> Iterator[KeptChange]:
    """The changes of one rank's tasks, in the order in which they ran. Steps begin with nothing."""
    step: int | None = None
    held = 0
    kept: dict[tuple[int, int], int] = {}
    for task in tasks:
        if task.step != step:
            step, held = task.step, 0
            kept = {}
        change = task.held_bytes - held
        held = task.held_bytes
        key = task.stage, task.microbatch
        kept[key] = kept.get(key, 0) + change
        yield KeptChange(task, change, kept[key])


def held_for_w(tasks: Sequence[TaskRecord]) -> list[int]:
    """By task, the bytes that wait for weight gradients alone once it has been chosen."""
    step: int | None = None
    total = 0
    found = []
    for task, change, kept in kept_changes(tasks):
        if task.step != step:
            step, total = task.step, 0
        if task.kind == Kind.B:
            total += kept
        elif task.kind == Kind.W:
            total += change
        found.append(total)
    return found


def wrong_changes(tasks: Iterable[TaskRecord]) -> list[TaskRecord]:
    """The tasks of one rank whose sums do not add up: an F that gives bytes back, a W that takes
    some, a B or W that gives back more than were kept, and a last task of a microbatch on a chunk
    after which some are left. `tasks` are of whole steps."""
    wrong = []
    left: dict[tuple[int, int, int], tuple[TaskRecord, int]] = {}
    for task, change, kept in kept_changes(tasks):
        is_wrong_way = change < 0 if task.kind == Kind.F else task.kind == Kind.W and change > 0
        if is_wrong_way or kept < 0:
            wrong.append(task)
        left[task.step, task.stage, task.microbatch] = task, kept
    return wrong + [task for task, kept in left.values() if kept > 0]
