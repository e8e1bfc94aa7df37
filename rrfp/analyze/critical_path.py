"""The critical path of a step: the chain of tasks, messages and waits that determined its length.

The path is traced from the end of the step back to its start. A task began when its last dependency
was ready. If its message arrived after its rank was free, the path continues with the task that
sent the message, otherwise with the previous task on the rank.

Every nanosecond of the step has an owner: the running task, the link (attributed to its receiver)
while a message was in flight, or the cause of a wait; of overlapping waits, the earlier one. The
time after the last task belongs to the rank that synchronizes gradients longest. The members of a
group count as one rank: the last member's message counts for all.

With blocking transfers, a simulated run records which ranks met (`BlockingBacktrace`). Megatron's
own schedule waits for several transfers in one call, and its records do not name them. There the
path continues with the task that ended last, the sender's or the previous one on the rank, and the
time in between belongs to the rank's wait for the transfer.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from rrfp.analyze.bubbles import CAUSE_HEADINGS, OVERHEAD
from rrfp.analyze.colors import CAUSE_COLORS, KIND_COLORS, LINK_COLOR
from rrfp.analyze.frames import Frames, label_of, numbers_of
from rrfp.analyze.misalignment import (
    BlockingReplica,
    blocking_replicas,
    is_imported,
    is_simulated,
    transfers_block,
)
from rrfp.analyze.table import (
    TENTHS,
    TEXT,
    Column,
    Table,
    Times,
    apportioned,
    format_time,
    outliers,
)
from rrfp.errors import RrfpError, UsageError
from rrfp.replay.blocking import BlockingRank, BlockingTransfer
from rrfp.schedule.shape import sending_stage
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import NS_PER_S, Phase, Window, split_step, step_name, steps_in_order

LINK = "link"


class Segment(NamedTuple):
    """A part of the path that is attributed to one pipeline rank."""

    start_ns: int
    end_ns: int
    pp_rank: int
    kind: str
    """F, B, W, `link`, or the cause of a wait."""
    sender: int | None = None
    """For a `link`, the pipeline rank that sent the message to `pp_rank`."""


class Wait(NamedTuple):
    """A wait of a rank."""

    start_ns: int
    end_ns: int
    cause: str


def disjoint(waits: Iterable[Wait]) -> list[Wait]:
    """Sort waits by time and clip each to the time after the earlier ones; drop those without time
    left."""
    found: list[Wait] = []
    for wait in sorted(waits):
        begin_ns = max(wait.start_ns, found[-1].end_ns) if found else wait.start_ns
        if begin_ns < wait.end_ns:
            found.append(wait._replace(start_ns=begin_ns))
    return found


def idle(
    pp_rank: int, waits: list[Wait], start_ns: int, end_ns: int, rest: str
) -> Iterator[Segment]:
    """Yield a rank's waits within an idle time from its end back, with `rest` as cause of the gaps.

    The waits must be disjoint and in order; segments may be empty.
    """
    cursor_ns = end_ns
    index = bisect_left(waits, end_ns, key=lambda wait: wait.start_ns)
    while index and waits[index - 1].end_ns > start_ns:
        index -= 1
        wait = waits[index]
        begin_ns, stop_ns = max(wait.start_ns, start_ns), min(wait.end_ns, cursor_ns)
        yield Segment(stop_ns, cursor_ns, pp_rank, rest)
        yield Segment(begin_ns, stop_ns, pp_rank, wait.cause)
        cursor_ns = begin_ns
    yield Segment(start_ns, cursor_ns, pp_rank, rest)


Place = tuple[int, int]
"""A pipeline rank and its replica. If it has several members, they count as one rank."""


class ChainTask(NamedTuple):
    """A task, from the last member's start to the last member's end."""

    start_ns: int
    end_ns: int
    place: Place
    rank: int
    """The member that ended last."""
    kind: str
    stage: int
    microbatch: int

    @property
    def key(self) -> tuple[Place, str, int, int]:
        """Identity of the task: place, kind, stage and microbatch."""
        return self.place, self.kind, self.stage, self.microbatch


@dataclass(slots=True)
class RankInChain:
    """The entry and the waits of one rank in the step."""

    place: Place
    entry_ns: int
    waits: list[Wait]
    """The waits in order of time, without overlaps."""

    @property
    def pp_rank(self) -> int:
        return self.place[0]


class Backtrace:
    """Traces the critical path of one step back from its end."""

    def __init__(self, frames: Frames, step: int, window: tuple[int, int]) -> None:
        self._step = step
        self._window = window
        self._is_imported = is_imported(frames)
        self._ranks: dict[int, RankInChain] = {}
        schedules = frames.phases.filter(pl.col("phase") == Phase.SCHEDULE)
        for row in schedules.select("rank", "pp_rank", "dp_rank", "start_ns").iter_rows():
            rank, pp_rank, dp_rank, entry_ns = row
            self._ranks[rank] = RankInChain((pp_rank, dp_rank), entry_ns, [])
        for rank, *wait in frames.waits.select("rank", "start_ns", "end_ns", "cause").iter_rows():
            self._ranks[rank].waits.append(Wait(*wait))
        self._syncs = [
            (rank, wait)
            for rank, of_rank in self._ranks.items()
            for wait in of_rank.waits
            if wait.cause == Cause.GRADIENT_SYNC
        ]
        for of_rank in self._ranks.values():
            of_rank.waits = disjoint(of_rank.waits)
        self._tasks = self._run_as_one(frames)
        self._rows: defaultdict[Place, list[ChainTask]] = defaultdict(list)
        for task in sorted(self._tasks.values()):
            self._rows[task.place].append(task)
        # The last message for each task: arrival time, sending rank, receiving rank.
        self._came: dict[tuple[Place, str, int, int], tuple[int, int, int]] = {}
        names = ("to_rank", "kind", "stage", "microbatch", "came_ns", "from_rank")
        for to_rank, kind, stage, microbatch, came_ns, from_rank in frames.messages.select(
            names
        ).iter_rows():
            key = (self._ranks[to_rank].place, kind, stage, microbatch)
            self._came[key] = max(self._came.get(key, (0, 0, 0)), (came_ns, from_rank, to_rank))
        if transfers_block(frames):
            self._assume_messages()

    def _assume_messages(self) -> None:
        """Assume that each message from another rank arrived when its sending task ended.

        Replaces recorded arrivals.
        """
        givers = {
            (task.place[1], task.kind, task.stage, task.microbatch): task
            for task in self._tasks.values()
        }
        for key, task in self._tasks.items():
            stage = sending_stage(task.kind, task.stage)
            if stage is None:
                continue
            giver = givers.get((task.place[1], task.kind, stage, task.microbatch))
            if giver is not None and giver.place != task.place:
                self._came[key] = giver.end_ns, giver.rank, task.rank

    def _run_as_one(self, frames: Frames) -> dict[tuple[Place, str, int, int], ChainTask]:
        """Return the tasks by key, merged over members: from the last start to the last end."""
        found: dict[tuple[Place, str, int, int], ChainTask] = {}
        columns = ("start_ns", "end_ns", "rank", "kind", "stage", "microbatch")
        for start_ns, end_ns, rank, *what in frames.tasks.select(columns).iter_rows():
            task = ChainTask(start_ns, end_ns, self._ranks[rank].place, rank, *what)
            other = found.get(task.key, task)
            last = max(task, other, key=lambda each: (each.end_ns, -each.rank))
            found[task.key] = last._replace(start_ns=max(task.start_ns, other.start_ns))
        return found

    def segments(self) -> tuple[Segment, ...]:
        """Return the path in order of time and without gaps, clipped to the step's window.

        It begins with warmup if it does not reach the start of the window. Raises RrfpError for a
        step without tasks, and if tasks wait for each other in a ring.
        """
        start_ns, end_ns = self._window
        if not self._tasks:
            raise RrfpError(
                f"{step_name(self._step)} of the trace has no tasks; see 'rrfp trace check'"
            )
        last = max(self._tasks.values(), key=lambda task: (task.end_ns, -task.rank))
        back = [*self._tail(last, end_ns)]
        back += self.chain(last)
        until_ns = back[-1].start_ns
        if until_ns > start_ns:
            back.append(Segment(start_ns, until_ns, back[-1].pp_rank, Cause.WARMUP))
        # Tasks of a damaged trace may lie outside of their step.
        within = (
            each._replace(start_ns=max(each.start_ns, start_ns), end_ns=min(each.end_ns, end_ns))
            for each in reversed(back)
        )
        return tuple(each for each in within if each.start_ns < each.end_ns)

    def chain(self, last: ChainTask) -> Iterator[Segment]:
        """Yield the path from the end of the last task back to the entry of its first rank.

        Raises RrfpError if tasks wait for each other in a ring.
        """
        task: ChainTask | None = last
        until_ns = last.end_ns
        passed: set[ChainTask] = set()
        while task is not None:
            if task in passed:
                raise RrfpError(
                    f"in {step_name(self._step)} of the trace tasks wait for each other in a ring, "
                    "so that its times cannot be right; choose another step with --step"
                )
            passed.add(task)
            begin_ns = min(task.start_ns, until_ns)
            yield Segment(begin_ns, until_ns, task.place[0], task.kind)
            back: list[Segment] = []
            task, until_ns = self._before(task, begin_ns, back)
            yield from back

    def _before(
        self, task: ChainTask, begin_ns: int, back: list[Segment]
    ) -> tuple[ChainTask | None, int]:
        """Return the previous task on the path (None at its start), and when the path left it.

        That is the sender of the task's message if the message came after the rank was free (in an
        imported run, if the sending task ended after that), else the rank's previous task. Appends
        the segments in between to `back`, the latest first.
        """
        row = self._rows[task.place]
        number = bisect_left(row, task)
        if number:
            previous, free_ns, last = row[number - 1], row[number - 1].end_ns, row[number - 1].rank
        else:
            previous, (free_ns, last) = None, self._entered(task.place)
        came_ns, from_rank, to_rank = self._came.get(task.key, (0, 0, 0))
        sender = self._sender(task, from_rank) if came_ns > free_ns else None
        if sender is not None and self._is_imported and sender.end_ns <= free_ns:
            # The arrival time is unknown, and the message need not have been waited for.
            sender = None
        pp_rank = task.place[0]
        if sender is None:
            reached_ns = min(free_ns, begin_ns)
            back += idle(pp_rank, self._ranks[last].waits, reached_ns, begin_ns, OVERHEAD)
            return previous, reached_ns
        came_ns = min(came_ns, begin_ns)
        back += idle(pp_rank, self._ranks[to_rank].waits, came_ns, begin_ns, OVERHEAD)
        left_ns = min(sender.end_ns, came_ns)
        back.append(Segment(left_ns, came_ns, pp_rank, LINK, sender.place[0]))
        return sender, left_ns

    def _entered(self, place: Place) -> tuple[int, int]:
        """Return when the last member of a place entered the schedule, and that member's rank.

        Imported runs do not record entries; the start of the window is used.
        """
        return max(
            (self._window[0] if self._is_imported else of_rank.entry_ns, rank)
            for rank, of_rank in self._ranks.items()
            if of_rank.place == place
        )

    def _sender(self, task: ChainTask, from_rank: int) -> ChainTask | None:
        """Return the task that sent the input of this task; None if it has none or is not
        recorded."""
        stage = sending_stage(task.kind, task.stage)
        sends = self._ranks.get(from_rank)
        if sends is None or stage is None:
            return None
        return self._tasks.get((sends.place, task.kind, stage, task.microbatch))

    def _tail(self, last: ChainTask, end_ns: int) -> Iterator[Segment]:
        """Yield the time after the last task, from the end back, as gradient sync and drain.

        It is attributed to the pipeline rank of the rank with the longest sync after that task, or
        without any to that of the last task.
        """
        synced_ns = defaultdict(int, {last.rank: 0})
        for rank, sync in self._syncs:
            synced_ns[rank] += max(0, min(sync.end_ns, end_ns) - max(sync.start_ns, last.end_ns))
        longest = max(synced_ns, key=lambda rank: (synced_ns[rank], rank == last.rank))
        syncs = disjoint(sync for _, sync in self._syncs)
        return idle(self._ranks[longest].pp_rank, syncs, last.end_ns, end_ns, Cause.DRAIN)


class BlockingBacktrace(Backtrace):
    """Traces the critical path of a step with blocking transfers.

    A transfer begins when both ranks have reached it, and the path continues with the rank that
    came last. An earlier transfer of that rank may have delayed it, so the path can lead to a rank
    that neither sends nor receives the message.
    """

    def __init__(self, frames: Frames, step: int, window: Window) -> None:
        super().__init__(frames, step, window)
        ((_, replicas),) = blocking_replicas(frames, {step: window})
        self._replicas = {
            rank: replica for replica in replicas for members in replica.members for rank in members
        }

    def chain(self, last: ChainTask) -> Iterator[Segment]:
        """Yield the path from the end of the last task back, over tasks, transfers and waits.

        After a transfer that made its rank wait, the path continues on the rank that came last.
        """
        replica = self._replicas[last.rank]
        rank = replica.ranks[self._ranks[last.rank].pp_rank]
        tasks = {each.pp_rank: list(each.spans.items()) for each in replica.ranks}
        gap = list(rank.spans).index(Task(last.stage, Kind(last.kind), last.microbatch))
        until_ns = last.end_ns
        passed: set[Task] = set()
        while gap >= 0:
            task, (start_ns, _) = tasks[rank.pp_rank][gap]
            begin_ns = min(start_ns, until_ns)
            yield Segment(begin_ns, until_ns, rank.pp_rank, task.kind)
            until_ns = begin_ns
            while (meeting := _latest(rank, gap, until_ns, passed)) is not None:
                passed.add(meeting.task)
                yield from self._idle(replica, rank, meeting.passed_ns, until_ns)
                until_ns = meeting.began_ns
                ends = meeting.receiver.pp_rank, LINK, meeting.sender.pp_rank
                yield Segment(until_ns, meeting.passed_ns, *ends)
                rank, gap = replica.ranks[meeting.last.pp_rank], meeting.last.gap
            free_ns = min(rank.free_ns[gap], until_ns)
            yield from self._idle(replica, rank, free_ns, until_ns)
            until_ns = free_ns
            gap -= 1

    def _idle(
        self, replica: BlockingReplica, rank: BlockingRank, start_ns: int, end_ns: int
    ) -> Iterator[Segment]:
        """Yield the waits of a pipeline rank's leader from the end back, with overhead in the
        gaps."""
        waits = self._ranks[replica.members[rank.pp_rank][0]].waits
        return idle(rank.pp_rank, waits, start_ns, end_ns, OVERHEAD)


def _latest(
    rank: BlockingRank, gap: int, until_ns: int, passed: Collection[Task]
) -> BlockingTransfer | None:
    """Return the last transfer in a gap that made its rank wait and ended by `until_ns`.

    Transfers of tasks in `passed` are left out. None without any.
    """
    return max(
        (
            each
            for each in rank.transfers[gap]
            if rank.free_ns[gap] < each.passed_ns <= until_ns and each.task not in passed
        ),
        key=lambda each: each.passed_ns,
        default=None,
    )


class Owner(NamedTuple):
    """The time of one pipeline rank and kind on the path."""

    pp_rank: int
    kind: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of one step, in order of time and without gaps."""

    step: int
    segments: tuple[Segment, ...]
    pp_rank: int | None = None
    """Only owners of this pipeline rank are reported; None means all."""

    @property
    def length_ns(self) -> int:
        """Time from the start of the path to its end, over all ranks."""
        return self.segments[-1].end_ns - self.segments[0].start_ns

    def of_rank(self, pp_rank: int) -> "CriticalPath":
        """Return the same path with only the owners of one pipeline rank."""
        return replace(self, pp_rank=pp_rank)

    @property
    def owners(self) -> list[Owner]:
        """Time by pipeline rank and kind, the largest first; of `pp_rank` alone if that is set."""
        times_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
        for start_ns, end_ns, pp_rank, kind, _ in self.segments:
            if self.pp_rank in (None, pp_rank):
                times_ns[pp_rank, kind] += end_ns - start_ns
        owners = [Owner(*who, time_ns) for who, time_ns in times_ns.items() if time_ns]
        return sorted(owners, key=lambda owner: (-owner.time_ns, owner.pp_rank, owner.kind))

    @property
    def idle_fraction(self) -> float:
        """Share of links and waits in the path, over all ranks."""
        idle_ns = sum(
            segment.end_ns - segment.start_ns
            for segment in self.segments
            if segment.kind not in list(Kind)
        )
        return idle_ns / self.length_ns


