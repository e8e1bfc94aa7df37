"""What a trace tells of a rank whose tasks it times but does not number.

A **call** is one run of a forward or a backward. Its place in the pipeline, its microbatch and its
step follow from the order of the calls (`rrfp.interchange.unnamed.numbering`).
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp.schedule.tasks import Kind


class Call(NamedTuple):
    """One run of a forward or a backward."""

    launched_ns: int
    """When the host began it; its work may run later, on a GPU."""
    start_ns: int
    end_ns: int
    kind: Kind
    pair: int | None = None
    """A number that a forward shares with its backward; None if the trace does not tell."""


class Extent(NamedTuple):
    """From when to when."""

    start_ns: int
    end_ns: int


class Transfer(NamedTuple):
    """Time in which a rank sent or received."""

    start_ns: int
    end_ns: int
    is_receive: bool
    """Whether it belongs to the next task rather than the previous one."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that share a rank's pipeline and its tensors, each in the order of their places;
    empty where the trace does not tell."""

    pipeline: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()


@dataclass(slots=True)
class UnnamedRank:
    """One rank, on its own clock."""

    number: int
    host: str = "unknown"
    pid: int = 0
    groups: Groups = field(default_factory=Groups)
    calls: list[Call] = field(default_factory=list)
    """In the order of their launches."""
    transfers: list[Transfer] = field(default_factory=list)
    syncs: list[Extent] = field(default_factory=list)
    """When it reduced gradients."""
    schedules: list[Extent] = field(default_factory=list)
    """The calls of the schedule, by the host's time; empty if the trace does not tell."""
    step_numbers: list[int] = field(default_factory=list)
    """Of `schedules`; empty where they are counted."""


_CALLS = {
    "forward_step": Kind.F,
    "backward_step": Kind.B,
    "forward-compute": Kind.F,
    "backward-compute": Kind.B,
    "megatron.microbatch.forward": Kind.F,
    "megatron.microbatch.backward": Kind.B,
}
"""How Megatron calls them: its functions, its timers and its OpenTelemetry spans."""
_PATH_OF_MEGATRON = re.compile(r"megatron\.core\.(?:\w+\.)*")
_TRANSFER = re.compile(
    r"(?:megatron\.p2p\.|P2PCommunicator\.)?"
    r"(?:(?:send|recv)_(?:forward|backward)(?:_(?:send|recv)_(?:forward|backward))*"
    r"|(?:forward|backward)-(?:send|recv)(?:-(?:forward|backward)-(?:send|recv))*)"
)


def kind_of_call(name: str) -> Kind | None:
    """The kind of task that a range of this name holds; None for any other range."""
    return _CALLS.get(_PATH_OF_MEGATRON.sub("", name, count=1), _CALLS.get(name))


def is_transfer(name: str) -> bool:
    """Whether a range of this name holds a send or a receive of Megatron's."""
    return _TRANSFER.fullmatch(_PATH_OF_MEGATRON.sub("", name, count=1)) is not None
