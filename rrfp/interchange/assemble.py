"""A recording made of what another program's trace tells.

What it does not tell is derived, and nothing else is made up:

- A rank that idles before a task waits for its input until the task that gives it has ended;
  what is left of the idle time is `transfer` where the trace shows the rank send or receive then,
  and has no cause otherwise.
- A message leaves where the task that gives it ended. It has come where the last wait before the
  task that takes it ended, and at once where no wait tells. How large it was is not known.
- Where transfers do not block, what a dispatcher that is bound to the run's order would have taken
  in, so that the run can be replayed.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from rrfp.errors import RrfpError
from rrfp.interchange.clocks import Link, least_shifts
from rrfp.interchange.evaluations import tell_evaluations
from rrfp.interchange.spans import RankSpans, Source, TaskSpan, TransferSpan
from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import ComputeIdle, InputArrived
from rrfp.schedule.orders import ORDERS
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.perfetto_format import MOST_OF_A_KIND, bounds_of
from rrfp.trace.records import (
    NS_PER_S,
    Phase,
    PhaseRecord,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
)
from rrfp.trace.stimuli import record_of, task_of

AS_RECORDED = "as recorded"
"""The name of an order that is none of ours."""

_US = 1_000
_TOLD_SHIFT_NS = _US
"""What is less is of the rounding of times."""
_MOST_NS = bounds_of("end_ns")[1]
_DAY_NS = 86_400 * NS_PER_S
_NUM_LISTED = 8


@dataclass(frozen=True, slots=True)
class Imported:
    """A recording, and what its reader should know of how it came about, a sentence each."""

    recording: Recording
    notes: tuple[str, ...]


def assemble(ranks: list[RankSpans], source: Source) -> Imported:
    """Make the recording of spans, of each rank once. Raises RrfpError where there is none."""
    ranks = sorted(ranks, key=lambda rank: rank.info.rank)
    if not any(rank.tasks for rank in ranks):
        raise RrfpError(f"the {source.name} has no task; import one that was taken in a step")
    _check_places(ranks, source)
    tell_evaluations(ranks)
    notes = [*source.notes, *_missing(ranks, source)]
    run = _Run(ranks)
    notes += run.put_clocks_right()
    run.begin_with_the_input()
    records = run.records()
    if not source.transfers_block and _is_steady(records):
        for rank in records:
            rank.stimuli = list(_stimuli(rank))
    return Imported(Recording(_settings(run, records, source), records), tuple(notes))


class _Key(NamedTuple):
    """A task of the run."""

    replica: tuple[int, int]
    step: int
    kind: Kind
    stage: int
    microbatch: int


class _Run:
    """The spans of all ranks, and which task gives which its input."""

    def __init__(self, ranks: list[RankSpans]) -> None:
        self.ranks = ranks
        self.num_stages = 1 + max(task.stage for rank in ranks for task in rank.tasks)
        self._found: dict[_Key, tuple[RankSpans, TaskSpan]] = {}
        self._find()

    def _find(self) -> None:
        for rank in self.ranks:
            rank.tasks.sort()
            for task in rank.tasks:
                self._found[_key(rank, task)] = rank, task

    def giver(self, rank: RankSpans, task: TaskSpan) -> tuple[RankSpans, TaskSpan] | None:
        """The task of another rank whose output this one takes, and that rank."""
        stage = task.stage + {Kind.F: -1, Kind.B: 1, Kind.W: 0}[task.kind]
        if stage == task.stage or not 0 <= stage < self.num_stages:
            return None
        found = self._found.get(_key(rank, task._replace(stage=stage)))
        return found if found is not None and found[0] is not rank else None

    def put_clocks_right(self) -> Iterator[str]:
        """Shift the clocks of ranks that seem to run tasks before their input."""
        slacks_ns: dict[Link, int] = {}
        for rank in self.ranks:
            for task in rank.tasks:
                if (found := self.giver(rank, task)) is None:
                    continue
                link = found[0].info.rank, rank.info.rank
                there_ns = task.end_ns if rank.receives_inside else task.start_ns
                giver, given = found
                left_ns = given.start_ns if giver.sends_inside else given.end_ns
                slack_ns = there_ns - left_ns
                slacks_ns[link] = min(slack_ns, slacks_ns.get(link, slack_ns))
        if all(slack_ns >= 0 for slack_ns in slacks_ns.values()):
            return
        shifts_ns = least_shifts(slacks_ns, [rank.info.rank for rank in self.ranks])
        if shifts_ns is None:
            worst_ns = -min(slacks_ns.values())
            yield (
                f"some tasks begin up to {worst_ns / _US:.4g} us before their input is there, "
                "which no shift of clocks explains; their messages count as taking no time"
            )
            return
        told = [
            f"rank {rank} by {shift_ns / _US:.4g} us"
            for rank, shift_ns in shifts_ns.items()
            if shift_ns > _TOLD_SHIFT_NS
        ]
        if told:
            yield (
                "clocks were put forward so that no task begins before its input is there: "
                f"{_listed(told)}"
            )
        for rank in self.ranks:
            shift_ns = shifts_ns[rank.info.rank]
            rank.info = replace(rank.info, clock_offset_ns=shift_ns)
            _shift(rank, shift_ns)
        self._find()

    def begin_with_the_input(self) -> None:
        """Where a span holds the wait for its input, let the task begin once that was given."""
        for rank in self.ranks:
            if rank.receives_inside:
                rank.tasks = [self._trimmed(rank, task) for task in rank.tasks]
        self._find()

    def _trimmed(self, rank: RankSpans, task: TaskSpan) -> TaskSpan:
        found = self.giver(rank, task)
        if found is None:
            return task
        return task._replace(start_ns=min(max(task.start_ns, found[1].end_ns), task.end_ns))

    def records(self) -> list[RankRecords]:
        """Everything recorded and derived, counted from the run's first moment."""
        spans = [
            span
            for rank in self.ranks
            for spans in (rank.tasks, rank.waits, rank.phases)
            for span in spans
        ]
        origin_ns = min(span.start_ns for span in spans)
        if max(span.end_ns for span in spans) - origin_ns > _MOST_NS:
            raise RrfpError(
                f"the run seems to last more than {_MOST_NS / _DAY_NS:.0f} days; its files have "
                "times of different kinds, import those of one run"
            )
        for rank in self.ranks:
            _shift(rank, -origin_ns)
        self._find()
        records = {id(rank): self._of_rank(rank) for rank in self.ranks}
        sequences: defaultdict[Link, int] = defaultdict(int)
        for message in sorted(self._messages()):
            link = message.giver.info.rank, message.taker.info.rank
            sequence = sequences[link]
            sequences[link] += 1
            task = message.task
            of = task.step, task.kind, task.stage, task.microbatch
            records[id(message.giver)].sends.append(
                SendRecord(message.left_ns, message.left_ns, *of, link[1], sequence, 0)
            )
            records[id(message.taker)].receives.append(
                ReceiveRecord(message.began_ns, message.came_ns, *of, link[0], sequence, 0)
            )
        return list(records.values())

    def _of_rank(self, rank: RankSpans) -> RankRecords:
        tasks = _task_records(rank.info, rank.tasks)
        if not rank.tells_waits:
            rank.waits = sorted([*rank.waits, *self._derived_waits(rank)])
        return RankRecords(rank.info, tasks, rank.waits, phases=sorted(rank.phases))

    def _derived_waits(self, rank: RankSpans) -> Iterator[WaitRecord]:
        transfers = sorted(rank.transfers)
        ends_ns = list(_running_max(span.end_ns for span in transfers))
        for start_ns, task in self._gaps(rank):
            found = self.giver(rank, task)
            given_ns = start_ns
            if found is not None and found[1].end_ns > start_ns:
                given_ns = min(found[1].end_ns, task.start_ns)
                cause = Cause.FORWARD_INPUT if task.kind is Kind.F else Cause.BACKWARD_INPUT
                yield WaitRecord(start_ns, given_ns, task.step, cause)
            for begin_ns, end_ns in _parts(transfers, ends_ns, given_ns, task.start_ns):
                yield WaitRecord(begin_ns, end_ns, task.step, Cause.TRANSFER)

    def _gaps(self, rank: RankSpans) -> Iterator[tuple[int, TaskSpan]]:
        """Where the rank was free before each task that did not begin at once, and that task."""
        entries_ns = {
            phase.step: phase.start_ns for phase in rank.phases if phase.phase == Phase.SCHEDULE
        }
        free_ns: dict[int, int] = {}
        for task in rank.tasks:
            start_ns = free_ns.get(task.step, entries_ns.get(task.step, task.start_ns))
            if start_ns < task.start_ns:
                yield start_ns, task
            free_ns[task.step] = max(start_ns, task.end_ns)

    def _messages(self) -> Iterator["_Message"]:
        for rank in self.ranks:
            waits = sorted(rank.waits, key=lambda wait: wait.end_ns)
            ends_ns = [wait.end_ns for wait in waits]
            gaps = {task: start_ns for start_ns, task in self._gaps(rank)}
            for task in rank.tasks:
                if (found := self.giver(rank, task)) is None:
                    continue
                giver, given = found
                left_ns = min(given.end_ns, task.start_ns)
                began_ns = came_ns = left_ns
                last = bisect_left(ends_ns, task.start_ns + 1) - 1
                # A wait that ended before the rank was free for the task tells nothing of it.
                if last >= 0 and ends_ns[last] > gaps.get(task, task.start_ns):
                    came_ns = max(left_ns, ends_ns[last])
                    began_ns = min(came_ns, max(left_ns, waits[last].start_ns))
                yield _Message(left_ns, began_ns, came_ns, task, giver, rank)


