"""One end of a directed link as a protocol alone: calls and bytes in, bytes and events out.

No thread, lock, socket or clock is in here. Whoever drives an end (`driver.py` over sockets,
`memory.py` in virtual time) carries its bytes, passes the time in, and makes one call at a time.
`states.py` has the tables of its states.

Messages, reports, decisions and forecasts go from source to destination; credits and released slots
come back on the same connection; heartbeats and the farewell go both ways.

Credits: the destination owns the bound. It gives all of it when the link opens and one back for
each message consumed, some at a time; messages wait for credit in the source's queue.

Of a posted message (`rrfp.runtime.planes.plane`) only the frame travels here. The destination gives
out what is to be pulled, is told when it is here (`pulled`), and releases the slot. It says
farewell once nothing is being pulled, so that its source may then free the memory.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from rrfp.errors import RrfpError
from rrfp.runtime.links.ends import Ends, Far
from rrfp.runtime.links.quiet import TRIES, Quiet
from rrfp.runtime.links.sending import Heard, Outbound, Sending
from rrfp.runtime.links.states import NEXT_STATES, Connection, LinkOptions, Output, State
from rrfp.runtime.links.wire import (
    Frame,
    FrameError,
    FrameReader,
    GarbledError,
    Header,
    Purpose,
    encode_header,
)
from rrfp.runtime.protocols import Failed, PeerLostError, PeerSilentError
from rrfp.trace.records import NS_PER_S

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
