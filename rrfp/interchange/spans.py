"""What another program's trace tells of a pipeline, before it becomes a recording."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeVar

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
    """One rank, on its own clock."""

    info: RankInfo
    tasks: list[TaskSpan] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    """The waits whose cause the trace tells."""
    transfers: list[TransferSpan] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    tells_waits: bool = False
    """Whether `waits` are complete, so that none need be derived."""
    receives_inside: bool = False
    """Whether a task's span may begin before its input has come, and holds the wait for it."""
    sends_inside: bool = False
    """Whether a task's span may end after its output has left."""

    def schedules(self) -> list[PhaseRecord]:
        """The schedule of each step, from the rank's first task, wait or transfer to its last."""
        extents: dict[int, tuple[int, int]] = {}
        for span in chain[TaskSpan | WaitRecord | TransferSpan](
            self.tasks, self.waits, self.transfers
        ):
            first_ns, last_ns = extents.get(span.step, (span.start_ns, span.end_ns))
            extents[span.step] = min(first_ns, span.start_ns), max(last_ns, span.end_ns)
        return [PhaseRecord(*extent, step, Phase.SCHEDULE) for step, extent in extents.items()]

    def shift(self, by_ns: int) -> None:
        """Put the rank's clock forward by so much."""
        self.tasks = [_shifted(span, by_ns) for span in self.tasks]
        self.waits = [_shifted(span, by_ns) for span in self.waits]
        self.transfers = [_shifted(span, by_ns) for span in self.transfers]
        self.phases = [_shifted(span, by_ns) for span in self.phases]

    def renumber(self, steps: Mapping[int, int]) -> None:
        """Give each of these steps its new number; the others keep theirs."""
        self.tasks = [_renumbered(span, steps) for span in self.tasks]
        self.waits = [_renumbered(span, steps) for span in self.waits]
        self.transfers = [_renumbered(span, steps) for span in self.transfers]
        self.phases = [_renumbered(span, steps) for span in self.phases]


_Span = TypeVar("_Span", TaskSpan, WaitRecord, TransferSpan, PhaseRecord)


def _shifted(span: _Span, by_ns: int) -> _Span:
    return span._replace(start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


def _renumbered(span: _Span, steps: Mapping[int, int]) -> _Span:
    return span._replace(step=steps.get(span.step, span.step))


@dataclass(frozen=True, slots=True)
class Source:
    """Where spans came from."""

    name: str
    num_files: int
    device: str
    """`cpu`, or `cuda` where the times are those of a GPU."""
    transfers_block: bool
    """Whether a rank does nothing else while it sends and receives, as in Megatron's schedules."""
    world_size: int | None
    """How many ranks the run had; None if its trace does not tell."""
    notes: tuple[str, ...] = ()
    """What the user should know of how it was read, a sentence each."""


# Clocks put right by causality: no task begins before the task that gives it its input ends.


Link = tuple[int, int]
"""From one rank to another."""


def least_shifts(slacks_ns: Mapping[Link, int], ranks: list[int]) -> dict[int, int] | None:
    """The least to add to each rank's clock, from 0 on, so that no message comes before it is sent;
    None if no shift achieves that.

    `slacks_ns` is, by link, the least time that a message seems to have taken.
    """
    shifts_ns = dict.fromkeys(ranks, 0)
    for _ in ranks:
        is_settled = True
        for (source, destination), slack_ns in slacks_ns.items():
            least_ns = shifts_ns[source] - slack_ns
            if shifts_ns[destination] < least_ns:
                shifts_ns[destination] = least_ns
                is_settled = False
        if is_settled:
            return shifts_ns
    return None


# The spans of all ranks of a run: which task gives which its input, by clocks put right.


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
