"""Names, tracks and arrows of traces, shared by their writer and reader."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp.schedule.tasks import Kind
from rrfp.trace.records import (
    RECORD_TYPES,
    STEP,
    Phase,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    SendRecord,
    TaskRecord,
    are_sizes_known,
    bytes_for_w,
)

VERSION = 3
"""The format version that is written. The reader refuses later versions and reads all earlier ones:
version 1 numbers evaluations among the training steps, and versions 1 and 2 lack the activities
that a rank never ended."""
RUN = "run"
"""The name and category of the instant that holds the run's settings."""
RANK = "rank"
"""The category of the instant that holds a rank's place in the layout."""
HINT = "hint"
"""The category of slices that show the task in the hint's order. They are derived, not records."""
END_MARK = "end of trace"
"""The name of the last event, which holds the number of records written."""

FIELDS = {
    name: tuple(
        (field, record_type.__annotations__[field] is str)
        for field in record_type._fields
        if field not in ("start_ns", "end_ns", "time_ns")
    )
    for name, record_type in RECORD_TYPES.items()
}
"""The annotations of each record type: the name, and true if the value is text. An evaluation has
`evaluation`, its number, instead of `step`."""

MOST_OF_A_KIND = 1 << 20
"""No run has more ranks, stages or microbatches. Readers allocate lists of these sizes, so a
damaged trace must not claim more."""
_PLACES = ("stage", "chunk", "microbatch", "peer", "member")
_MOST_NS = 1 << 53
"""The greatest time: 104 days. Sums of such times fit into 64 bits."""
_MOST_STEPS = 1 << 53


def bounds_of(field: str) -> tuple[int, int]:
    """The least and greatest value of a record's field; other values mean damage. -1 stands for
    none."""
    if field in ("start_ns", "end_ns", "time_ns"):
        return 0, _MOST_NS
    if field == STEP:
        return -_MOST_STEPS, _MOST_STEPS
    if field == "expected_in_ns":
        return -_MOST_NS, _MOST_NS
    return -1, MOST_OF_A_KIND if field in _PLACES else 1 << 53


# Keys that match the send, the receive and the task of a message.


class MessageKey(NamedTuple):
    """A message of the run: number `sequence` on the directed link source -> destination."""

    source: int
    destination: int
    sequence: int

    @property
    def flow_id(self) -> int:
        """The id of the message's arrow, unique in the run for up to 65,536 ranks and 4 G messages
        per link."""
        ranks = (self.source & 0xFFFF) << 16 | self.destination & 0xFFFF
        return ranks << 32 | self.sequence & 0xFFFFFFFF


class TaskKey(NamedTuple):
    """A task on one rank, which identifies the consumer of a received message."""

    step: int
    kind: str
    stage: int
    microbatch: int


def sent_by(rank: int, send: SendRecord) -> MessageKey:
    """The message that a rank recorded as sent."""
    return MessageKey(rank, send.peer, send.sequence)


def received_by(rank: int, receive: ReceiveRecord) -> MessageKey:
    """The message that a rank recorded as received."""
    return MessageKey(receive.peer, rank, receive.sequence)


def key_of(record: TaskRecord | SendRecord | ReceiveRecord) -> TaskKey:
    """The key of a recorded task, or of the task that consumes a recorded message."""
    return TaskKey(record.step, record.kind, record.stage, record.microbatch)


def task_name(record: Any) -> str:
    """Format a record's task: `F3` for the forward of microbatch 3."""
    return f"{record.kind}{record.microbatch}"


def task_title(task: TaskRecord, has_chunks: bool) -> str:
    """Format a task: `F3`, or `F3.1` with its chunk if any rank of the run has several."""
    return f"{task_name(task)}.{task.chunk}" if has_chunks else task_name(task)


# Comparison of the order in which a rank ran its tasks with its hint's order.


MAX_SKIPPED_NAMED = 8
"""The number of skipped tasks of a dispatch to name; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class HintedDispatch:
    """One dispatch, number k of its step on the rank, compared with the hint."""

    wanted: TaskRecord
    """Task number k of the step in the hint's order."""
    wanted_place: int
    """The position at which that task was dispatched, counted from 0; k if the hint was
    followed."""
    skipped: tuple[TaskRecord, ...]
    """The unfinished tasks that the hint ranks above the dispatched one, highest rank first; at
    most `MAX_SKIPPED_NAMED` + 1 of them."""


