"""One end of a directed link as a protocol alone: calls and bytes in, bytes and events out.

No thread, lock, socket or clock is in here. Whoever drives an end (`driver.py` over sockets,
`memory.py` in virtual time) carries its bytes, passes the time in, and makes one call at a time.
The tables of its states come first.

Messages, reports, decisions and forecasts go from source to destination; credits and released slots
come back on the same connection; heartbeats and the farewell go both ways.

Credits: the destination owns the bound. It gives all of it when the link opens and one back for
each message consumed, some at a time; messages wait for credit in the source's queue.

Of a posted message (`rrfp.runtime.planes.plane`) only the frame travels here. The destination gives
out what is to be pulled, is told when it is here (`pulled`), and releases the slot. It says
farewell once nothing is being pulled, so that its source may then free the memory.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.link.wire import (
    UNCOUNTED,
    Frame,
    FrameError,
    FrameReader,
    GarbledError,
    Header,
    Purpose,
    encode_header,
)
from rrfp.runtime.planes.codec import Form
from rrfp.runtime.planes.plane import Posted, Pull
from rrfp.runtime.protocols import Event, Failed, Message, PeerLostError, PeerSilentError
from rrfp.trace.outcome import Culprit, FoundBy
from rrfp.trace.records import NS_PER_S, ReceiveRecord, SendRecord

# How a link is told to people: by the rank at fault, or by both where the link is.


@dataclass(frozen=True, slots=True)
class Far:
    """What a link between two hosts has of its own."""

    own_host: str
    peer_host: str
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ranks of a link, as one of them sees it."""

    own: int
    peer: int
    is_source: bool
    """Whether it sends."""
    far: Far | None = None
    """None: within a host."""

    @property
    def checks_tensors(self) -> bool:
        """Whether nothing but a checksum vouches for the tensors on its sockets."""
        return self.far is not None and not self.far.is_encrypted

    def __str__(self) -> str:
        own, peer = f"rank {self.own}", f"rank {self.peer}"
        if self.far is not None:
            own, peer = f"{own} ({self.far.own_host})", f"{peer} ({self.far.peer_host})"
        source, destination = (own, peer) if self.is_source else (peer, own)
        return f"the link from {source} to {destination}"

    @property
    def culprit(self) -> Culprit:
        """The link, found by one of its ends."""
        ranks = (self.own, self.peer) if self.is_source else (self.peer, self.own)
        return Culprit(FoundBy.LINK, link=ranks)

    @property
    def lost_culprit(self) -> Culprit:
        """The peer, found over the link."""
        return Culprit(FoundBy.LINK, rank=self.peer)

    def lost(self, what: str) -> str:
        """The peer did this, and is lost."""
        return (
            f"rank {self.peer} {what} (seen by rank {self.own}); see its own output for the cause"
        )

    def down(self, silence_s: float, why: str) -> str:
        """Nothing has come for so long, and nobody knows whose fault it is."""
        where = "" if self.far is None else f"whether {self.far.peer_host} can be reached, and "
        return (
            f"{self} has been down for {silence_s:g} s ({why}); see {where}the output of rank"
            f" {self.peer} for the cause"
        )

    def useless(self, num_connections: int, why: str) -> str:
        """Connection after connection broke before it carried anything."""
        return (
            f"{self} broke {num_connections} times in a row and carried nothing between (the last"
            f" time rank {self.peer} {why}); see what lies between the two, and the output of rank"
            f" {self.peer}"
        )

    def unreadable(self, why: str) -> str:
        """The peer does not speak this protocol."""
        return (
            f"what rank {self.peer} sent to rank {self.own} cannot be read: {why}; see that all"
            " ranks run the same version of rrfp"
        )


# For how long one end of a link has heard nothing.
#
# Time in which this very process was stopped is not the peer's silence: of each wait no more counts
# than what the end was ready to wait.


TRIES = 10
"""Of the silence after which a link is lost, this part may go to one attempt to connect again, and
to its first frame after that."""