def critical_path(frames: Frames, step: int | None = None) -> CriticalPath:
    """Compute the critical path of a step; None means the longest step.

    It follows the blocking transfers of a simulated run (`BlockingBacktrace`) if all match.
    Raises UsageError for a step that some rank did not finish, and RrfpError if all steps are such,
    or the step has zero length, no tasks, or tasks that wait for each other in a ring.
    """
    spans = {step: (start, end) for step, start, end in frames.finished_windows().iter_rows()}
    if step is None:
        step = max(spans, key=lambda each: spans[each][1] - spans[each][0])
    if step not in spans:
        nearest = sorted(spans, key=lambda each: abs(each - step))[:2]
        raise UsageError(
            f"{step_name(step)} was not finished by every rank; choose another one, such as "
            f"{' or '.join(map(step_name, steps_in_order(nearest)))}"
        )
    start_ns, end_ns = spans[step]
    if start_ns >= end_ns:
        raise RrfpError(f"{step_name(step)} takes no time in this trace; see 'rrfp trace check'")
    of_step = frames.of_steps(range(step, step + 1))
    back = Backtrace(of_step, step, spans[step])
    if transfers_block(of_step) and is_simulated(of_step):
        # If ranks are missing, the blocking transfers cannot be matched.
        with suppress(RrfpError):
            back = BlockingBacktrace(of_step, step, spans[step])
    return CriticalPath(step, back.segments())


