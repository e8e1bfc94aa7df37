"""The states of one end of a link, and of its connection.

| state     | writes                            | reads | ends with                           |
|-----------|-----------------------------------|-------|-------------------------------------|
| open      | frames, heartbeats                | yes   | a close, the peer's farewell, loss  |
| draining  | what is queued, then the farewell | yes   | its farewell written, or as below   |
| lingering | nothing: its farewell is out      | yes   | the peer's farewell, loss, deadline |
| over      | `last_words`, once                | no    |                                     |

An end lingers because closing a socket with unread bytes can destroy those under way to the peer.
The peer's farewell makes an open end answer with its own and be over: a directed link has no use
for one end. A loss is told once, and never by an end that closes: it is nobody's concern then.

A link outlives its connections. In each state but the last an end's connection is one of these:

| connection | writes        | reads         | becomes                                            |
|------------|---------------|---------------|----------------------------------------------------|
| whole      | as above      | as above      | broken: its end without a farewell, an error, a    |
|            |               |               | garbled frame; between hosts also half the silence |
| broken     | nothing       | nothing       | resuming, when another one is attached             |
| resuming   | its own count | the peer's    | whole, when it knows the peer's count; broken      |

The count is that of the frames that an end has received (`sending.py`): from there on the
other one writes again what it had written. All the while silence goes on, and after `silence_ns` of
it the link is lost. It is lost, too, when its connections break one after the other and carry
nothing, and when the peer is gone, which the driver finds out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rrfp.runtime.planes.plane import Pull
from rrfp.runtime.protocols import Event
from rrfp.trace.records import ReceiveRecord, SendRecord


@dataclass(frozen=True, slots=True)
class Released:
    """A slot of this rank's outbox is free again."""

    offset: int


Output = Event | SendRecord | ReceiveRecord | Pull | Released
"""What an end has to tell: to its rank's inbox, to its recorder, or to the link's data plane."""


class State(Enum):
    """Of one end; the first table says what each means."""

    OPEN = "open"
    DRAINING = "draining"
    LINGERING = "lingering"
    OVER = "over"


NEXT_STATES: Mapping[State, frozenset[State]] = {
    State.OPEN: frozenset({State.DRAINING, State.OVER}),
    State.DRAINING: frozenset({State.LINGERING, State.OVER}),
    State.LINGERING: frozenset({State.OVER}),
    State.OVER: frozenset(),
}
"""The moves that are legal."""


class Connection(Enum):
    """Of one end; the second table says what each means."""

    WHOLE = "whole"
    BROKEN = "broken"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What the ends of all links of a rank have in common."""

    heartbeat_ns: int
    """An end that has written nothing for so long writes a heartbeat."""
    silence_ns: int
    """A peer that was not heard for so long is lost."""
    max_message_bytes: int
    """The largest message; the same on all ranks."""
    keeps_records: bool = False
    """Whether messages are recorded."""
