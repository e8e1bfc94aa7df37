"""Spans of a pipeline's ranks from another program's trace, which are made into a recording."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.schedule.shape import sending_stage
from rrfp.schedule.tasks import Kind
from rrfp.trace.perfetto.format import bounds_of
from rrfp.trace.records import NS_PER_S, Phase, PhaseRecord, RankInfo, WaitRecord


class TaskSpan(NamedTuple):
    """A task that ran."""

    start_ns: int
    end_ns: int
    step: int
    kind: Kind
    stage: int
    microbatch: int


class TransferSpan(NamedTuple):
    """Time in which a rank sent or received."""

    start_ns: int
    end_ns: int
    step: int


@dataclass(slots=True)
class RankSpans:
    """The spans of one rank, on its own clock."""

    info: RankInfo
    tasks: list[TaskSpan] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    """The waits whose cause is in the trace."""
    transfers: list[TransferSpan] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    tells_waits: bool = False
    """True if `waits` are complete, so that none must be derived."""
    receives_inside: bool = False
    """True if a task's span may include the wait for its input."""
    sends_inside: bool = False
    """True if a task's span may include the send of its output."""

    def schedules(self) -> list[PhaseRecord]:
        """Derive a `SCHEDULE` phase for each step, from the rank's first task, wait or transfer to
        its last. Adds nothing to `phases`."""
        extents: dict[int, tuple[int, int]] = {}
        for span in chain[TaskSpan | WaitRecord | TransferSpan](
            self.tasks, self.waits, self.transfers
        ):
            first_ns, last_ns = extents.get(span.step, (span.start_ns, span.end_ns))
            extents[span.step] = min(first_ns, span.start_ns), max(last_ns, span.end_ns)
        return [PhaseRecord(*extent, step, Phase.SCHEDULE) for step, extent in extents.items()]

    def shift(self, by_ns: int) -> None:
        """Add `by_ns` to all times."""
        for spans in self._lists():
            spans[:] = [
                each._replace(start_ns=each.start_ns + by_ns, end_ns=each.end_ns + by_ns)
                for each in spans
            ]

    def renumber(self, steps: Mapping[int, int]) -> None:
        """Change step numbers by a mapping from old to new ones; other steps stay."""
        for spans in self._lists():
            spans[:] = [each._replace(step=steps.get(each.step, each.step)) for each in spans]

    def _lists(self) -> tuple[list[Any], ...]:
        """The lists of tasks, waits, transfers and phases themselves, not copies."""
        return self.tasks, self.waits, self.transfers, self.phases


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of imported spans."""

    name: str
    num_files: int
    device: str
    """`cpu`, or `cuda` if the times are those of a GPU."""
    transfers_block: bool
    """True if a rank does nothing else while it sends or receives, as in Megatron's schedules."""
    world_size: int | None
    """The number of ranks of the run; None if it is unknown."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how it was read, one sentence each."""


# Aligning clocks by causality: no task begins before the task that produces its input ends.


Link = tuple[int, int]
"""The source and destination rank of messages."""


def least_shifts(slacks_ns: Mapping[Link, int], ranks: list[int]) -> dict[int, int] | None:
    """The smallest non-negative shift of each rank's clock such that no message arrives before it
    is sent; None if no shifts achieve that. `slacks_ns` has the shortest apparent time of a message
    by link."""
    shifts_ns = dict.fromkeys(ranks, 0)
    for _ in ranks:
        has_converged = True
        for (source, destination), slack_ns in slacks_ns.items():
            least_ns = shifts_ns[source] - slack_ns
            if shifts_ns[destination] < least_ns:
                shifts_ns[destination] = least_ns
                has_converged = False
        if has_converged:
            return shifts_ns
    return None


# The spans of all ranks of a run.


_US = 1_000
_NOTED_SHIFT_NS = _US
"""The smallest shift of a clock to report; smaller ones only correct the rounding of times."""
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
    """The spans of all ranks of a run, in which the producer of each task's input can be found."""

    def __init__(self, ranks: list[RankSpans]) -> None:
        self.ranks = ranks
        self._found: dict[_Key, tuple[RankSpans, TaskSpan]] = {}
        self._find()

    def _find(self) -> None:
        """Sort the tasks and index them by their keys, after times or tasks have changed."""
        for rank in self.ranks:
            rank.tasks.sort()
            for task in rank.tasks:
                self._found[_key(rank, task)] = rank, task

    def sender(self, rank: RankSpans, task: TaskSpan) -> tuple[RankSpans, TaskSpan] | None:
        """The rank and the task that produce a task's input; None if there is no such task, or it
        ran on the same rank."""
        stage = sending_stage(task.kind, task.stage)
        if stage is None:
            return None
        found = self._found.get(_key(rank, task._replace(stage=stage)))
        return found if found is not None and found[0] is not rank else None

    def align_clocks(self) -> Iterator[str]:
        """Put forward the clocks of ranks that seem to run tasks before their input, and set their
        `clock_offset_ns`; yields notes. Changes nothing if no shifts explain that."""
        slacks_ns: dict[Link, int] = {}
        for rank in self.ranks:
            for task in rank.tasks:
                if (found := self.sender(rank, task)) is None:
                    continue
                link = found[0].info.rank, rank.info.rank
                needed_ns = task.end_ns if rank.receives_inside else task.start_ns
                sender, sent = found
                sent_ns = sent.start_ns if sender.sends_inside else sent.end_ns
                slack_ns = needed_ns - sent_ns
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
        noted = [
            f"rank {rank} by {shift_ns / _US:.4g} us"
            for rank, shift_ns in shifts_ns.items()
            if shift_ns > _NOTED_SHIFT_NS
        ]
        if noted:
            yield (
                "clocks were put forward so that no task begins before its input is there: "
                f"{listed(noted)}"
            )
        for rank in self.ranks:
            shift_ns = shifts_ns[rank.info.rank]
            rank.info = replace(rank.info, clock_offset_ns=shift_ns)
            rank.shift(shift_ns)
        self._find()

    def trim_input_waits(self) -> None:
        """If spans include the wait for their input, move each task's start to the time at which
        its input was sent."""
        for rank in self.ranks:
            for index, task in enumerate(rank.tasks if rank.receives_inside else ()):
                if (found := self.sender(rank, task)) is not None:
                    start_ns = min(max(task.start_ns, found[1].end_ns), task.end_ns)
                    rank.tasks[index] = task._replace(start_ns=start_ns)
        self._find()

    def move_start_to_zero(self) -> None:
        """Shift all times so that the run begins at 0. Raises RrfpError if the run seems to last
        longer than a trace can represent."""
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
        """Yield each task that did not begin as soon as the rank was free in its step, after the
        time at which the rank became free: the entry into the schedule, or the end of the task
        before."""
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
    """The key of a rank's task in the run; it contains the replica, not the rank."""
    replica = rank.info.dp_rank, rank.info.tp_rank
    return _Key(replica, task.step, task.kind, task.stage, task.microbatch)


def listed(found: Sequence[object]) -> str:
    """Format the first 8 items for a note: `0, 1, 2, ...`."""
    return ", ".join(map(str, found[:_NUM_LISTED])) + (", ..." if found[_NUM_LISTED:] else "")
