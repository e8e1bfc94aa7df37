"""The record types, one named tuple each, and the recording that holds them.

All times are integer nanoseconds. A rank records on its own host's monotonic clock. In a
`Recording` every time has been moved to the reference clock (that of rank 0's host) by the rank's
`clock_offset_ns`, and counts from the start of the run. `step` numbers training steps and
evaluations separately (see below).
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
    """Position in the hint's order on this rank (for a hint in rounds: at equal task times)."""
    ready: int
    """Tasks ready at the decision, this one included: `ready_forwards` plus ready B and W."""
    skipped: int
    """Unfinished tasks that the hint ranks above this one (its deviation from the hint)."""
    depth: int
    """D, this task included: chunk-forwards minus chunk-backwards run in the step."""
    held: int
    """Activations stored from F until W (B if W is not split off), this task included, in
    chunks."""
    ready_forwards: int
    ready_backwards: int
    held_bytes: int = 0
    """Bytes of the stored activations, this task included; 0 if sizes are not known."""
    waiting_bytes: int = 0
    """Bytes of gradients that waited for earlier microbatches' gradients when the task began."""


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
    """The data plane that carried its tensors (`rrfp.runtime.planes.registry`)."""
    queued_ns: int = 0
    """How long it waited on this rank before it was sent: for the link, a slot or a device."""
    copy_ns: int = 0
    """How long the copy into its slot took; the rest of the duration is the wire's."""


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
    """How long it waited on this rank to be fetched."""
    copy_ns: int = 0
    """How long it took to copy it from its sender's slot, or to the device."""


class AgreementRecord(NamedTuple):
    """One agreed task: when the leader sent its decision, or a follower began to act on it. Waiting
    for a decision is a wait of cause `coordination`."""

    start_ns: int
    end_ns: int
    step: int
    kind: str
    stage: int
    microbatch: int
    position: int
    """Position in the group's agreed sequence of the step."""


class StimulusRecord(NamedTuple):
    """A stimulus that the dispatcher received; replaying a rank's stimuli in order repeats its
    decisions exactly. `name` is the stimulus' class. Without a task, stage and microbatch are -1
    and kind is empty. `member` is the group member that reported it (0: this rank)."""

    time_ns: int
    step: int
    name: str
    kind: str
    stage: int
    microbatch: int
    member: int
    expected_in_ns: int = 0
    """For an announcement: the time until its input is expected; negative if it is overdue."""
    patience_ns: int = 0
    """For an announcement: how long the rank waits for it at most."""


class Phase(StrEnum):
    """A part of a rank's time other than tasks and waits."""

    SCHEDULE = "schedule"
    """From the rank's entry into the schedule to its return."""
    DATA = "data"
    OPTIMIZER = "optimizer"
    LAUNCH = "launch"
    """The host launched a task on the device, which runs asynchronously."""
    PLAN = "plan"
    """The planner's process searched for the step's order of microbatches during the step
    before."""
    SCRIPT = "script"
    """In a recorded job: the script's own time between two calls of the schedule, including its
    optimizer."""


class PhaseRecord(NamedTuple):
    """Part of a step other than tasks and waits. One `SCHEDULE` phase closes each step."""

    start_ns: int
    end_ns: int
    step: int
    phase: str
    budget_bytes: int = 0
    """For a `SCHEDULE` phase: the bound on the rank's activation bytes in the step; 0 without a
    bound in bytes."""
    unknown_sizes: int = 0
    """For a `SCHEDULE` phase: the number of sizes that were not known yet and counted as the whole
    bound."""


class CostRecord(NamedTuple):
    """The cost of recording on this rank so far: the number of records, and the measured time of
    making and writing them."""

    time_ns: int
    step: int
    num_records: int
    cost_ns: int


class LossRecord(NamedTuple):
    """The number of a step's last records that did not fit into this rank's buffer. They include
    the phase that closes the step, so the step counts as unfinished on this rank."""

    time_ns: int
    step: int
    num_lost: int


class Doing(StrEnum):
    """An activity that a rank has begun. A wait is stated by its `Cause`, a phase as a `Phase`."""

    TASK = "task"
    SETTING_UP = "setting_up"
    """Before its first step."""
    EVALUATION = "evaluation"
    METRICS = "metrics"
    """Exchanging the metrics of a step, which every rank waits for."""
    CHECKPOINT = "checkpoint"
    CLOSING = "closing"
    BETWEEN = "between phases"
    """After a phase, before the next activity began."""


