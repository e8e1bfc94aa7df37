"""The spans of all ranks of a run: which task gives which its input, by clocks put right."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.clocks import Link, least_shifts
from rrfp.interchange.spans import RankSpans, TaskSpan
from rrfp.schedule.shape import sending_stage
from rrfp.schedule.tasks import Kind
from rrfp.trace.perfetto.format import bounds_of
from rrfp.trace.records import NS_PER_S, Phase

_US = 1_000
_TOLD_SHIFT_NS = _US
"""A smaller shift only makes up for the rounding of times."""
_MOST_NS = bounds_of("end_ns")[1]
_DAY_NS = 86_400 * NS_PER_S
_NUM_LISTED = 8


class _Key(NamedTuple):
    """A task of the run."""

    replica: tuple[int, int]
    step: int
    kind: Kind
    stage: int
    microbatch: int


class RunSpans:
    """The spans of all ranks, and which task gives which its input."""

    def __init__(self, ranks: list[RankSpans]) -> None:
        self.ranks = ranks
        self._found: dict[_Key, tuple[RankSpans, TaskSpan]] = {}
        self._find()

    def _find(self) -> None:
        for rank in self.ranks:
            rank.tasks.sort()
            for task in rank.tasks:
                self._found[_key(rank, task)] = rank, task

    def sender(self, rank: RankSpans, task: TaskSpan) -> tuple[RankSpans, TaskSpan] | None:
        """The rank and the task whose output this one takes; None if its own rank has that task."""
        stage = sending_stage(task.kind, task.stage)
        if stage is None:
            return None
        found = self._found.get(_key(rank, task._replace(stage=stage)))
        return found if found is not None and found[0] is not rank else None

    def put_clocks_right(self) -> Iterator[str]:
        """Shift the clocks of ranks that seem to run tasks before their input; yields notes."""
        slacks_ns: dict[Link, int] = {}
        for rank in self.ranks:
            for task in rank.tasks:
                if (found := self.sender(rank, task)) is None:
                    continue
                link = found[0].info.rank, rank.info.rank
                there_ns = task.end_ns if rank.receives_inside else task.start_ns
                sender, sent = found
                left_ns = sent.start_ns if sender.sends_inside else sent.end_ns
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
                f"{listed(told)}"
            )
        for rank in self.ranks:
            shift_ns = shifts_ns[rank.info.rank]
            rank.info = replace(rank.info, clock_offset_ns=shift_ns)
            rank.shift(shift_ns)
        self._find()

    def begin_with_the_input(self) -> None:
        """If spans hold the wait for their input, let each task begin when its input was sent."""
        for rank in self.ranks:
            if rank.receives_inside:
                rank.tasks = [self._trimmed(rank, task) for task in rank.tasks]
        self._find()

    def _trimmed(self, rank: RankSpans, task: TaskSpan) -> TaskSpan:
        found = self.sender(rank, task)
        if found is None:
            return task
        return task._replace(start_ns=min(max(task.start_ns, found[1].end_ns), task.end_ns))

    def count_from_the_start(self) -> None:
        """Let times count from the run's first moment.

        Raises RrfpError when the run seems to last longer than any trace can tell.
        """
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
            rank.shift(-origin_ns)
        self._find()

    def gaps(self, rank: RankSpans) -> Iterator[tuple[int, TaskSpan]]:
        """Each task that did not begin as soon as the rank was free, and since when it was."""
        entries_ns = {
            phase.step: phase.start_ns for phase in rank.phases if phase.phase == Phase.SCHEDULE
        }
        free_ns: dict[int, int] = {}
        for task in rank.tasks:
            start_ns = free_ns.get(task.step, entries_ns.get(task.step, task.start_ns))
            if start_ns < task.start_ns:
                yield start_ns, task
            free_ns[task.step] = max(start_ns, task.end_ns)


def _key(rank: RankSpans, task: TaskSpan) -> _Key:
    replica = rank.info.dp_rank, rank.info.tp_rank
    return _Key(replica, task.step, task.kind, task.stage, task.microbatch)


def listed(found: Sequence[object]) -> str:
    """The first of them, as text for a note."""
    return ", ".join(map(str, found[:_NUM_LISTED])) + (", ..." if found[_NUM_LISTED:] else "")