def compare_with_hint(tasks: Sequence[TaskRecord]) -> list[HintedDispatch | None]:
    """Compare the dispatch of each task with the hint; None for each task of a step in which the
    hint's order is unknown.

    `tasks` are one rank's, in the order of their dispatch. In an unfinished step, only the tasks
    that ran are compared.
    """
    dispatches: list[HintedDispatch | None] = [None] * len(tasks)
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        steps[task.step].append(index)
    for indices in steps.values():
        if all(tasks[index].hint_position >= 0 for index in indices):
            _compare_step(tasks, indices, dispatches)
    return dispatches


def _compare_step(
    tasks: Sequence[TaskRecord], indices: Sequence[int], dispatches: list[HintedDispatch | None]
) -> None:
    """Set the entries of `dispatches` for one step, whose tasks are those at `indices` in the order
    of their dispatch. Tasks with equal hint positions count as hinted in that order."""
    # Sort by hint position. Dispatch order breaks ties, which only damaged traces have.
    ranks = [(tasks[index].hint_position, place) for place, index in enumerate(indices)]
    hinted = sorted(ranks)
    unfinished = hinted.copy()
    for place, index in enumerate(indices):
        num_above = bisect_left(unfinished, ranks[place])
        named = unfinished[: min(num_above, MAX_SKIPPED_NAMED + 1)]
        del unfinished[num_above]
        _, wanted_place = hinted[place]
        dispatches[index] = HintedDispatch(
            tasks[indices[wanted_place]],
            wanted_place,
            tuple(tasks[indices[above]] for _, above in named),
        )


# The tree of tracks in a trace: pipeline > stage > compute, hint, wait, send, receive, ...
#
# Every track has an explicit place among its siblings. Slices of one Perfetto track must nest, so
# each link has its own track below `send` and `receive`. Slices that still overlap go to another
# row: a sibling track of the same name, which the viewer shows as a further row of the track.


Node = tuple[int, str]
"""An element of a path in the tree: a place among siblings, and a name."""

COUNTERS = (7, "counters")
_DETAILS = (9, "details")

PATH_OF_CATEGORY: dict[str, tuple[Node, ...]] = {
    "task": ((0, "compute"),),
    HINT: ((1, "hint"),),
    "wait": ((2, "wait"),),
    "begun": ((3, "never ended"),),
    "agreement": ((4, "agreement"),),
    "send": ((5, "send"),),
    "receive": ((6, "receive"),),
    "phase": ((8, "phases"),),
    "stimulus": (_DETAILS, (0, "stimuli")),
    "cost": (_DETAILS, (1, "recording")),
    "loss": (_DETAILS, (1, "recording")),
    RANK: (_DETAILS, (2, "rank")),
}
"""The path of each category's track below its stage. Events that only a replay or an audit needs
are in a group that the viewer shows collapsed."""


def stage_name(info: RankInfo) -> str:
    """Name a rank by its stages: `stage 0`, or `stages 0 7` with several chunks."""
    label = "stage" if len(info.stages) == 1 else "stages"
    return " ".join((label, *map(str, info.stages)))


def stage_path(info: RankInfo, ranks: Sequence[RankInfo]) -> tuple[Node, ...]:
    """The path of a rank's stage: pipelines ordered by data-parallel and then tensor-parallel rank,
    stages by pipeline rank. With several pipelines their names contain these ranks."""
    pipelines = sorted({(other.dp_rank, other.tp_rank) for other in ranks})
    name = "pipeline"
    if len(pipelines) > 1:
        name = f"pipeline dp{info.dp_rank} tp{info.tp_rank}"
    place = pipelines.index((info.dp_rank, info.tp_rank))
    return (place, name), (info.pp_rank, stage_name(info))


class RowAssigner:
    """Assigns the slices of a track to rows so that no two slices of one row overlap."""

    def __init__(self) -> None:
        self._ends_ns: list[int] = []

    def assign(self, intervals: Sequence[tuple[int, int]]) -> list[int]:
        """The row of each (start, end): the first row whose last interval, of this or an earlier
        call, has ended by the start, or else a new row. Within a call, intervals are placed by
        their start."""
        rows = [0] * len(intervals)
        ends_ns = self._ends_ns
        ordered = sorted((*interval, index) for index, interval in enumerate(intervals))
        for start_ns, end_ns, index in ordered:
            for row, row_end_ns in enumerate(ends_ns):
                if row_end_ns <= start_ns:
                    ends_ns[row] = end_ns
                    break
            else:
                row = len(ends_ns)
                ends_ns.append(end_ns)
            rows[index] = row
        return rows