_COLORS = KIND_COLORS | {LINK: LINK_COLOR} | CAUSE_COLORS


def path_table(path: CriticalPath, stages: Mapping[int, Sequence[int]]) -> Table:
    """Make the table of the critical path: a row for each pipeline rank on it, a column per kind.

    Cells are rounded so that rows and columns sum to the total of the path's owners.
    """
    owners = path.owners
    times_ns = [owner.time_ns for owner in owners]
    unit = Times([path.length_ns]).unit
    tenths = apportioned(times_ns, round(10 * sum(times_ns) / unit.value))
    cells = {(each.pp_rank, each.kind): n for each, n in zip(owners, tenths, strict=True)}
    ranks = sorted({owner.pp_rank for owner in owners})
    by_kind: dict[str, int] = defaultdict(int)
    for (_, kind), tenth in cells.items():
        by_kind[kind] += tenth
    # A damaged trace may have kinds without a color.
    kinds = [kind for kind in dict.fromkeys((*_COLORS, *by_kind)) if by_kind.get(kind)]
    sums = [sum(cells.get((pp_rank, kind), 0) for kind in by_kind) for pp_rank in ranks]
    shares = apportioned(sums, round(1000 * sum(times_ns) / path.length_ns))
    length = format_time(path.length_ns)
    return Table(
        f"Critical path of {step_name(path.step)}, in {unit.symbol}",
        [
            Column("stage", [numbers_of(stages[each]) for each in ranks], TEXT, total="all"),
            *(
                Column(
                    CAUSE_HEADINGS.get(kind, kind),
                    [cells.get((pp_rank, kind)) or None for pp_rank in ranks],
                    TENTHS,
                    total=by_kind[kind],
                    color=_COLORS.get(kind, ""),
                )
                for kind in kinds
            ),
            Column("sum", sums, TENTHS, marked=outliers(sums), total=sum(sums)),
            Column("%", shares, TENTHS, total=sum(shares)),
        ],
        [f"{step_name(path.step).capitalize()} took {length}. {_conclusion(path, stages)}"],
        has_total=len(ranks) > 1,
        caption=f"Critical path of {step_name(path.step)}, {length} long",
    )


