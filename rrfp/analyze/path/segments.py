"""The parts of a chain, from the end of a step back to its start."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LINK = "link"


class Segment(NamedTuple):
    """A part of the chain that one rank owns."""

    start_ns: int
    end_ns: int
    pp_rank: int
    kind: str
    """F, B or W; `link`; or the cause of a wait."""
    sender: int | None = None
    """The pipeline rank that sent what is on a `link`; `pp_rank` takes it."""


class Wait(NamedTuple):
    """A wait of a rank."""

    start_ns: int
    end_ns: int
    cause: str


def disjoint(waits: Iterable[Wait]) -> list[Wait]:
    """The waits in order of time, each cut to what lies after the earlier ones."""
    found: list[Wait] = []
    for wait in sorted(waits):
        begin_ns = max(wait.start_ns, found[-1].end_ns) if found else wait.start_ns
        if begin_ns < wait.end_ns:
            found.append(wait._replace(start_ns=begin_ns))
    return found


def idle(
    pp_rank: int, waits: list[Wait], start_ns: int, end_ns: int, rest: str
) -> Iterator[Segment]:
    """Why a rank ran nothing, from the end back: its disjoint waits, and `rest` for what they leave
    unexplained."""
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
