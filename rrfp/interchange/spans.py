"""What another program's trace tells of a pipeline, before it is made a recording."""

from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp.schedule.tasks import Kind
from rrfp.trace.records import PhaseRecord, RankInfo, WaitRecord


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
    """Those whose cause the trace tells."""
    transfers: list[TransferSpan] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    tells_waits: bool = False
    """Whether `waits` are all that there were: none is to be derived."""
    receives_inside: bool = False
    """Whether a task's span begins before its input is there, and holds the wait for it."""
    sends_inside: bool = False
    """Whether a task's span may end after its output has left."""


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
    """How many ranks the run had; None where its trace does not tell."""
    notes: tuple[str, ...] = ()
    """What the reader should know of how it was read, a sentence each."""
