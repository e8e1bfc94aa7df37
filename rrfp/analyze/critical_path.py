"""Which chain of tasks, messages and waits made a step as long as it was, and who owns it.

The chain is followed from the end of the step back to its start. A task began when the last thing
it needed was there. If its message came after its rank was free, that was the message, and the
chain goes on with the task that sent it; otherwise it was the task before it on its rank.

Every nanosecond of the step has an owner: the task that ran, the link (counted for its receiver)
while a message was under way, or what a rank waited for; of overlapping waits, the earlier one. The
rank that synchronises gradients longest owns the time after the last task. The members of a group
run their tasks as one: the last member's message counts for all.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from rrfp.analyze.bubbles import OVERHEAD
from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.causes import Cause
from rrfp.schedule.shape import sending_stage
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import NS_PER_S, Phase
from rrfp.trace.steps import in_order, step_name, told_step

LINK = "link"


class Segment(NamedTuple):
    """A part of the chain that one rank owns."""

    start_ns: int
    end_ns: int
    pp_rank: int
    kind: str
    """F, B or W; `link`; or the cause of a wait."""


class Owner(NamedTuple):
    """Who owns how much of the step."""

    pp_rank: int
    kind: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of one step, in order of time and without gaps."""

    step: int
    segments: tuple[Segment, ...]
    pp_rank: int | None = None
    """Only this pipeline rank's owners are reported; None reports all."""

    @property
    def length_ns(self) -> int:
        return self.segments[-1].end_ns - self.segments[0].start_ns

    def of_rank(self, pp_rank: int) -> "CriticalPath":
        """The same chain, its owners those of one pipeline rank."""
        return replace(self, pp_rank=pp_rank)

    @property
    def owners(self) -> list[Owner]:
        """The largest first; their times sum to the length."""
        times_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
        for start_ns, end_ns, pp_rank, kind in self.segments:
            if self.pp_rank in (None, pp_rank):
                times_ns[pp_rank, kind] += end_ns - start_ns
        owners = [Owner(*who, time_ns) for who, time_ns in times_ns.items() if time_ns]
        return sorted(owners, key=lambda owner: (-owner.time_ns, owner.pp_rank, owner.kind))

    @property
    def idle_fraction(self) -> float:
        """The share of the chain that links and waits own."""
        idle_ns = sum(owner.time_ns for owner in self.owners if owner.kind not in list(Kind))
        return idle_ns / self.length_ns

    @property
    def frame(self) -> pl.DataFrame:
        """A row an owner, the largest first."""
        return pl.DataFrame(
            [(*owner[:2], owner.time_ns / NS_PER_S) for owner in self.owners],
            schema={"pp_rank": pl.Int32, "kind": pl.String, "seconds": pl.Float64},
            orient="row",
        )

    def as_json(self) -> dict[str, object]:
        """The object that `rrfp analyze critical-path --format json` prints."""
        sort, number = told_step(self.step)
        return {
            sort: number,
            "length_s": self.length_ns / NS_PER_S,
            "owners": [
                {"pp_rank": pp_rank, "kind": kind, "seconds": time_ns / NS_PER_S}
                for pp_rank, kind, time_ns in self.owners
            ],
        }


class _Wait(NamedTuple):
    """A wait of a rank."""

    start_ns: int
    end_ns: int
    cause: str


class _Task(NamedTuple):
    """A task on a rank."""

    start_ns: int
    end_ns: int
    rank: int
    kind: str
    stage: int
    microbatch: int


@dataclass(slots=True)
class _Rank:
    """What one rank did in the step."""

    pp_rank: int
    group: tuple[int, int]
    entry_ns: int
    tasks: list[_Task]
    waits: list[_Wait]
    """In order of time, without overlaps."""