class Quiet:
    """What the waits of one end come to since it has heard something."""

    def __init__(self, now_ns: int) -> None:
        self.total_ns = 0
        self.here_ns = 0
        """Over this connection."""
        self._asked_ns = now_ns
        self._patience_ns = 0

    def ask(self, now_ns: int, patience_ns: int) -> int:
        """A wait of at most so long begins; gives its length."""
        self._asked_ns, self._patience_ns = now_ns, patience_ns
        return patience_ns

    def answer(self, now_ns: int) -> None:
        """The wait is over, and nothing was heard."""
        quiet_ns = min(now_ns - self._asked_ns, self._patience_ns)
        self._asked_ns = now_ns
        self.total_ns += quiet_ns
        self.here_ns += quiet_ns

    def end(self) -> None:
        """Something was heard."""
        self.total_ns = self.here_ns = 0

    def begin_connection(self) -> None:
        """It waits over another connection from now on."""
        self.here_ns = 0


# The states of one end of a link, and of its connection.
#
# | state     | writes                            | reads | ends with                           |
# |-----------|-----------------------------------|-------|-------------------------------------|
# | open      | frames, heartbeats                | yes   | a close, the peer's farewell, loss  |
# | draining  | what is queued, then the farewell | yes   | its farewell written, or as below   |
# | lingering | nothing: its farewell is out      | yes   | the peer's farewell, loss, deadline |
# | over      | `last_words`, once                | no    |                                     |
#
# An end lingers because closing a socket with unread bytes can destroy those under way to the peer.
# The peer's farewell makes an open end answer with its own and be over: a directed link has no use
# for one end. A loss is told once, and never by an end that closes: it is nobody's concern then.
#
# A link outlives its connections. In each state but the last an end's connection is one of these:
#
# | connection | writes        | reads         | becomes
# | |------------|---------------|---------------|--------------------------------------------------
# --| | whole      | as above      | as above      | broken: its end without a farewell, an error, a
# | |            |               |               | garbled frame; between hosts also half the
# silence | | broken     | nothing       | nothing       | resuming, when another one is attached
# | | resuming   | its own count | the peer's    | whole, when it knows the peer's count; broken
# |
#
# The count is that of the frames that an end has received (`sending.py`): from there on the other
# one writes again what it had written. All the while silence goes on, and after `silence_ns` of it
# the link is lost. It is lost, too, when its connections break one after the other and carry
# nothing, and when the peer is gone, which the driver finds out.


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


# What one end has written and its peer has not acknowledged: kept, to be written again over the
# next connection.
#
# Both ends count the frames that mean something, each way of the link by itself and over all of its
# connections. Every frame tells how many of them its sender has received whole; on a new connection
# that is the first thing told (`Purpose.RESUME`), and each end goes on from there. A connection
# keeps the order of its frames, so nothing is lost or doubled.
#
# Who has heard much says so without being asked, so that little is kept: what is under way, and
# less than `CONFIRM_FRAMES` frames and `CONFIRM_BYTES` of tensors.


CONFIRM_FRAMES = 64
CONFIRM_BYTES = 4 * 2**20


@dataclass(slots=True, eq=False)
class Outbound:
    """A frame on its way out, perhaps for the second time."""

    header: Header
    tensors: Sequence[torch.Tensor | Form | None] = ()
    payload: Sequence[memoryview] = ()
    """The bytes of its tensors, which stay where they lie."""
    checksum: int = 0
    """Of these, where they are checked."""
    message: Message | Posted | None = None
    """The message that has left once this is written."""
    queued_ns: int = 0
    """When the message was queued."""
    start_ns: int | None = None
    """When its first byte was written; in a paced run, when its modelled time began."""
    is_out: bool = False
    """It was written whole, or arrived whole."""
    buffers: list[memoryview] = field(default_factory=list)
    """What of it is still to be written over this connection."""

    def begin(self, acknowledged: int) -> None:
        """Lay out its bytes, with how many frames its sender has received."""
        data = encode_header(self.header, self.tensors, acknowledged, self.checksum)
        self.buffers = [memoryview(data), *self.payload]

    def drop_written(self, num_bytes: int) -> None:
        """Cut off the first so many bytes."""
        buffers, num_whole = self.buffers, 0
        for buffer in buffers:
            if num_bytes < buffer.nbytes:
                break
            num_bytes -= buffer.nbytes
            num_whole += 1
        del buffers[:num_whole]
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]


