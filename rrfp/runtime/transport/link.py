"""One end of a directed link as a protocol alone: calls and bytes in, bytes and events out.

No thread, lock, socket or clock is in here. Whoever drives an end (`driver.py` over a socket,
`memory.py` in virtual time) carries its bytes, passes the time in, and makes one call at a time.

Messages, reports, decisions and forecasts go from source to destination; credits and released slots
come back on the same connection; heartbeats and the farewell go both ways.

| state     | writes                            | reads | ends with                           |
|-----------|-----------------------------------|-------|-------------------------------------|
| open      | frames, heartbeats                | yes   | a close, the peer's farewell, loss  |
| draining  | what is queued, then the farewell | yes   | its farewell written, or as below   |
| lingering | nothing: its farewell is out      | yes   | the peer's farewell, loss, deadline |
| over      | `last_words`, once                | no    |                                     |

An end lingers because closing a socket with unread bytes can destroy those under way to the peer.
The peer's farewell makes an open end answer with its own and be over: a directed link has no use
for one end. A loss is told once, and never by an end that closes: it is nobody's concern then.

Credits: the destination owns the bound. It gives all of it when the link opens and one back for
each message consumed, some at a time; messages wait for credit in the source's queue.

Of a posted message (`rrfp.runtime.planes.plane`) only the frame travels here. The destination gives
out what is to be pulled, is told when it is here (`pulled`), and releases the slot. It says
farewell once nothing is being pulled, so that its source may then free the memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rrfp.errors import RrfpError
from rrfp.runtime.planes.plane import Posted, Pull
from rrfp.runtime.protocols import Event, Failed, Message, PeerLostError, PeerSilentError
from rrfp.runtime.transport.wire import (
    Frame,
    FrameError,
    FrameReader,
    Header,
    Purpose,
    encode_header,
)
from rrfp.trace.records import NS_PER_S, ReceiveRecord, SendRecord


@dataclass(frozen=True, slots=True)
class Released:
    """A slot of this rank's outbox is free again."""

    offset: int


Output = Event | SendRecord | ReceiveRecord | Pull | Released
"""What an end has to tell: to its rank's inbox, to its recorder, or to the link's data plane."""


class State(Enum):
    """Of one end; the table above says what each means."""

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


@dataclass(slots=True)
class Outbound:
    """A frame on its way out."""

    buffers: list[memoryview]
    """What of it is still to be written; tensors stay where they lie."""
    header: Header
    message: Message | Posted | None = None
    """The message that has left once this is written."""
    queued_ns: int = 0
    """When the message was queued."""
    start_ns: int | None = None
    """When its first byte was written; in a paced run, when its modelled time began."""


def bare(header: Header) -> Outbound:
    """A frame that is only a header."""
    return Outbound([memoryview(encode_header(header))], header)


