"""What another program's trace tells of a pipeline, before it becomes a recording."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord


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