@dataclass(frozen=True, slots=True)
class _Message:
    left_ns: int
    began_ns: int
    """When both of its ranks were there for it."""
    came_ns: int
    task: TaskSpan
    """Which takes it."""
    giver: RankSpans
    taker: RankSpans

    def __lt__(self, other: "_Message") -> bool:
        return (self.left_ns, self.task) < (other.left_ns, other.task)


def _key(rank: RankSpans, task: TaskSpan) -> _Key:
    replica = rank.info.dp_rank, rank.info.tp_rank
    return _Key(replica, task.step, task.kind, task.stage, task.microbatch)


def _shift(rank: RankSpans, by_ns: int) -> None:
    rank.tasks = [_moved(span, by_ns) for span in rank.tasks]
    rank.waits = [_moved(span, by_ns) for span in rank.waits]
    rank.transfers = [_moved(span, by_ns) for span in rank.transfers]
    rank.phases = [_moved(span, by_ns) for span in rank.phases]


_Span = TypeVar("_Span", TaskSpan, WaitRecord, TransferSpan, PhaseRecord)


def _moved(span: _Span, by_ns: int) -> _Span:
    return span._replace(start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


def _running_max(values: Iterable[int]) -> Iterator[int]:
    most = 0
    for value in values:
        most = max(most, value)
        yield most


def _parts(
    spans: list[TransferSpan], ends_ns: list[int], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int]]:
    """The parts of an interval that spans cover; `ends_ns` are the latest ends up to each."""
    position_ns = start_ns
    index = bisect_left(ends_ns, start_ns + 1)
    while index < len(spans) and spans[index].start_ns < end_ns:
        begin_ns = max(position_ns, spans[index].start_ns)
        stop_ns = min(spans[index].end_ns, end_ns)
        if begin_ns < stop_ns:
            yield begin_ns, stop_ns
            position_ns = stop_ns
        index += 1


