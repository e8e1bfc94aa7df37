"""The reliable channel of a link: acknowledgement, resume and keep-alive, without a direction.

A channel transfers frames each way over one connection after another. It has no thread, lock,
socket or clock: `endpoint.py` joins it with a sender or a receiver, and a driver moves the bytes,
passes the time, and makes one call at a time.

**State of the channel.**

| state     | writes                              | reads | ends with                              |
|-----------|-------------------------------------|-------|----------------------------------------|
| open      | frames, heartbeats                  | yes   | a close, the peer's farewell, a loss   |
| draining  | queued frames, then the farewell    | yes   | its farewell written, or as above      |
| lingering | nothing: its farewell is written    | yes   | the peer's farewell, a loss, deadline  |
| over      | `final_bytes`, once                 | no    |                                        |

An end lingers, because closing a socket with unread bytes can destroy those in flight to the peer.
An open end answers the peer's farewell with its own and is over: a directed link needs both ends.
A loss is reported once, and never by an end that closes.

**State of the connection.**

| connection | writes        | reads         | becomes                                             |
|------------|---------------|---------------|-----------------------------------------------------|
| whole      | as above      | as above      | broken: it ends without a farewell, by an error or  |
|            |               |               | with a garbled frame; between hosts also when it is |
|            |               |               | silent for half of the allowed time                 |
| broken     | nothing       | nothing       | resuming, once another connection is attached       |
| resuming   | its own count | the peer's    | whole, once it has the peer's count; or broken      |

**Acknowledgement.** Both ends count the frames that carry content, each direction by itself and
over all connections. Every frame states how many its sender has received; the first frame of a
later connection (`Purpose.RESUME`) states nothing else, and each end retransmits from there. A
connection keeps the order of its frames, so nothing is lost or duplicated.

**Keep-alive.** The link is lost after `silence_ns` without a byte, when its connections break one
after the other and carry nothing, and when the peer is gone, which the driver finds out.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.link.wire import (
    UNCOUNTED,
    Frame,
    FrameReader,
    Header,
    Purpose,
    encode_header,
)
from rrfp.runtime.planes.codec import Form, FrameError
from rrfp.runtime.planes.plane import PlaneRequest
from rrfp.runtime.protocols import Event, LinkFailed, PeerLostError, PeerSilentError
from rrfp.trace.outcome import FaultOrigin, FoundBy
from rrfp.trace.records import NS_PER_S, ReceiveRecord, SendRecord

Output = Event | SendRecord | ReceiveRecord | PlaneRequest
"""Output of a link: to its rank's inbox, to its recorder, or to its data plane."""

MAX_USELESS = 10
"""Number of connections in a row that may break without a frame before the link is lost."""
ATTEMPTS = 10
"""One attempt to connect again may take this fraction of `silence_ns`, and so may its first
frame."""
ACKNOWLEDGE_FRAMES = 64
ACKNOWLEDGE_BYTES = 4 * 2**20
"""A receiver acknowledges after 64 frames or 4 MiB of tensors without being asked, so that the
sender's retransmit buffer stays small."""


