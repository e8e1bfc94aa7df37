"""Follows the chain of one step from its end, message by message."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from rrfp.analyze.bubbles import OVERHEAD
from rrfp.analyze.frames import Frames
from rrfp.analyze.meetings import is_imported, transfers_block
from rrfp.analyze.path.segments import LINK, Segment, Wait, disjoint, idle
from rrfp.errors import RrfpError
from rrfp.schedule.causes import Cause
from rrfp.schedule.shape import sending_stage
from rrfp.trace.records import Phase
from rrfp.trace.steps import step_name

Place = tuple[int, int]
"""A pipeline rank of a replica. Its members, if there are several, run its tasks as one."""


class ChainTask(NamedTuple):
    """A task, from when the last member began it to when the last one ended it."""

    start_ns: int
    end_ns: int
    place: Place
    rank: int
    """The member that ended it last."""
    kind: str
    stage: int
    microbatch: int

    @property
    def key(self) -> tuple[Place, str, int, int]:
        return self.place, self.kind, self.stage, self.microbatch


@dataclass(slots=True)
class RankInChain:
    """What one rank did in the step, besides tasks."""

    place: Place
    entry_ns: int
    waits: list[Wait]
    """In order of time, without overlaps."""

    @property
    def pp_rank(self) -> int:
        return self.place[0]


class Backtrace:
    """Follows the chain of one step from its end."""

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
        # The last message for a task: when it came, and the ranks that sent and took it.
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
        """Take each message to have come when the task that gave it ended."""
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
        """The tasks, those of all members of a place as one."""
        found: dict[tuple[Place, str, int, int], ChainTask] = {}
        columns = ("start_ns", "end_ns", "rank", "kind", "stage", "microbatch")
        for start_ns, end_ns, rank, *what in frames.tasks.select(columns).iter_rows():
            task = ChainTask(start_ns, end_ns, self._ranks[rank].place, rank, *what)
            other = found.get(task.key, task)
            last = max(task, other, key=lambda each: (each.end_ns, -each.rank))
            found[task.key] = last._replace(start_ns=max(task.start_ns, other.start_ns))
        return found

    def segments(self) -> tuple[Segment, ...]:
        """The chain, in order of time and without gaps."""
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
        # A damaged trace may have tasks outside of their step.
        within = (
            each._replace(start_ns=max(each.start_ns, start_ns), end_ns=min(each.end_ns, end_ns))
            for each in reversed(back)
        )
        return tuple(each for each in within if each.start_ns < each.end_ns)

    def chain(self, last: ChainTask) -> Iterator[Segment]:
        """From the end of the last task back to the entry of the rank that the chain begins on."""
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
        """The task that this one waited for, and when the wait for it began; adds to `back` what
        lies between the two."""
        row = self._rows[task.place]
        number = bisect_left(row, task)
        if number:
            previous, free_ns, last = row[number - 1], row[number - 1].end_ns, row[number - 1].rank
        else:
            previous, (free_ns, last) = None, self._entered(task.place)
        came_ns, from_rank, to_rank = self._came.get(task.key, (0, 0, 0))
        sender = self._sender(task, from_rank) if came_ns > free_ns else None
        if sender is not None and self._is_imported and sender.end_ns <= free_ns:
            # It may have come any time from when it left, and need not have been waited for.
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
        """When the last member of a place entered the schedule, and which one. An imported run does
        not tell: its ranks may have been there before the first thing that they did."""
        return max(
            (self._window[0] if self._is_imported else of_rank.entry_ns, rank)
            for rank, of_rank in self._ranks.items()
            if of_rank.place == place
        )

    def _sender(self, task: ChainTask, from_rank: int) -> ChainTask | None:
        """The task whose output the message for this one carried."""
        stage = sending_stage(task.kind, task.stage)
        sends = self._ranks.get(from_rank)
        if sends is None or stage is None:
            return None
        return self._tasks.get((sends.place, task.kind, stage, task.microbatch))

    def _tail(self, last: ChainTask, end_ns: int) -> Iterator[Segment]:
        """Why the step went on after its last task, from the end back: a rank synchronised
        gradients, or the pipeline drained."""
        synced_ns = defaultdict(int, {last.rank: 0})
        for rank, sync in self._syncs:
            synced_ns[rank] += max(0, min(sync.end_ns, end_ns) - max(sync.start_ns, last.end_ns))
        longest = max(synced_ns, key=lambda rank: (synced_ns[rank], rank == last.rank))
        syncs = disjoint(sync for _, sync in self._syncs)
        return idle(self._ranks[longest].pp_rank, syncs, last.end_ns, end_ns, Cause.DRAIN)