class BegunRecord(NamedTuple):
    """An activity that a rank has begun. During training only its flight record contains these. A
    trace contains the one that the rank never ended; it extends to the run's last known time."""

    start_ns: int
    end_ns: int
    step: int
    doing: str
    """`Doing`, a `Phase`, or the cause of a wait."""
    kind: str = ""
    """Kind of the task that runs, or whose output the rank waits for; empty (and -1) for
    neither."""
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    """The rank that this rank waits for."""


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
    """The number of times at the beginning of a record: 2 (start and end) or 1."""
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
    """The process that recorded: its place in the layout, and its clock."""

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
    """The error bound of the moved times: half the shortest round trip in the measurement of the
    offset, 0 on the reference host, and on a GPU the error of its clock against the host's."""


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
    """The activity that the rank never ended, if the run ended during one; at most one."""

    def by_name(self) -> dict[str, list[Any]]:
        """Each list (not a copy) by its type's name in `RECORD_TYPES`."""
        lists = (
            *(self.tasks, self.waits, self.sends, self.receives, self.agreements, self.stimuli),
            *(self.phases, self.costs, self.losses, self.begun),
        )
        return dict(zip(RECORD_TYPES, lists, strict=True))


@dataclass(slots=True)
class Recording:
    """A run: its settings (as in run.json) and the records of every rank, by rank."""

    settings: dict[str, object]
    ranks: list[RankRecords]


# The numbers, names and time windows of steps.
#
# In every record, training steps are numbered 0, 1, 2, ... Evaluations, which run forwards only,
# have negative numbers: -1 is evaluation 0, -2 is evaluation 1, ... So step numbers do not rise
# with time. Earlier versions numbered evaluations among the training steps.


Window = tuple[int, int]
"""Start and end, in nanoseconds of the trace."""

STEP, EVALUATION = "step", "evaluation"
"""The two sorts of steps."""


def evaluation_step(number: int) -> int:
    """The step number of a run's evaluation `number`, counted from 0: -1, -2, and so on."""
    return -1 - number


def is_evaluation(step: int) -> bool:
    """True for the step number of an evaluation, which is negative."""
    return step < 0


def split_step(step: int) -> tuple[str, int]:
    """Convert a record's step number into its sort and the number within it: `("evaluation",
    0)`."""
    return (EVALUATION, -1 - step) if step < 0 else (STEP, step)


def step_name(step: int) -> str:
    """Format a step number: `step 3`, `evaluation 0`."""
    sort, number = split_step(step)
    return f"{sort} {number}"


def step_names(steps: Iterable[int]) -> str:
    """Format step numbers: `steps 3, 4`, `evaluation 0`, or both joined by `and`."""
    numbers: dict[str, list[int]] = {STEP: [], EVALUATION: []}
    for sort, number in map(split_step, steps_in_order(steps)):
        numbers[sort].append(number)
    return " and ".join(numbered(sort, found) for sort, found in numbers.items() if found)


def format_step_counts(steps: Collection[int]) -> str:
    """Format the number of steps: `1 step`, `3 evaluations`, or both joined by `and`; `0 steps` for
    none."""
    num_evaluations = sum(map(is_evaluation, steps))
    counts = {STEP: len(steps) - num_evaluations, EVALUATION: num_evaluations}
    parts = [counted(number, sort) for sort, number in counts.items() if number]
    return " and ".join(parts) or counted(0, STEP)


def counted(number: int, sort: str) -> str:
    """Format a number with its noun, in the plural unless it is 1: `1 step`, `3 evaluations`."""
    return f"{number} {sort}{'' if number == 1 else 's'}"


def steps_in_order(steps: Iterable[int]) -> list[int]:
    """Sort step numbers: training steps first, then evaluations, each in their order."""
    return sorted(steps, key=lambda step: (is_evaluation(step), abs(step)))