def assign_rows(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """The row of each (start, end), such that no two of one row overlap; uses as few as
    possible."""
    return RowAssigner().assign(intervals)


# The counter tracks of a rank: the counts in its task records, and if sizes are known, bytes of
# memory: held, held only for W, waiting gradients, messages in the outbox, and the budget.


_COUNTED_FIELDS = {
    "D": "depth",
    "held": "held",
    "ready forwards": "ready_forwards",
    "ready backwards": "ready_backwards",
}
_BYTES, _BYTES_FOR_W, _WAITING = "bytes held", "bytes held for W", "bytes of waiting gradients"
_OUTBOX, _BUDGET = "bytes in outbox", "budget of bytes"

COUNTERS_IN_ORDER = (*_COUNTED_FIELDS, _BYTES, _BYTES_FOR_W, _WAITING, _OUTBOX, _BUDGET)

Points = list[tuple[int, int]]
"""The points of a counter: times in ns, and the value from each time on."""

_Task = tuple[int, str, int, int]


def counters_of(records: RankRecords) -> dict[str, Points]:
    """The points of each counter, by name, from all of a rank's records."""
    return Counters().add(records, is_last=True)


class Counters:
    """Computes the counters of a rank from its records, one part at a time. A counter begins with
    the first part that has values for it."""

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._outbox = _Outbox()

    def add(self, records: RankRecords, *, is_last: bool) -> dict[str, Points]:
        """The points that the next part adds, by counter; bytes only once sizes are known. A step's
        tasks must be in one part."""
        tasks = records.tasks
        starts_ns = [task.start_ns for task in tasks]

        def by_task(values: Iterable[int]) -> Points:
            return list(zip(starts_ns, values, strict=True))

        found = {
            name: by_task(getattr(task, field) for task in tasks)
            for name, field in _COUNTED_FIELDS.items()
        }
        if not self._has_begun(_BYTES, are_sizes_known(tasks)):
            return found
        found[_BYTES] = by_task(task.held_bytes for task in tasks)
        for_w = bytes_for_w(tasks)
        if self._has_begun(_BYTES_FOR_W, any(for_w)):
            found[_BYTES_FOR_W] = by_task(for_w)
        if self._has_begun(_WAITING, any(task.waiting_bytes for task in tasks)):
            found[_WAITING] = by_task(task.waiting_bytes for task in tasks)
        if self._has_begun(_OUTBOX, bool(records.sends)):
            found[_OUTBOX] = self._outbox.add(tasks, records.sends, is_last=is_last)
        budgets = {p.step: p.budget_bytes for p in records.phases if p.phase == Phase.SCHEDULE}
        if self._has_begun(_BUDGET, any(budgets.values())):
            found[_BUDGET] = by_task(budgets.get(task.step, 0) for task in tasks)
        return found

    def _has_begun(self, name: str, begins: bool) -> bool:
        """Note that a counter begins, if `begins`. Returns True if it begins now or began in an
        earlier part."""
        if begins:
            self._begun.add(name)
        return name in self._begun


class _Outbox:
    """Counts the bytes of messages between the end of their task and the sending of the last
    byte."""

    def __init__(self) -> None:
        self._ends_ns: dict[_Task, int] = {}
        self._changes: defaultdict[int, int] = defaultdict(int)
        """Changes in bytes by time, which messages of the next part may still precede."""
        self._total = 0

    def add(
        self, tasks: Iterable[TaskRecord], sends: Iterable[SendRecord], *, is_last: bool
    ) -> Points:
        """The points that the next part adds, in order of time. Unless `is_last`, changes that a
        later message may precede wait for the next part. A message of unknown task counts from its
        send's start."""
        ends_ns = {(t.step, t.kind, t.stage, t.microbatch): t.end_ns for t in tasks}
        # A message of a part's last step may be recorded in the next part.
        known_ns = self._ends_ns | ends_ns
        self._ends_ns = ends_ns
        changes = self._changes
        for send in sends:
            made_on = send.stage + (-1 if send.kind == Kind.F else 1)
            made_ns = known_ns.get((send.step, send.kind, made_on, send.microbatch), send.start_ns)
            changes[min(made_ns, send.end_ns)] += send.num_bytes
            changes[send.end_ns] -= send.num_bytes
        final_ns = min(ends_ns.values(), default=0)
        points: Points = []
        for time_ns in sorted(changes):
            if time_ns >= final_ns and not is_last:
                break
            self._total += changes.pop(time_ns)
            points.append((time_ns, self._total))
        return points