def critical_path(frames: Frames, step: int | None = None) -> CriticalPath:
    """The chain of a step; by default, of the longest one.

    Raises RrfpError when no step was finished by every rank or the step takes no time, and
    UsageError for a step that some rank did not finish.
    """
    spans = {step: (start, end) for step, start, end in frames.windows.iter_rows()}
    if not spans:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    if step is None:
        step = max(spans, key=lambda each: spans[each][1] - spans[each][0])
    if step not in spans:
        nearest = sorted(spans, key=lambda each: abs(each - step))[:2]
        raise UsageError(
            f"{step_name(step)} was not finished by every rank; choose another one, such as "
            f"{' or '.join(map(step_name, in_order(nearest)))}"
        )
    start_ns, end_ns = spans[step]
    if start_ns >= end_ns:
        raise RrfpError(f"{step_name(step)} takes no time in this trace; see 'rrfp trace check'")
    return _Backtrace(frames.of_steps(range(step, step + 1)), step, spans[step]).path()


class _Backtrace:
    """Follows the chain of one step from its end."""

    def __init__(self, frames: Frames, step: int, window: tuple[int, int]) -> None:
        self._step = step
        self._window = window
        self._ranks: dict[int, _Rank] = {}
        schedules = frames.phases.filter(pl.col("phase") == Phase.SCHEDULE)
        for row in schedules.select("rank", "pp_rank", "dp_rank", "start_ns").iter_rows():
            rank, pp_rank, dp_rank, entry_ns = row
            self._ranks[rank] = _Rank(pp_rank, (pp_rank, dp_rank), entry_ns, [], [])
        columns = ("start_ns", "end_ns", "rank", "kind", "stage", "microbatch")
        for row in frames.tasks.select(columns).iter_rows():
            task = _Task(*row)
            self._ranks[task.rank].tasks.append(task)
        for rank, *wait in frames.waits.select("rank", "start_ns", "end_ns", "cause").iter_rows():
            self._ranks[rank].waits.append(_Wait(*wait))
        self._syncs = [
            (rank, wait)
            for rank, of_rank in self._ranks.items()
            for wait in of_rank.waits
            if wait.cause == Cause.GRADIENT_SYNC
        ]
        for of_rank in self._ranks.values():
            of_rank.tasks.sort()
            of_rank.waits = _disjoint(of_rank.waits)
        self._senders = {
            (task.rank, task.kind, task.stage, task.microbatch): task
            for of_rank in self._ranks.values()
            for task in of_rank.tasks
        }
        # The last message for a task of a group: when it came, and the rank that sent it.
        self._came: dict[tuple[tuple[int, int], str, int, int], tuple[int, int]] = {}
        names = ("to_rank", "kind", "stage", "microbatch", "came_ns", "from_rank")
        for to_rank, kind, stage, microbatch, came_ns, from_rank in frames.messages.select(
            names
        ).iter_rows():
            key = (self._ranks[to_rank].group, kind, stage, microbatch)
            self._came[key] = max(self._came.get(key, (0, 0)), (came_ns, from_rank))

    def path(self) -> CriticalPath:
        tasks = [task for of_rank in self._ranks.values() for task in of_rank.tasks]
        start_ns, end_ns = self._window
        if not tasks:
            raise RrfpError(
                f"{step_name(self._step)} of the trace has no tasks; see 'rrfp trace check'"
            )
        last = max(tasks, key=lambda task: (task.end_ns, -task.rank))
        back = [*self._tail(last, end_ns)]
        task: _Task | None = last
        until_ns = last.end_ns
        passed: set[_Task] = set()
        while task is not None:
            if task in passed:
                raise RrfpError(
                    f"in {step_name(self._step)} of the trace tasks wait for each other in a ring, "
                    "so that its times cannot be right; choose another step with --step"
                )
            passed.add(task)
            pp_rank = self._ranks[task.rank].pp_rank
            begin_ns = min(task.start_ns, until_ns)
            back.append(Segment(begin_ns, until_ns, pp_rank, task.kind))
            task, until_ns = self._before(task, begin_ns, back)
        if until_ns > start_ns:
            back.append(Segment(start_ns, until_ns, back[-1].pp_rank, Cause.WARMUP))
        # A damaged trace may have tasks outside of their step.
        within = (
            each._replace(start_ns=max(each.start_ns, start_ns), end_ns=min(each.end_ns, end_ns))
            for each in reversed(back)
        )
        return CriticalPath(
            self._step, tuple(each for each in within if each.start_ns < each.end_ns)
        )

    def _before(self, task: _Task, begin_ns: int, back: list[Segment]) -> tuple[_Task | None, int]:
        """The task that this one waited for, and when the wait for it began; adds to `back` what
        lies between the two."""
        of_rank = self._ranks[task.rank]
        place = bisect_left(of_rank.tasks, task)
        previous = of_rank.tasks[place - 1] if place else None
        free_ns = of_rank.entry_ns if previous is None else previous.end_ns
        came_ns, from_rank = self._came.get(
            (of_rank.group, task.kind, task.stage, task.microbatch), (0, 0)
        )
        sender = self._sender(task, from_rank) if came_ns > free_ns else None
        if sender is None:
            reached_ns = min(free_ns, begin_ns)
            back += _idle(of_rank.pp_rank, of_rank.waits, reached_ns, begin_ns, OVERHEAD)
            return previous, reached_ns
        came_ns = min(came_ns, begin_ns)
        back += _idle(of_rank.pp_rank, of_rank.waits, came_ns, begin_ns, OVERHEAD)
        left_ns = min(sender.end_ns, came_ns)
        back.append(Segment(left_ns, came_ns, of_rank.pp_rank, LINK))
        return sender, left_ns

    def _sender(self, task: _Task, from_rank: int) -> _Task | None:
        """The task whose output the message for this one carried."""
        stage = sending_stage(task.kind, task.stage)
        if stage is None:
            return None
        return self._senders.get((from_rank, task.kind, stage, task.microbatch))

    def _tail(self, last: _Task, end_ns: int) -> Iterator[Segment]:
        """Why the step went on after its last task, from the end back: a rank synchronised
        gradients, or the pipeline drained."""
        synced_ns = defaultdict(int, {last.rank: 0})
        for rank, sync in self._syncs:
            synced_ns[rank] += max(0, min(sync.end_ns, end_ns) - max(sync.start_ns, last.end_ns))
        longest = max(synced_ns, key=lambda rank: (synced_ns[rank], rank == last.rank))
        syncs = _disjoint(sync for _, sync in self._syncs)
        return _idle(self._ranks[longest].pp_rank, syncs, last.end_ns, end_ns, Cause.DRAIN)


def _disjoint(waits: Iterable[_Wait]) -> list[_Wait]:
    """The waits in order of time, each cut to what lies after the earlier ones."""
    found: list[_Wait] = []
    for wait in sorted(waits):
        begin_ns = max(wait.start_ns, found[-1].end_ns) if found else wait.start_ns
        if begin_ns < wait.end_ns:
            found.append(wait._replace(start_ns=begin_ns))
    return found


def _idle(
    pp_rank: int, waits: list[_Wait], start_ns: int, end_ns: int, rest: str
) -> Iterator[Segment]:
    """Why a rank ran nothing, from the end back: its disjoint waits, and `rest` for what they leave
    unexplained."""
    cursor_ns = end_ns
    for wait in reversed(waits):
        begin_ns, stop_ns = max(wait.start_ns, start_ns), min(wait.end_ns, cursor_ns)
        if begin_ns >= stop_ns:
            continue
        yield Segment(stop_ns, cursor_ns, pp_rank, rest)
        yield Segment(begin_ns, stop_ns, pp_rank, wait.cause)
        cursor_ns = begin_ns
    yield Segment(start_ns, cursor_ns, pp_rank, rest)