def spread_evenly(steps: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` of a run's steps at even distances, or all if there are fewer. Each
    comes from the middle of its part of the run, because the first step warms up caches."""
    num = min(len(steps), most)
    return [steps[(2 * part + 1) * len(steps) // (2 * num)] for part in range(num)]


def step_windows(recording: Recording) -> dict[int, Window]:
    """The window of each step that every rank finished, by step."""
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
    """The window of each step that all `num_ranks` ranks finished, by step.

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
"""Kinds by value, in a dictionary because the enum's own lookup is too slow for replays."""


def stimulus_record(time_ns: int, step: int, stimulus: Stimulus) -> StimulusRecord:
    """The record of a stimulus that a dispatcher receives at this time. The expected time of an
    announced input is stored relative to `time_ns`."""
    stage, kind, microbatch, member, expected_in_ns, patience_ns = -1, "", -1, 0, 0, 0
    match stimulus:
        case InputArrived():
            (stage, kind, microbatch), member = stimulus
        case TaskAgreed():
            ((stage, kind, microbatch),) = stimulus
        case Announced():
            # Store a duration, because times are moved to another clock and durations are not.
            (stage, kind, microbatch), expected_ns, patience_ns = stimulus
            expected_in_ns = expected_ns - time_ns
    name = stimulus.__class__.__name__
    return StimulusRecord(
        *(time_ns, step, name, kind, stage, microbatch, member, expected_in_ns, patience_ns)
    )


def stimulus_of(record: StimulusRecord) -> Stimulus:
    """Convert a record back into its stimulus. Raises RrfpError for an unknown name or kind of
    task."""
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
    """The task that a record refers to. Raises RrfpError if its kind is unknown."""
    kind = _KINDS.get(record.kind)
    if kind is None:
        raise RrfpError(
            f"the trace has a task of kind '{record.kind}' in {step_name(record.step)}; it must be "
            f"one of {', '.join(Kind)}; see 'rrfp trace check'"
        )
    return Task(record.stage, kind, record.microbatch)


# The counters of a task record, for ranks that follow a fixed schedule without a dispatcher.


class FixedScheduleCounts:
    """Counts activations over the tasks of one rank's step, given in the order in which they
    run."""

    def __init__(self, releases: Kind) -> None:
        """`releases` is the kind of task that frees an activation: W if the backward is split,
        otherwise B."""
        self._releases = releases
        self.num_run = 0
        self.depth = 0
        """D: chunk-forwards minus chunk-backwards run."""
        self.held = 0
        self.peak_held = 0
        """The most activations held so far; one is of one chunk and one microbatch."""

    def ran(self, kind: Kind) -> tuple[int, int, int, int, int, int, int]:
        """Count a task that ran. Returns the fields of its `TaskRecord` from `hint_position` to
        `ready_backwards`, in which the task is the only ready one and skips none."""
        position = self.num_run
        self.num_run += 1
        self.depth += (kind is Kind.F) - (kind is Kind.B)
        self.held += (kind is Kind.F) - (kind is self._releases)
        self.peak_held = max(self.peak_held, self.held)
        # A fixed schedule considers one task and skips none.
        ready, skipped = 1, 0
        of_kind = int(kind is Kind.F), int(kind is Kind.B)
        return position, ready, skipped, self.depth, self.held, *of_kind

    def cause_of_transfer(self, num_tasks: int) -> Cause:
        """The cause of a wait for a transfer now, if the step has `num_tasks` tasks on this rank:
        `WARMUP` before the first task, `DRAIN` after the last, otherwise `TRANSFER`."""
        if self.num_run == 0:
            return Cause.WARMUP
        return Cause.DRAIN if self.num_run == num_tasks else Cause.TRANSFER


# Activation bytes of each microbatch, from the totals in a rank's task records.
#
# In a step, F adds a microbatch's activation bytes on a chunk. B reduces them to the bytes that W
# still needs, and W frees those. So the change of the total from one task to the next gives every
# size exactly. A dispatcher's sizes never grow from F to W; measured ones may, if W needs more
# memory than F stored.


class ActivationChange(NamedTuple):
    """The change of the activation bytes by one task."""

    task: TaskRecord
    change: int
    """In bytes; negative if the task frees memory."""
    remaining: int
    """The bytes that the microbatch still holds on this chunk; negative if the totals are wrong."""


def are_sizes_known(tasks: Iterable[TaskRecord]) -> bool:
    """True if any of these tasks has a recorded number of bytes."""
    return any(task.held_bytes for task in tasks)


def activation_changes(tasks: Iterable[TaskRecord]) -> Iterator[ActivationChange]:
    """The changes by one rank's tasks, given in the order in which they ran. A step starts at 0."""
    step: int | None = None
    held = 0
    remaining: defaultdict[tuple[int, int], int] = defaultdict(int)
    for task in tasks:
        if task.step != step:
            step, held = task.step, 0
            remaining.clear()
        change = task.held_bytes - held
        held = task.held_bytes
        key = task.stage, task.microbatch
        remaining[key] += change
        yield ActivationChange(task, change, remaining[key])


def bytes_for_w(tasks: Sequence[TaskRecord]) -> list[int]:
    """The bytes that are held only for pending weight gradients, after each of one rank's tasks:
    what a B leaves of its microbatch, until W frees it."""
    step: int | None = None
    total = 0
    found = []
    for task, change, remaining in activation_changes(tasks):
        if task.step != step:
            step, total = task.step, 0
        if task.kind == Kind.B:
            total += remaining
        elif task.kind == Kind.W:
            total += change
        found.append(total)
    return found


def tasks_with_wrong_bytes(tasks: Iterable[TaskRecord]) -> list[TaskRecord]:
    """The tasks of one rank whose recorded bytes are inconsistent: an F that frees bytes, a W that
    adds some, a B or W that frees more than the microbatch holds, and a microbatch's last task on a
    chunk if it leaves some. Each is listed once. `tasks` are of whole steps."""
    wrong = []
    left: dict[tuple[int, int, int], tuple[TaskRecord, int]] = {}
    for task, change, remaining in activation_changes(tasks):
        is_wrong_way = change < 0 if task.kind == Kind.F else task.kind == Kind.W and change > 0
        is_wrong = is_wrong_way or remaining < 0
        if is_wrong:
            wrong.append(task)
        left[task.step, task.stage, task.microbatch] = task, 0 if is_wrong else remaining
    return wrong + [task for task, remaining in left.values() if remaining > 0]