@dataclass(frozen=True, slots=True)
class CrossHost:
    """Properties of a link between two hosts."""

    own_host: str
    peer_host: str
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True)
class LinkId:
    """The two ranks of a link, seen from one of them."""

    own: int
    peer: int
    is_source: bool
    """True on the rank that sends."""
    cross_host: CrossHost | None = None
    """None for a link within a host."""

    @property
    def checks_tensors(self) -> bool:
        """True if nothing but a checksum protects the tensors on its sockets: between hosts without
        encryption."""
        return self.cross_host is not None and not self.cross_host.is_encrypted

    def __str__(self) -> str:
        own, peer = f"rank {self.own}", f"rank {self.peer}"
        if self.cross_host is not None:
            own = f"{own} ({self.cross_host.own_host})"
            peer = f"{peer} ({self.cross_host.peer_host})"
        source, destination = (own, peer) if self.is_source else (peer, own)
        return f"the link from {source} to {destination}"

    @property
    def link_origin(self) -> FaultOrigin:
        """Fault origin: the link, reported by one of its ends."""
        ranks = (self.own, self.peer) if self.is_source else (self.peer, self.own)
        return FaultOrigin(FoundBy.LINK, link=ranks)

    @property
    def peer_origin(self) -> FaultOrigin:
        """Fault origin: the peer, reported over the link."""
        return FaultOrigin(FoundBy.LINK, rank=self.peer)

    def describe_lost(self, what: str) -> str:
        """Format the loss of the peer; `what` is what it did."""
        return (
            f"rank {self.peer} {what} (seen by rank {self.own}); see its own output for the cause"
        )

    def describe_down(self, silence_s: float, why: str) -> str:
        """Format the loss of a link that was silent, where the origin is unknown: the peer or the
        network."""
        where = ""
        if self.cross_host is not None:
            where = f"whether {self.cross_host.peer_host} can be reached, and "
        return (
            f"{self} has been down for {silence_s:g} s ({why}); see {where}the output of rank"
            f" {self.peer} for the cause"
        )

    def describe_useless(self, num_connections: int, why: str) -> str:
        """Format a series of connections that broke before they carried anything."""
        return (
            f"{self} broke {num_connections} times in a row and carried nothing between (the last"
            f" time rank {self.peer} {why}); see what lies between the two, and the output of rank"
            f" {self.peer}"
        )

    def describe_unreadable(self, why: str) -> str:
        """Format bytes of the peer that are not of this protocol."""
        return (
            f"what rank {self.peer} sent to rank {self.own} cannot be read: {why}; see that all"
            " ranks run the same version of rrfp"
        )


class State(Enum):
    """State of a channel."""

    OPEN = "open"
    DRAINING = "draining"
    LINGERING = "lingering"
    OVER = "over"


class Connection(Enum):
    """State of a channel's connection."""

    WHOLE = "whole"
    BROKEN = "broken"
    RESUMING = "resuming"


class Change(Enum):
    """An event that changes the state of a channel or of its connection."""

    CLOSE = "this end begins to close"
    FAREWELL_WRITTEN = "its farewell was written whole"
    END = "both have said farewell, the link is lost, or the time to close is up"
    BREAK = "the connection cannot be used any more"
    ATTACH = "another connection takes its place"
    RESUME = "the peer's count has arrived over it"


TRANSITIONS: Mapping[State, Mapping[Change, State]] = {
    State.OPEN: {Change.CLOSE: State.DRAINING, Change.END: State.OVER},
    State.DRAINING: {
        Change.CLOSE: State.DRAINING,
        Change.FAREWELL_WRITTEN: State.LINGERING,
        Change.END: State.OVER,
    },
    State.LINGERING: {Change.CLOSE: State.LINGERING, Change.END: State.OVER},
    State.OVER: {
        Change.CLOSE: State.OVER,
        Change.FAREWELL_WRITTEN: State.OVER,
        Change.END: State.OVER,
    },
}
"""Next state, by state and event. An event that is missing cannot occur in that state."""