class Link(ABC):
    """What the source's end and the destination's have in common.

    To write: `next_write`, carry as many of these bytes as can be carried, `wrote`, until nothing
    is left or nothing can be carried. To read: fill `next_read`, `received`. To wait: at most
    `patience_ns`, and not beyond `due_ns`; then `waited`, unless there is something to read.
    Any other call may fall between any two of these.
    """

    def __init__(self, rank: int, peer: int, options: LinkOptions, now_ns: int) -> None:
        self.peer = peer
        self.state = State.OPEN
        self._rank = rank
        self._options = options
        self._close_deadline_ns: int | None = None
        self._has_told_of_loss = False
        self._outbound: Outbound | None = None
        self._is_writing = False
        self._tried_ns = 0
        self._may_write = True
        """Whether its state is one that writes, and the peer still takes something."""
        self._last_write_ns = now_ns
        self._reader = FrameReader(options.max_message_bytes)
        self._has_peer_left = False
        self._last_words: list[memoryview] = []
        self._quiet_ns = 0
        self._asked_ns = now_ns
        self._patience_ns = 0

    # What the two ends do differently.

    @abstractmethod
    def _next_outbound(self, now_ns: int) -> Outbound | None:
        """The next frame of this end's own, if it has one that may be written."""

    @abstractmethod
    def _num_queued(self) -> int:
        """How many things wait to be written, credit or not."""

    @abstractmethod
    def _take(self, frame: Frame, now_ns: int) -> list[Output]:
        """Act on a frame that is neither a heartbeat nor a farewell."""

    @abstractmethod
    def _sent(self, outbound: Outbound, message: Message | Posted, now_ns: int) -> list[Output]:
        """A message was written whole."""

    @abstractmethod
    def _peer_left(self) -> list[Output]:
        """What the peer's farewell says to a rank that does not close the link itself."""

    @property
    def is_pulling(self) -> bool:
        """Whether a message is on its way out of the peer's outbox."""
        return False

    @property
    def has_peer_left(self) -> bool:
        """Whether the peer said farewell."""
        return self._has_peer_left

    @property
    def awaits_pulls_only(self) -> bool:
        """Whether the peer has left, and its last messages are still being pulled."""
        return self._has_peer_left and self.is_pulling

    @property
    def due_ns(self) -> int | None:
        """When the next frame may be written, where only that moment holds it back."""
        return None

    # Closing.

    def begin_close(self, deadline_ns: int, *, farewell: bool) -> None:
        """Drain, say farewell and be over by the deadline; without a farewell be over at once, and
        the peer takes this rank for lost."""
        if self._close_deadline_ns is None or not farewell:
            self._close_deadline_ns = deadline_ns
        if not farewell:
            self._end()
        elif self.state is State.OPEN:
            self._move_to(State.DRAINING)

    def fail(self, error: RrfpError) -> list[Output]:
        """The link broke."""
        is_over = self.state is State.OVER
        self._end()
        return [] if is_over else self._tell(error)

    def lose(self, what: str, kind: type[PeerLostError] = PeerLostError) -> list[Output]:
        """The peer is lost; `what` is what it did."""
        return self.fail(self._loss(what, kind))

    def last_words(self) -> list[memoryview]:
        """What an end that is over still writes, as far as the peer takes it at once: the farewell
        that answers the peer's."""
        words, self._last_words = self._last_words, []
        return words

    # Writing.

    def next_write(self, now_ns: int) -> list[memoryview]:
        """What is to be written now, of one frame; `wrote` or `write_failed` must follow unless it
        is empty."""
        assert not self._is_writing, "the write before has not ended"
        if self._close_deadline_ns is not None:
            self._end_if_late(now_ns)
        if not self._may_write:
            return []
        outbound = self._outbound
        if outbound is None:
            outbound = self._next_outbound(now_ns) or self._own_outbound(now_ns)
            if outbound is None:
                return []
            self._outbound = outbound
        self._is_writing = True
        self._tried_ns = now_ns
        return outbound.buffers

    def wrote(self, num_bytes: int, now_ns: int) -> list[Output]:
        """So many bytes of `next_write` are out; 0: the peer takes none now."""
        outbound = self._outbound
        assert outbound is not None
        self._is_writing = False
        outputs: list[Output] = []
        if num_bytes:
            self._last_write_ns = now_ns
            if outbound.start_ns is None:
                outbound.start_ns = self._tried_ns
            _drop_written(outbound.buffers, num_bytes)
            if not outbound.buffers:
                self._outbound = None
                if outbound.message is not None:
                    outputs = self._sent(outbound, outbound.message, now_ns)
                elif outbound.header.purpose is Purpose.FAREWELL and self.state is not State.OVER:
                    self._move_to(State.LINGERING)
        if self._has_peer_left:
            outputs += self._answer_farewell()
        return outputs

    def write_failed(self) -> list[Output]:
        """The peer takes nothing more. What it wrote before is still to be read: a farewell, or
        nothing."""
        self._is_writing = False
        self._may_write = False
        return self._answer_farewell()

    def _own_outbound(self, now_ns: int) -> Outbound | None:
        """What an end that has nothing else to write has to say for itself."""
        if self.state is State.DRAINING and self._num_queued() == 0:
            return bare(Header(Purpose.FAREWELL))
        if now_ns - self._last_write_ns >= self._options.heartbeat_ns:
            return bare(Header(Purpose.HEARTBEAT))
        return None

    # Reading.

    def next_read(self) -> memoryview:
        """Where the next bytes belong; memory for a message is given out once its header was
        checked (`FrameReader`)."""
        return self._reader.missing

    def received(self, num_bytes: int, now_ns: int) -> list[Output] | None:
        """So many bytes of `next_read` have come; 0: the peer closed its connection. Gives None
        while more of a frame must come first."""
        if self.state is State.OVER or self._has_peer_left:
            return []
        if num_bytes == 0:
            return self.lose("closed its connection without a farewell")
        self._quiet_ns = 0
        try:
            frame = self._reader.fill(num_bytes, now_ns)
            if frame is None:
                return None
            purpose = frame.header.purpose
            if purpose is Purpose.HEARTBEAT:
                return []
            if purpose is Purpose.FAREWELL:
                self._has_peer_left = True
                return self._answer_farewell()
            return self._take(frame, now_ns)
        except FrameError as error:
            return self.fail(
                RrfpError(
                    f"what rank {self.peer} sent to rank {self._rank} cannot be read: {error};"
                    " see that all ranks run the same version of rrfp"
                )
            )

    def _answer_farewell(self) -> list[Output]:
        """Once the peer has left so does this end, unless something was still to go to the peer.
        A write under way ends first: its frame may be the last."""
        if not self._has_peer_left or self._is_writing or self.state is State.OVER:
            return []
        if self.is_pulling:
            return []
        num_left = self._num_queued()
        if self._outbound is not None and self._outbound.header.task is not None:
            num_left += 1
        if num_left:
            return self.lose(f"said farewell while {num_left} frames waited for it")
        if self._may_write and self._outbound is None:
            self._last_words = bare(Header(Purpose.FAREWELL)).buffers
        self._end()
        return [] if self._is_closing else self._peer_left()

    # Time.

    def patience_ns(self, now_ns: int) -> int:
        """How long to wait for the peer at most, once `next_write` has nothing or the peer takes
        nothing.

        No longer than a heartbeat: time in which this very process was stopped is not the peer's,
        and of any wait no more than its patience counts as silence.
        """
        patience_ns = self._options.heartbeat_ns
        if self._may_write and self._outbound is None:
            patience_ns -= now_ns - self._last_write_ns
        patience_ns = min(patience_ns, self._options.silence_ns - self._quiet_ns)
        if self._close_deadline_ns is not None:
            patience_ns = min(patience_ns, self._close_deadline_ns - now_ns)
        self._asked_ns = now_ns
        self._patience_ns = max(0, patience_ns)
        return self._patience_ns

    def waited(self, now_ns: int) -> list[Output]:
        """The wait is over, and there is nothing to read."""
        self._end_if_late(now_ns)
        if self.state is State.OVER:
            return []
        self._quiet_ns += min(now_ns - self._asked_ns, self._patience_ns)
        if self._quiet_ns < self._options.silence_ns:
            return []
        silence_s = self._options.silence_ns / NS_PER_S
        return self.lose(f"was silent for {silence_s:g} s", PeerSilentError)

    def _end_if_late(self, now_ns: int) -> None:
        if self._close_deadline_ns is not None and now_ns >= self._close_deadline_ns:
            self._end()

    # Within.

    @property
    def _is_closing(self) -> bool:
        return self._close_deadline_ns is not None

    def _move_to(self, state: State) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} does not become {state}"
        self.state = state
        if state is not State.DRAINING:
            self._may_write = False

    def _end(self) -> None:
        if self.state is not State.OVER:
            self._move_to(State.OVER)

    def _loss(self, what: str, kind: type[PeerLostError] = PeerLostError) -> PeerLostError:
        return kind(
            f"rank {self.peer} {what} (seen by rank {self._rank}); see its own output for the cause"
        )

    def _tell(self, error: RrfpError) -> list[Output]:
        if self._is_closing or self._has_told_of_loss:
            return []
        self._has_told_of_loss = True
        return [Failed(error)]


def _drop_written(buffers: list[memoryview], num_bytes: int) -> None:
    """Cut off the first so many bytes."""
    num_whole = 0
    for buffer in buffers:
        if num_bytes < buffer.nbytes:
            break
        num_bytes -= buffer.nbytes
        num_whole += 1
    del buffers[:num_whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]
