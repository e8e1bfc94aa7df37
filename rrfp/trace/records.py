"""What is recorded: a few record types, one tuple each, and the recording that holds them.

All times are integer nanoseconds. A rank records on its own host's monotonic clock. In a
`Recording` every time has been moved to the reference clock (that of rank 0's host) by the rank's
`clock_offset_ns`, and counts from the start of the run. `step` numbers training steps and
evaluations separately (`rrfp.trace.steps`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

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
    """What carried its tensors (`rrfp.runtime.planes.names`)."""
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