def _task_records(info: RankInfo, tasks: list[TaskSpan]) -> list[TaskRecord]:
    """A fixed schedule looks at one task and skips none; D and the rest follow by counting."""
    splits = any(task.kind is Kind.W for task in tasks)
    release = Kind.W if splits else Kind.B
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    records = []
    for task in tasks:
        if task.stage not in info.stages:
            raise RrfpError(
                f"rank {info.rank} ran a task of stage {task.stage} and says that it holds "
                f"{', '.join(map(str, info.stages))}; import one run at a time"
            )
        count = counts[task.step]
        place, depth, held = count
        depth += {Kind.F: 1, Kind.B: -1, Kind.W: 0}[task.kind]
        held += (task.kind is Kind.F) - (task.kind is release)
        counts[task.step] = [place + 1, depth, held]
        chunk = info.stages.index(task.stage)
        of_kind = int(task.kind is Kind.F), int(task.kind is Kind.B)
        records.append(
            TaskRecord(
                *(*task[:4], task.stage, chunk, task.microbatch),
                *(place, 1, 0, depth, held, *of_kind),
            )
        )
    return records


def _is_steady(ranks: list[RankRecords]) -> bool:
    """Whether every rank ran all its training steps in the same order."""
    return all(len(set(_rows(rank))) <= 1 for rank in ranks)


def _rows(rank: RankRecords) -> list[tuple[Task, ...]]:
    """What a rank ran, of each step that trained: evaluation has no backwards."""
    rows: defaultdict[int, list[Task]] = defaultdict(list)
    for task in rank.tasks:
        rows[task.step].append(task_of(task))
    return [tuple(row) for row in rows.values() if any(task.kind is Kind.B for task in row)]


def _stimuli(rank: RankRecords) -> Iterator[StimulusRecord]:
    """What a dispatcher that is bound to the rank's order would have taken in, to run each task
    once it could: so that the run can be replayed over links that do not block."""
    arrivals: defaultdict[int, deque[tuple[int, Task]]] = defaultdict(deque)
    for receive in sorted(rank.receives, key=lambda receive: receive.end_ns):
        arrivals[receive.step].append((receive.end_ns, task_of(receive)))
    needed = {(step, task) for step, found in arrivals.items() for _, task in found}
    free_ns = {phase.step: phase.start_ns for phase in rank.phases if phase.phase == Phase.SCHEDULE}
    for record in rank.tasks:
        step, task = record.step, task_of(record)
        now_ns = free_ns.get(step, record.start_ns)
        coming = arrivals[step]
        while coming and (coming[0][0] <= now_ns or (step, task) in needed):
            came_ns, arrived = coming.popleft()
            if came_ns > now_ns:
                yield record_of(now_ns, step, ComputeIdle())
                now_ns = came_ns
            needed.discard((step, arrived))
            yield record_of(came_ns, step, InputArrived(arrived))
        yield record_of(now_ns, step, ComputeIdle())
        free_ns[step] = record.end_ns