class Sending:
    """What one end writes: the frame under way, and all counted ones that its peer has not
    acknowledged, in order."""

    def __init__(self, now_ns: int) -> None:
        self.outbound: Outbound | None = None
        """Of which something is still to be written over this connection."""
        self.is_writing = False
        """Whether a write has begun and not ended."""
        self.is_taken = True
        """Whether the peer still takes something over this connection."""
        self.last_write_ns = now_ns
        self._tried_ns = now_ns
        self._owes_resume = False
        self._kept: deque[Outbound] = deque()
        self._num_acknowledged = 0
        self._num_again = 0
        """How many of the kept, the last ones, are still to be written again."""

    def again(self) -> Outbound | None:
        """What a new connection begins with, of which there is nothing on the first: the count,
        then what was written before."""
        if self._owes_resume:
            self._owes_resume = False
            return Outbound(Header(Purpose.RESUME))
        if self._num_again:
            self._num_again -= 1
            return self._kept[-1 - self._num_again]
        return None

    def keep(self, outbound: Outbound) -> None:
        """A frame is about to be written for the first time: keep it, if it is counted."""
        if outbound.header.purpose not in UNCOUNTED:
            assert not self._num_again, "what was written before goes first"
            self._kept.append(outbound)

    def attempt(self, now_ns: int) -> list[memoryview]:
        """What of the frame under way is to be written now."""
        assert self.outbound is not None
        self.is_writing = True
        self._tried_ns = now_ns
        return self.outbound.buffers

    def wrote(self, num_bytes: int, now_ns: int) -> Outbound | None:
        """So many bytes of it were written; gives the frame if it is out now."""
        self.is_writing = False
        outbound = self.outbound
        if num_bytes == 0 or outbound is None:
            return None
        self.last_write_ns = now_ns
        if outbound.start_ns is None:
            outbound.start_ns = self._tried_ns
        outbound.drop_written(num_bytes)
        if outbound.buffers:
            return None
        self.outbound = None
        return outbound

    def acknowledge(self, num_frames: int, *, resumes: bool) -> list[Outbound]:
        """The peer has so many in all: those of which this is news. When it `resumes`, over a new
        connection, all others are to be written again. Raises FrameError for what cannot be."""
        num_under_way = len(self._kept) - self._num_again
        num_new = num_frames - self._num_acknowledged
        if not 0 <= num_new <= num_under_way:
            raise FrameError(
                f"{num_frames} frames were acknowledged after {self._num_acknowledged}, with"
                f" {num_under_way} under way"
            )
        self._num_acknowledged = num_frames
        acknowledged = [self._kept.popleft() for _ in range(num_new)]
        for outbound in acknowledged:
            if outbound.start_ns is None:
                # The peer has told before whoever wrote it.
                outbound.start_ns = self._tried_ns
        if resumes:
            self._num_again = len(self._kept)
        return acknowledged

    def break_off(self) -> None:
        """The connection is broken: what is half written is kept."""
        self.outbound = None
        self._owes_resume = False
        self._num_again = 0

    def attach(self) -> None:
        """There is another connection."""
        self.is_taken = self._owes_resume = True

    @property
    def is_busy(self) -> bool:
        """Whether something that was begun is still to be written over this connection."""
        return self.outbound is not None or self._num_again > 0 or self._owes_resume

    @property
    def num_tasks(self) -> int:
        """How many frames that concern a task were begun and are still to be written."""
        left = list(self._kept)[len(self._kept) - self._num_again :]
        if self.outbound is not None:
            left.append(self.outbound)
        return sum(each.header.task is not None for each in left)