CONNECTION_TRANSITIONS: Mapping[Connection, Mapping[Change, Connection]] = {
    Connection.WHOLE: {Change.BREAK: Connection.BROKEN},
    Connection.BROKEN: {Change.ATTACH: Connection.RESUMING},
    Connection.RESUMING: {Change.RESUME: Connection.WHOLE, Change.BREAK: Connection.BROKEN},
}
"""Next state of the connection, likewise."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options that all links of a rank share."""

    heartbeat_ns: int
    """An end that has written nothing for this long writes a heartbeat."""
    silence_ns: int
    """A peer that has sent nothing for this long is lost."""
    max_message_bytes: int
    """Largest message; the same on all ranks."""
    keeps_records: bool = False
    """True if messages are recorded."""


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A frame to write, perhaps for the second time."""

    header: Header
    tensors: Sequence[torch.Tensor | Form | None] = ()
    payload: Sequence[memoryview] = ()
    """Bytes of its tensors, in place."""
    checksum: int = 0
    """Checksum of the payload, where it is checked."""
    message: object = None
    """The message in it, for its sender."""
    start_ns: int | None = None
    """Time at which its first byte was written; in a paced run, at which its modeled time
    began."""
    is_out: bool = False
    """True once it was written whole, or has arrived."""
    buffers: list[memoryview] = field(default_factory=list)
    """Bytes that are still to be written over this connection."""

    def encode(self, acknowledged: int) -> None:
        """Set `buffers` to the frame's bytes, from the first one on, with the number of frames that
        this end has received."""
        data = encode_header(self.header, self.tensors, acknowledged, self.checksum)
        self.buffers = [memoryview(data), *self.payload]

    def skip(self, num_bytes: int) -> None:
        """Remove the first bytes, which were written, from `buffers`."""
        buffers, num_whole = self.buffers, 0
        for buffer in buffers:
            if num_bytes < buffer.nbytes:
                break
            num_bytes -= buffer.nbytes
            num_whole += 1
        del buffers[:num_whole]
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]


class SilenceTimer:
    """Time without a byte from the peer.

    Time in which this process was stopped does not count: of each wait at most its planned length
    does.
    """

    def __init__(self, now_ns: int) -> None:
        self.total_ns = 0
        self.connection_ns = 0
        """The part over this connection."""
        self._begun_ns = now_ns
        self._patience_ns = 0

    def begin_wait(self, now_ns: int, patience_ns: int) -> int:
        """Begin a wait of at most this length, and return the length unchanged."""
        self._begun_ns, self._patience_ns = now_ns, patience_ns
        return patience_ns

    def end_wait(self, now_ns: int) -> None:
        """Count a wait in which nothing came as silence, up to its planned length."""
        waited_ns = min(now_ns - self._begun_ns, self._patience_ns)
        self._begun_ns = now_ns
        self.total_ns += waited_ns
        self.connection_ns += waited_ns

    def reset(self) -> None:
        """Set the time of silence, in all and over this connection, to 0: something has come."""
        self.total_ns = self.connection_ns = 0


class RetransmitBuffer:
    """The counted frames that the peer has not acknowledged, in order."""

    def __init__(self) -> None:
        self._unacknowledged: deque[OutgoingFrame] = deque()
        self._num_acknowledged = 0
        self.num_unsent = 0
        """How many of them, the last ones, are to be written again."""

    def append(self, frame: OutgoingFrame) -> None:
        """Keep a frame that is written for the first time. None may be left to write again."""
        assert not self.num_unsent, "frames that were written before go first"
        self._unacknowledged.append(frame)

    def pop_unsent(self) -> OutgoingFrame | None:
        """Return the next frame to write again, if any. It stays in the buffer until it is
        acknowledged."""
        if not self.num_unsent:
            return None
        self.num_unsent -= 1
        return self._unacknowledged[-1 - self.num_unsent]

    def acknowledge(self, num_frames: int) -> list[OutgoingFrame]:
        """Apply a cumulative acknowledgement: remove and return the frames that it newly covers.
        Raises FrameError for a number below the last one or above what was written."""
        num_in_flight = len(self._unacknowledged) - self.num_unsent
        num_new = num_frames - self._num_acknowledged
        if not 0 <= num_new <= num_in_flight:
            raise FrameError(
                f"{num_frames} frames were acknowledged after {self._num_acknowledged}, with"
                f" {num_in_flight} under way"
            )
        self._num_acknowledged = num_frames
        return [self._unacknowledged.popleft() for _ in range(num_new)]

    def rewind(self) -> None:
        """Mark all frames in the buffer to be written again, over a new connection."""
        self.num_unsent = len(self._unacknowledged)

    def stop(self) -> None:
        """Mark no frame to be written again, until `rewind`."""
        self.num_unsent = 0

    def unsent(self) -> list[OutgoingFrame]:
        """Return the frames that are to be written again, without removing them."""
        return list(self._unacknowledged)[len(self._unacknowledged) - self.num_unsent :]


class Channel:
    """One end of the channel of a link.

    To write: `takes_frame`, then `begin` or `begin_own`; carry `next_write`, and report it with
    `wrote` or `write_failed`. To read: fill `next_read`, then `read`, `acknowledge` and `accept`.
    While `is_broken` neither; `attach` follows once there is another connection.
    """

    def __init__(self, link: LinkId, options: LinkOptions, now_ns: int) -> None:
        self.link = link
        self.options = options
        self.state = State.OPEN
        self.connection = Connection.WHOLE
        self.has_peer_left = False
        """True once the peer has said farewell."""
        self.num_useless = 0
        """Connections in a row that have broken and carried nothing."""
        self.acknowledge_bytes = ACKNOWLEDGE_BYTES
        """Bytes of tensors after which this end acknowledges by itself."""
        self._close_deadline_ns: int | None = None
        self._has_reported_loss = False
        self._why_broken = self._why_down = ""
        self._silence = SilenceTimer(now_ns)
        # Writing.
        self._outgoing: OutgoingFrame | None = None
        """Frame currently being written, if any."""
        self.is_writing = False
        """True while a write has begun and not ended."""
        self._is_writable = True
        """True while the peer can still read from this connection."""
        self._must_resume = False
        """True until the count was written over a new connection."""
        self._retransmit = RetransmitBuffer()
        self._last_write_ns = self._attempt_ns = now_ns
        self._final_bytes: list[memoryview] = []
        # Reading.
        self._num_received = self._num_confirmed = 0
        self._unconfirmed_bytes = 0
        self._begin_reading()

    def _begin_reading(self) -> None:
        """Begin with a new frame, and drop one that has arrived in part."""
        self._reader = FrameReader(
            self.options.max_message_bytes, checks_tensors=self.link.checks_tensors
        )

    def _change(self, change: Change) -> None:
        """Change the channel's state by an event, which must be possible in it."""
        assert change in TRANSITIONS[self.state], f"{change} cannot occur in {self.state}"
        self.state = TRANSITIONS[self.state][change]

    def _change_connection(self, change: Change) -> None:
        """Change the connection's state by an event, which must be possible in it."""
        transitions = CONNECTION_TRANSITIONS[self.connection]
        assert change in transitions, f"{change} cannot occur in {self.connection}"
        self.connection = transitions[change]

    @property
    def is_broken(self) -> bool:
        """True if its connection is broken and it is not over, so that it needs another
        connection."""
        return self.connection is Connection.BROKEN and self.state is not State.OVER

    @property
    def is_closing(self) -> bool:
        """True once this end was asked to close."""
        return self._close_deadline_ns is not None

    @property
    def may_write_new(self) -> bool:
        """True if frames that were not written before may be written: the connection is whole, the
        peer reads, and the channel is open or draining."""
        return (
            self._is_writable
            and self.connection is Connection.WHOLE
            and self.state in (State.OPEN, State.DRAINING)
        )

    @property
    def may_begin_at_once(self) -> bool:
        """True if it is open, and nothing that was begun comes before a new frame."""
        return (
            self.state is State.OPEN
            and self.connection is Connection.WHOLE
            and self._is_writable
            and self._outgoing is None
            and not self._must_resume
            and not self._retransmit.num_unsent
        )

    @property
    def is_busy(self) -> bool:
        """True if something comes before a new frame: a frame that was begun, or over a later
        connection the count and the frames to write again."""
        return self._outgoing is not None or self._must_resume or self._retransmit.num_unsent > 0

    @property
    def has_written_all(self) -> bool:
        """True if its farewell was written, so that nothing more will be written over this
        connection."""
        is_last = self.state is State.LINGERING and self.connection is Connection.WHOLE
        return is_last and not self.is_busy

    # Closing.

    def begin_close(self, deadline_ns: int, *, farewell: bool) -> None:
        """Begin to close: write what is queued, say farewell and be over by the deadline, the first
        one given. Without a farewell be over at once, and the peer considers this rank lost."""
        if self._close_deadline_ns is None or not farewell:
            self._close_deadline_ns = deadline_ns
        self._change(Change.CLOSE if farewell else Change.END)

    def fail(self, error: RrfpError) -> list[Output]:
        """End the link with an error, and return what reports it: nothing if it was over, a loss
        was reported, or this end closes."""
        is_over = self.state is State.OVER
        self._change(Change.END)
        return [] if is_over else self.report(error)

    def fail_by_peer(self, what: str, kind: type[PeerLostError] = PeerLostError) -> list[Output]:
        """End the link because of the peer; `what` says what the peer did. Returns the report of an
        error of class `kind`, as `fail`."""
        return self.fail(kind(self.link.describe_lost(what), self.link.peer_origin))

    def report(self, error: RrfpError) -> list[Output]:
        """Return a `LinkFailed` for a loss; empty if one was reported before or this end closes."""
        if self.is_closing or self._has_reported_loss:
            return []
        self._has_reported_loss = True
        return [LinkFailed(error)]

    def answer_farewell(self, num_queued: int) -> list[Output]:
        """Be over after the peer's farewell, and prepare the answer for `final_bytes`, unless a
        frame is half written or none may be written. Anything queued, and a frame with a task that
        is still to be written, make it a loss, which is returned."""
        outgoing = self._outgoing
        if self.may_write_new and outgoing is None:
            farewell = OutgoingFrame(Header(Purpose.FAREWELL))
            farewell.encode(self._num_received)
            self._final_bytes = farewell.buffers
        left = self._retransmit.unsent()
        if outgoing is not None:
            left.append(outgoing)
        num_left = num_queued + sum(each.header.task is not None for each in left)
        if num_left:
            return self.fail_by_peer(f"said farewell while {num_left} frames waited for it")
        self._change(Change.END)
        return []

    def final_bytes(self) -> list[memoryview]:
        """Remove and return the bytes that an end that is over still writes, if the peer reads them
        at once: the farewell that answers the peer's."""
        final_bytes, self._final_bytes = self._final_bytes, []
        return final_bytes

    def reply_to_reconnect(self) -> bytes:
        """Return the reply of an end that is over to a peer that connects again, because it did not
        receive the answer to its farewell; empty if it said none."""
        if not self.has_peer_left:
            return b""
        resume = encode_header(Header(Purpose.RESUME), acknowledged=self._num_received)
        return resume + encode_header(Header(Purpose.FAREWELL), acknowledged=self._num_received)

    # Breaking.

    def break_connection(self, what: str) -> list[Output]:
        """Abandon the connection; `what` says what the peer did. The link fails after 10
        connections in a row that carried nothing. Does nothing if it is broken or over already, or
        the peer has said farewell."""
        if self.state is State.OVER or self.has_peer_left or self.is_broken:
            return []
        self._change_connection(Change.BREAK)
        # A frame that was written in part is in the retransmit buffer.
        self._outgoing = None
        self._must_resume = False
        self._retransmit.stop()
        self._why_broken, self._why_down = what, f"rank {self.link.peer} {what}"
        self.num_useless += 1
        if self.num_useless <= MAX_USELESS:
            return []
        why = self.link.describe_useless(MAX_USELESS, what)
        return self.fail(PeerLostError(why, self.link.link_origin))

    def attach(self) -> None:
        """Begin to resume over another connection in place of the broken one, which is whole once
        the peer's count has come; does nothing if the channel is over. No write is in progress."""
        assert not self.is_writing
        if self.state is State.OVER:
            return
        self._change_connection(Change.ATTACH)
        self._begin_reading()
        self._is_writable = self._must_resume = True
        self._silence.connection_ns = 0

    def could_not_attach(self, why: str, now_ns: int) -> list[Output]:
        """End a wait in which no other connection was made; `why` is the reason. The link fails
        after too much silence."""
        self._why_down = why
        return self.waited(now_ns)

    def fail_by_gone_peer(self) -> list[Output]:
        """End the link: its connection is broken because the peer has ended."""
        return self.fail_by_peer(self._why_broken)

    # Writing.

    def takes_frame(self, now_ns: int) -> bool:
        """Return whether `begin` or `begin_own` may follow. Otherwise `next_write` continues with
        what was begun, or with what a new connection begins with: its count and the frames to
        retransmit. Ends the link at the close deadline."""
        assert not self.is_writing, "the write before has not ended"
        if self._close_deadline_ns is not None:
            self._end_if_late(now_ns)
        if self._outgoing is not None or not self._is_writable or self.state is State.OVER:
            return False
        if self._must_resume:
            self._must_resume = False
            self._set(OutgoingFrame(Header(Purpose.RESUME)))
            return False
        unsent = self._retransmit.pop_unsent()
        if unsent is not None:
            self._set(unsent)
            return False
        return self.connection is Connection.WHOLE and self.state is not State.LINGERING

    def _set(self, frame: OutgoingFrame) -> None:
        """Make this the frame being written, from its first byte, with an acknowledgement of all
        received frames."""
        frame.encode(self._num_received)
        self._num_confirmed, self._unconfirmed_bytes = self._num_received, 0
        self._outgoing = frame

    def begin(self, frame: OutgoingFrame) -> None:
        """Begin to write a frame that was not written before. A counted one stays in the retransmit
        buffer until it is acknowledged."""
        if frame.header.purpose not in UNCOUNTED:
            self._retransmit.append(frame)
        self._set(frame)

    def begin_own(self, now_ns: int, *, may_leave: bool) -> None:
        """Begin to write a frame of the channel's own, if one is due: the farewell, if it drains
        and `may_leave`, or else a heartbeat, after a time without writes or to acknowledge what has
        arrived."""
        if self.state is State.DRAINING and may_leave:
            self.begin(OutgoingFrame(Header(Purpose.FAREWELL)))
        elif (
            now_ns - self._last_write_ns >= self.options.heartbeat_ns
            or self._num_received - self._num_confirmed >= ACKNOWLEDGE_FRAMES
            or self._unconfirmed_bytes >= self.acknowledge_bytes
        ):
            self.begin(OutgoingFrame(Header(Purpose.HEARTBEAT)))

    def next_write(self, now_ns: int) -> list[memoryview]:
        """Return the bytes to write now, of the frame that was begun; empty without one, if the
        channel is over, or if the peer reads nothing more. If it returns any, `wrote` or
        `write_failed` must follow."""
        outgoing = self._outgoing
        if outgoing is None or not self._is_writable or self.state is State.OVER:
            return []
        self.is_writing = True
        self._attempt_ns = now_ns
        return outgoing.buffers

    def wrote(self, num_bytes: int, now_ns: int) -> OutgoingFrame | None:
        """End a write of this many bytes; 0 if the peer reads none now. Return the frame if it is
        now written whole for the first time, and has not been acknowledged before; else None."""
        self.is_writing = False
        outgoing = self._outgoing
        if num_bytes == 0 or outgoing is None:
            return None
        self._last_write_ns = now_ns
        if outgoing.start_ns is None:
            outgoing.start_ns = self._attempt_ns
        outgoing.skip(num_bytes)
        if outgoing.buffers:
            return None
        self._outgoing = None
        return outgoing if self.mark_out(outgoing) else None

    def write_failed(self) -> None:
        """End a write after which the peer reads nothing more over this connection. What it wrote
        before is still to be read: a farewell, or nothing."""
        self.is_writing = self._is_writable = False

    def mark_out(self, frame: OutgoingFrame) -> bool:
        """Note that a frame was written whole, or has arrived; return whether that is new. After
        this end's farewell the channel lingers."""
        if frame.is_out:
            return False
        frame.is_out = True
        if frame.header.purpose is Purpose.FAREWELL:
            self._change(Change.FAREWELL_WRITTEN)
        return True

    # Reading.

    @property
    def reads(self) -> bool:
        """True while bytes of the peer are read: it is not over, the peer has not left, the
        connection is not broken."""
        return (
            self.state is not State.OVER
            and not self.has_peer_left
            and self.connection is not Connection.BROKEN
        )

    def next_read(self) -> memoryview:
        """Return the buffer for the next bytes. Memory for a message is allocated after its header
        was checked (`FrameReader`)."""
        return self._reader.missing

    def read(self, num_bytes: int, now_ns: int) -> Frame | None:
        """Account for bytes in `next_read`; return a frame that is whole. Resets the time of
        silence. Raises FrameError, or GarbledError for a wrong checksum."""
        self._silence.reset()
        return self._reader.fill(num_bytes, now_ns)

    def acknowledge(self, frame: Frame) -> list[OutgoingFrame]:
        """Remove and return the frames that the peer newly acknowledges. The first frame of a later
        connection also marks all others to be written again. Raises FrameError for an impossible
        number, or unless that first frame, and no other, is a resume."""
        is_resuming = self.connection is Connection.RESUMING
        if (frame.header.purpose is Purpose.RESUME) is not is_resuming:
            name = frame.header.purpose.name.lower()
            raise FrameError(f"a {name} came where it does not belong")
        acknowledged = self._retransmit.acknowledge(frame.acknowledged)
        for each in acknowledged:
            if each.start_ns is None:
                # The acknowledgement came before the end of the write.
                each.start_ns = self._attempt_ns
        if is_resuming:
            self._retransmit.rewind()
        return acknowledged

    def accept(self, frame: Frame) -> bool:
        """Count a frame that is no heartbeat or resume; return whether it is one for the sender or
        the receiver of the link. A resume makes the connection whole, and a farewell is noted."""
        purpose = frame.header.purpose
        if purpose is Purpose.RESUME:
            self._change_connection(Change.RESUME)
            return False
        self.num_useless = 0
        if purpose is Purpose.HEARTBEAT:
            return False
        self._num_received += 1
        if frame.tensors:
            self._unconfirmed_bytes += frame.num_bytes
        if purpose is Purpose.FAREWELL:
            self.has_peer_left = True
            return False
        return True

    # Time.

    def patience_ns(self, now_ns: int) -> int:
        """Begin a wait for the peer or for another connection, once there is nothing to write or
        the peer reads nothing; return its greatest length.

        It ends when a heartbeat is due at the latest, or for a broken connection after a tenth of
        `silence_ns`, and in any case when the allowed silence or the time to close is up. Of a wait
        no more than its planned length counts as silence (`SilenceTimer`).
        """
        options = self.options
        patience_ns = options.heartbeat_ns
        if self.is_broken:
            patience_ns = options.silence_ns // ATTEMPTS
        elif self._outgoing is None and self.may_write_new:
            patience_ns -= now_ns - self._last_write_ns
        patience_ns = min(patience_ns, options.silence_ns - self._silence.total_ns)
        if self._close_deadline_ns is not None:
            patience_ns = min(patience_ns, self._close_deadline_ns - now_ns)
        return self._silence.begin_wait(now_ns, max(0, patience_ns))

    def waited(self, now_ns: int) -> list[Output]:
        """End a wait after which there is nothing to read, and count it as silence. After
        `silence_ns` the link fails; on the source of a link between hosts the connection breaks
        after half of that, or a tenth while it resumes. At the close deadline the link ends."""
        self._end_if_late(now_ns)
        if self.state is State.OVER:
            return []
        self._silence.end_wait(now_ns)
        silence_ns, is_whole = self.options.silence_ns, self.connection is Connection.WHOLE
        if self._silence.total_ns >= silence_ns:
            return self._fail_silent(is_whole)
        if self.link.is_source and self.link.cross_host is not None and not self.is_broken:
            # A new connection is faster than TCP's own retries, which become ever rarer.
            limit_ns = silence_ns // (2 if is_whole else ATTEMPTS)
            if self._silence.connection_ns >= limit_ns:
                return self.break_connection(f"was silent for {limit_ns / NS_PER_S:g} s")
        return []

    def _fail_silent(self, is_whole: bool) -> list[Output]:
        """End the link because nothing has arrived for too long. The fault's origin is the peer
        within a host over a whole connection, and otherwise the link."""
        silence_s = self.options.silence_ns / NS_PER_S
        if is_whole and self.link.cross_host is None:
            return self.fail_by_peer(f"was silent for {silence_s:g} s", PeerSilentError)
        why = f"nothing came from rank {self.link.peer}" if is_whole else self._why_down
        down = self.link.describe_down(silence_s, why)
        return self.fail(PeerSilentError(down, self.link.link_origin))

    def _end_if_late(self, now_ns: int) -> None:
        """End the link if the close deadline has passed."""
        if self._close_deadline_ns is not None and now_ns >= self._close_deadline_ns:
            self._change(Change.END)