def _check_places(ranks: list[RankSpans], source: Source) -> None:
    """Whether every rank has a place of its own in a run that can be."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in ranks:
        info = rank.info
        place = info.pp_rank, info.tp_rank, info.dp_rank
        most = max(
            *(info.rank, *place, *info.stages),
            *(max(task.stage, task.microbatch) for task in rank.tasks),
        )
        if most >= MOST_OF_A_KIND:
            raise RrfpError(
                f"the {source.name} has the number {most} for a rank, a stage or a microbatch; "
                f"no run has as many as {MOST_OF_A_KIND}, so it is damaged"
            )
        if source.world_size is not None and info.rank >= source.world_size:
            raise RrfpError(
                f"the {source.name} is of rank {info.rank}, of a run of {source.world_size} ranks; "
                "import the files of one run"
            )
        if place in found:
            raise RrfpError(
                f"ranks {found[place]} and {info.rank} both say that they are pp {place[0]}, tp "
                f"{place[1]}, dp {place[2]}; import one run at a time"
            )
        found[place] = info.rank


def _missing(ranks: list[RankSpans], source: Source) -> Iterator[str]:
    present = {rank.info.rank for rank in ranks}
    missing = [rank for rank in range(source.world_size or 0) if rank not in present]
    if missing:
        yield (
            f"{len(missing)} of {source.world_size} ranks are missing ({_listed(missing)}): what "
            "is said of waits for them, and of the run as a whole, is said without them"
        )


def _listed(found: Sequence[object]) -> str:
    """The first of them."""
    return ", ".join(map(str, found[:_NUM_LISTED])) + (", ..." if found[_NUM_LISTED:] else "")


def _settings(run: _Run, ranks: list[RankRecords], source: Source) -> dict[str, object]:
    """What `run.json` holds of an imported run."""
    shape = _shape(run)
    return {
        "settings": {
            # What no dispatcher steered is replayed as an order that binds; without stimuli with
            # transfers that block, as those of Megatron's own schedules.
            "dispatch": "fixed" if any(rank.stimuli for rank in ranks) else "megatron",
            "hint": AS_RECORDED if shape is None else _order_name(shape, ranks),
            "device": source.device,
            "pp": 1 + max(rank.info.pp_rank for rank in ranks),
            "chunks": len(ranks[0].info.stages),
        },
        "imported": {
            "source": source.name,
            "files": source.num_files,
            "tells_waits": all(rank.tells_waits for rank in run.ranks),
        },
        **({} if source.world_size is None else {"world": source.world_size}),
        "ranks": [
            {
                "stages": list(rank.info.stages),
                **{
                    name: getattr(rank.info, name)
                    for name in ("rank", "pp_rank", "tp_rank", "dp_rank", "host", "pid")
                },
            }
            for rank in ranks
        ],
    }


def _shape(run: _Run) -> Shape | None:
    """The shape of the run's pipeline; None where its stages lie neither in a loop nor in a V."""
    stages = {rank.info.pp_rank: rank.info.stages for rank in run.ranks}
    tasks = [task for rank in run.ranks for task in rank.tasks]
    splits = any(task.kind is Kind.W for task in tasks)
    num_ranks, num_chunks = 1 + max(stages), len(next(iter(stages.values())))
    for placement in Placement:
        if placement is Placement.V and num_chunks != 2:
            continue
        shape = Shape(
            num_ranks,
            # Evaluation has no backwards, and may have more microbatches.
            1 + max((task.microbatch for task in tasks if task.kind is Kind.B), default=0),
            num_chunks,
            placement,
            SPLIT_BACKWARD if splits else WHOLE_BACKWARD,
        )
        if all(stages.get(rank) == shape.stages_of(rank) for rank in range(num_ranks)):
            return shape
    return None


def _order_name(shape: Shape, ranks: list[RankRecords]) -> str:
    """The name of the order that every rank ran all its steps in, if it is one of ours."""
    rows = [(rank.info.pp_rank, row) for rank in ranks for row in _rows(rank)]
    if not rows or any(len(row) != shape.num_tasks_of_a_rank for _, row in rows):
        return AS_RECORDED
    for name, order in ORDERS.items():
        if order.fits(shape):
            wanted = order(shape).rows
            if all(row == wanted[pp_rank] for pp_rank, row in rows):
                return name
    return AS_RECORDED