class Heard:
    """The counted frames that one end has received, and what of them it has told."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.confirm_bytes = CONFIRM_BYTES
        """Of tensors, after which it is much."""
        self._num_confirmed = 0
        self._unconfirmed_bytes = 0

    def count(self, frame: Frame) -> None:
        self.num_frames += 1
        if frame.tensors:
            self._unconfirmed_bytes += frame.num_bytes

    def confirm(self) -> int:
        """How many there are, to be told now."""
        self._num_confirmed, self._unconfirmed_bytes = self.num_frames, 0
        return self.num_frames

    @property
    def is_much(self) -> bool:
        """Whether to tell, although there is nothing else to say."""
        num_frames = self.num_frames - self._num_confirmed
        return num_frames >= CONFIRM_FRAMES or self._unconfirmed_bytes >= self.confirm_bytes


MOST_USELESS = 10
"""So many connections in a row may break without a frame before the link is lost."""


class Link(ABC):
    """What the source's end and the destination's have in common.

    To write: `next_write`, carry as many of these bytes as can be carried, `wrote`, until nothing
    is left or nothing can be carried. To read: fill `next_read`, `received`. To wait: at most
    `patience_ns`, and not beyond `due_ns`; then `waited`, unless there is something to read.
    While `is_broken`: no write or read; `attach` when there is another connection.
    Any other call may fall between any two of these.
    """

    is_source: ClassVar[bool]

    def __init__(
        self, rank: int, peer: int, options: LinkOptions, now_ns: int, far: Far | None = None
    ) -> None:
        self.peer = peer
        self.state = State.OPEN
        self.connection = Connection.WHOLE
        self.ends = Ends(rank, peer, self.is_source, far)
        self._options = options
        self._close_deadline_ns: int | None = None
        self._has_told_of_loss = False
        self._sending = Sending(now_ns)
        self._last_words: list[memoryview] = []
        self._reader = self._new_reader()
        self.has_peer_left = False
        """It said farewell."""
        self._heard = Heard()
        self.num_useless = 0
        """Connections in a row that have broken and carried nothing."""
        self._why_broken = self._why_down = ""
        self._quiet = Quiet(now_ns)

    def _new_reader(self) -> FrameReader:
        return FrameReader(self._options.max_message_bytes, checks_tensors=self.ends.checks_tensors)

    # What the two ends do differently.

    @abstractmethod
    def _next_outbound(self, now_ns: int) -> Outbound | None:
        """The next frame of this end's own, if it has one that may be written."""

    @abstractmethod
    def _num_queued(self) -> int:
        """How many things wait to be written for the first time, credit or not."""

    @abstractmethod
    def _take(self, frame: Frame, now_ns: int) -> list[Output]:
        """Act on a frame that is neither a heartbeat nor a farewell."""

    @abstractmethod
    def _sent(self, outbound: Outbound, now_ns: int) -> list[Output]:
        """A frame was written whole; told once."""

    @abstractmethod
    def _acknowledged(self, outbound: Outbound) -> list[Output]:
        """The peer has a frame, which is not kept any more."""

    @abstractmethod
    def _peer_left(self) -> list[Output]:
        """What the peer's farewell says to a rank that does not close the link itself."""

    @property
    def is_pulling(self) -> bool:
        """Whether a message is on its way out of the peer's outbox."""
        return False

    @property
    def awaits_pulls_only(self) -> bool:
        """Whether the peer has left, and its last messages are still being pulled."""
        return self.has_peer_left and self.is_pulling

    @property
    def is_broken(self) -> bool:
        """Whether it needs another connection."""
        return self.connection is Connection.BROKEN and self.state is not State.OVER

    @property
    def has_said_all(self) -> bool:
        """Whether nothing more will be written over this connection."""
        is_last = self.state is State.LINGERING and self.connection is Connection.WHOLE
        return is_last and not self._sending.is_busy

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
        """The link is lost."""
        is_over = self.state is State.OVER
        self._end()
        return [] if is_over else self._tell(error)

    def lose(self, what: str, kind: type[PeerLostError] = PeerLostError) -> list[Output]:
        """The peer is lost; `what` is what it did."""
        return self.fail(kind(self.ends.lost(what), self.ends.lost_culprit))

    def last_words(self) -> list[memoryview]:
        """What an end that is over still writes, as far as the peer takes it at once: the farewell
        that answers the peer's."""
        words, self._last_words = self._last_words, []
        return words

    def parting_words(self) -> bytes:
        """What an end that is over says to a peer that connects again, for it has not heard that
        its farewell was answered; empty where it was not."""
        if not self.has_peer_left:
            return b""
        resume = encode_header(Header(Purpose.RESUME), acknowledged=self._heard.num_frames)
        return resume + encode_header(Header(Purpose.FAREWELL), acknowledged=self._heard.num_frames)

    # Breaking.

    def break_off(self, what: str) -> list[Output]:
        """The connection serves no more; `what` is what the peer did."""
        if self.state is State.OVER or self.has_peer_left or self.is_broken:
            return []
        self.connection = Connection.BROKEN
        self._sending.break_off()
        self._why_broken, self._why_down = what, f"rank {self.peer} {what}"
        self.num_useless += 1
        if self.num_useless <= MOST_USELESS:
            return []
        return self.fail(PeerLostError(self.ends.useless(MOST_USELESS, what), self.ends.culprit))

    def attach(self) -> list[Output]:
        """Another connection takes the place of the broken one; no write is under way."""
        assert not self._sending.is_writing
        if self.state is State.OVER:
            return []
        self.connection = Connection.RESUMING
        self._reader = self._new_reader()
        self._sending.attach()
        self._quiet.begin_connection()
        return []

    def could_not_attach(self, why: str, now_ns: int) -> list[Output]:
        """The wait is over, and there is no other connection yet."""
        self._why_down = why
        return self.waited(now_ns)

    def lose_gone(self) -> list[Output]:
        """The connection is broken because the peer is gone."""
        return self.lose(self._why_broken)

    # Writing.

    def next_write(self, now_ns: int) -> list[memoryview]:
        """What is to be written now, of one frame; `wrote` or `write_failed` must follow unless it
        is empty."""
        sending = self._sending
        assert not sending.is_writing, "the write before has not ended"
        if self._close_deadline_ns is not None:
            self._end_if_late(now_ns)
        if self.state is State.OVER or not sending.is_taken:
            return []
        if sending.outbound is None:
            outbound = sending.again() or self._first(now_ns)
            if outbound is None:
                return []
            outbound.begin(self._heard.confirm())
            sending.outbound = outbound
        return sending.attempt(now_ns)

    def _first(self, now_ns: int) -> Outbound | None:
        """The next frame that was not written before."""
        if self.connection is not Connection.WHOLE or self.state is State.LINGERING:
            return None
        outbound = self._next_outbound(now_ns) or self._own_outbound(now_ns)
        if outbound is not None:
            self._sending.keep(outbound)
        return outbound

    def wrote(self, num_bytes: int, now_ns: int) -> list[Output]:
        """So many bytes of `next_write` are out; 0: the peer takes none now."""
        outbound = self._sending.wrote(num_bytes, now_ns)
        outputs = [] if outbound is None else self._is_out(outbound, now_ns)
        if self.has_peer_left:
            outputs += self._answer_farewell()
        return outputs

    def _is_out(self, outbound: Outbound, now_ns: int) -> list[Output]:
        """A frame was written whole, or has arrived."""
        if outbound.is_out:
            return []
        outbound.is_out = True
        if outbound.header.purpose is Purpose.FAREWELL and self.state is State.DRAINING:
            self._move_to(State.LINGERING)
        return self._sent(outbound, now_ns)

    def write_failed(self) -> list[Output]:
        """The peer takes nothing more. What it wrote before is still to be read: a farewell, or
        nothing."""
        self._sending.is_writing = self._sending.is_taken = False
        return self._answer_farewell()

    def _own_outbound(self, now_ns: int) -> Outbound | None:
        """What an end that has nothing else to write has to say for itself."""
        if self.state is State.DRAINING and self._num_queued() == 0:
            return Outbound(Header(Purpose.FAREWELL))
        quiet_ns = now_ns - self._sending.last_write_ns
        if quiet_ns >= self._options.heartbeat_ns or self._heard.is_much:
            return Outbound(Header(Purpose.HEARTBEAT))
        return None

    # Reading.

    def next_read(self) -> memoryview:
        """Where the next bytes belong; memory for a message is given out once its header was
        checked (`FrameReader`)."""
        return self._reader.missing

    def received(self, num_bytes: int, now_ns: int) -> list[Output] | None:
        """So many bytes of `next_read` have come; 0: the peer closed its connection. Gives None
        while more of a frame must come first."""
        if self.state is State.OVER or self.has_peer_left or self.is_broken:
            return []
        if num_bytes == 0:
            return self.break_off("closed its connection without a farewell")
        self._quiet.end()
        try:
            frame = self._reader.fill(num_bytes, now_ns)
            return None if frame is None else self._hear(frame, now_ns)
        except GarbledError as error:
            return self.break_off(f"sent what came garbled ({error})")
        except FrameError as error:
            return self.fail(RrfpError(self.ends.unreadable(str(error))))

    def _hear(self, frame: Frame, now_ns: int) -> list[Output]:
        purpose, is_resuming = frame.header.purpose, self.connection is Connection.RESUMING
        if (purpose is Purpose.RESUME) is not is_resuming:
            raise FrameError(f"a {purpose.name.lower()} came where it does not belong")
        outputs: list[Output] = []
        for outbound in self._sending.acknowledge(frame.acknowledged, resumes=is_resuming):
            outputs += self._is_out(outbound, now_ns)
            outputs += self._acknowledged(outbound)
        if is_resuming:
            self.connection = Connection.WHOLE
            return outputs
        self.num_useless = 0
        if purpose is Purpose.HEARTBEAT:
            return outputs
        self._heard.count(frame)
        if purpose is Purpose.FAREWELL:
            self.has_peer_left = True
            return outputs + self._answer_farewell()
        return outputs + self._take(frame, now_ns)

    def _answer_farewell(self) -> list[Output]:
        """Once the peer has left so does this end, unless something was still to go to the peer.
        A write under way ends first: its frame may be the last."""
        if not self.has_peer_left or self._sending.is_writing or self.state is State.OVER:
            return []
        if self.is_pulling:
            return []
        num_left = self._num_queued() + self._sending.num_tasks
        if self._may_speak and self._sending.outbound is None:
            farewell = Outbound(Header(Purpose.FAREWELL))
            farewell.begin(self._heard.num_frames)
            self._last_words = farewell.buffers
        if num_left:
            return self.lose(f"said farewell while {num_left} frames waited for it")
        self._end()
        return [] if self._is_closing else self._peer_left()

    # Time.

    def patience_ns(self, now_ns: int) -> int:
        """How long to wait for the peer at most, once `next_write` has nothing or the peer takes
        nothing, or for another connection.

        No longer than a heartbeat, or a part of the silence: time in which this very process was
        stopped is not the peer's, and of any wait no more than its patience counts as silence.
        """
        options = self._options
        patience_ns = options.heartbeat_ns
        if self.is_broken:
            patience_ns = options.silence_ns // TRIES
        elif self._may_speak and self._sending.outbound is None:
            patience_ns -= now_ns - self._sending.last_write_ns
        patience_ns = min(patience_ns, options.silence_ns - self._quiet.total_ns)
        if self._close_deadline_ns is not None:
            patience_ns = min(patience_ns, self._close_deadline_ns - now_ns)
        return self._quiet.ask(now_ns, max(0, patience_ns))

    def waited(self, now_ns: int) -> list[Output]:
        """The wait is over, and there is nothing to read."""
        self._end_if_late(now_ns)
        if self.state is State.OVER:
            return []
        self._quiet.answer(now_ns)
        silence_ns, is_whole = self._options.silence_ns, self.connection is Connection.WHOLE
        if self._quiet.total_ns >= silence_ns:
            return self._lose_silent(is_whole)
        if self.is_source and self.ends.far is not None and not self.is_broken:
            # A new connection is quicker than what TCP tries ever more rarely.
            limit_ns = silence_ns // (2 if is_whole else TRIES)
            if self._quiet.here_ns >= limit_ns:
                return self.break_off(f"was silent for {limit_ns / NS_PER_S:g} s")
        return []

    def _lose_silent(self, is_whole: bool) -> list[Output]:
        silence_s = self._options.silence_ns / NS_PER_S
        if is_whole and self.ends.far is None:
            return self.lose(f"was silent for {silence_s:g} s", PeerSilentError)
        why = f"nothing came from rank {self.peer}" if is_whole else self._why_down
        return self.fail(PeerSilentError(self.ends.down(silence_s, why), self.ends.culprit))

    def _end_if_late(self, now_ns: int) -> None:
        if self._close_deadline_ns is not None and now_ns >= self._close_deadline_ns:
            self._end()

    # Within.

    @property
    def _may_speak(self) -> bool:
        """Whether it may write something of its own."""
        may = self.state in (State.OPEN, State.DRAINING) and self._sending.is_taken
        return may and self.connection is Connection.WHOLE

    @property
    def _is_closing(self) -> bool:
        return self._close_deadline_ns is not None

    def _move_to(self, state: State) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} does not become {state}"
        self.state = state

    def _end(self) -> None:
        if self.state is not State.OVER:
            self._move_to(State.OVER)

    def _tell(self, error: RrfpError) -> list[Output]:
        if self._is_closing or self._has_told_of_loss:
            return []
        self._has_told_of_loss = True
        return [Failed(error)]