def owner_table(path: CriticalPath) -> Table:
    """Make the table of owners for programs, the largest first, in seconds."""
    owners = path.owners
    sort, number = split_step(path.step)
    seconds = [owner.time_ns / NS_PER_S for owner in owners]
    return Table(
        "",
        [
            Column(
                None, pl.Series([each.pp_rank for each in owners], dtype=pl.Int32), key="pp_rank"
            ),
            Column(None, pl.Series([each.kind for each in owners], dtype=pl.String), key="kind"),
            Column(None, pl.Series(seconds, dtype=pl.Float64), key="seconds"),
        ],
        facts={sort: number, "length_s": path.length_ns / NS_PER_S},
        rows_key="owners",
    )


def _conclusion(path: CriticalPath, stages: Mapping[int, Sequence[int]]) -> str:
    """State the largest owner and the share of links and waits, or the share of the chosen rank."""
    owners = path.owners
    if path.pp_rank is None:
        most = owners[0]
        return (
            f"Most of it is {most.kind} of {label_of(stages[most.pp_rank])}, "
            f"{most.time_ns / path.length_ns:.0%}; links and waits take {path.idle_fraction:.0%}."
        )
    of_rank = stages[path.pp_rank]
    named, is_one = label_of(of_rank).capitalize(), len(of_rank) == 1
    if not owners:
        return f"{named} {'is' if is_one else 'are'} not on the critical path."
    share = sum(owner.time_ns for owner in owners) / path.length_ns
    return f"{named} {'takes' if is_one else 'take'} {share:.1%} of it, most as {owners[0].kind}."
