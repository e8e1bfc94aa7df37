"""One end of a link without a socket, which calls the protocol as a driver does, and the bytes that
are under way between two of them."""

from rrfp.runtime.link.channel import Link, LinkOptions, Output, State
from rrfp.runtime.link.wire import FrameReader, Purpose
from rrfp.schedule.tasks import Task

HEARTBEAT_NS, SILENCE_NS, CLOSE_NS = 10, 100, 200
OPTIONS = LinkOptions(HEARTBEAT_NS, SILENCE_NS, 2**20, keeps_records=True)
PIPE_BYTES = 300
"""About two messages."""


class Way:
    """The bytes under way in one direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_shut = False
        """Nothing more comes; what is under way still does."""
        self.is_unread = False
        """Whoever read it has closed."""


class End:
    """One end with what a driver knows: it calls the protocol as one does, when it is told to."""

    def __init__(self, link: Link, incoming: Way, outgoing: Way) -> None:
        self.link = link
        self.incoming = incoming
        self.outgoing = outgoing
        self.buffers: list[memoryview] = []
        """Of the write that has begun."""
        self.num_carried: int | None = None
        """How much of it has left, where its link does not know that yet."""
        self.outputs: list[Output] = []
        self.written: list[Purpose] = []
        """Of the frames that were written whole."""
        self.tasks_written: set[tuple[Purpose, Task]] = set()
        self._reader = FrameReader(2**20)
        self.is_stopped = False
        self.is_closed = False
        """The driver has seen that its link is over."""
        self.was_closing = False
        """`begin_close` came before it was over."""
        self.was_aborted = False
        """It closed without a farewell, or its deadline came."""
        self.close_deadline_ns: int | None = None
        self.num_unsent_at_close: int | None = None
        """When it was first closed, over or not."""
        self.num_checked = 0
        """Of its outputs."""
        self.failure = ""
        """What it told of a loss."""
        self.has_left = False
        """It told that its peer has left."""
        self.heard_ns = 0
        self.stopped_ns = 0
        """For how long it was stopped since anything was heard, and how often."""
        self.num_stops = 0

    def begin_write(self, now_ns: int) -> bool:
        if not self.buffers and not self.is_closed:
            self.buffers = self.link.next_write(now_ns)
        return bool(self.buffers)

    def end_write(self, most_bytes: int, now_ns: int) -> int:
        """Carry up to so many bytes of the write that has begun, and tell."""
        if not self.buffers:
            return 0
        num_carried, way = self.num_carried, self.outgoing
        if num_carried is None:
            num_carried = self.carry(most_bytes)
        self.buffers, self.num_carried = [], None
        if num_carried < 0:
            self.outputs += self.link.write_failed()
            return 0
        self.outputs += self.link.wrote(num_carried, now_ns)
        if self.link.has_said_all:
            way.is_shut = True
        return num_carried

    def carry(self, most_bytes: int) -> int:
        """Carry up to so many bytes; -1: nobody takes them any more."""
        way = self.outgoing
        if way.is_unread:
            return -1
        room = min(most_bytes, PIPE_BYTES - len(way.data))
        data = b"".join(self.buffers)[: max(0, room)]
        self._put(data)
        return len(data)

    def _put(self, data: bytes) -> None:
        self.outgoing.data += data
        while data:
            buffer = self._reader.missing
            part, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(part)] = part
            if frame := self._reader.fill(len(part), 0):
                self.written.append(frame.header.purpose)
                if frame.header.task is not None:
                    self.tasks_written.add((frame.header.purpose, frame.header.task))

    @property
    def can_read(self) -> bool:
        return bool(self.incoming.data) or self.incoming.is_shut

    def read(self, most_bytes: int, now_ns: int) -> int:
        """Read up to so many bytes; the number of those that were read."""
        if self.is_closed or not self.can_read or self.link.is_broken:
            return 0
        data = self.incoming.data
        if not data:
            self.outputs += self.link.received(0, now_ns) or []
            return 0
        num_read = 0
        self.heard_ns, self.stopped_ns, self.num_stops = now_ns, 0, 0
        while data and num_read < most_bytes and self.reads:
            buffer = self.link.next_read()
            num_bytes = min(len(buffer), len(data), most_bytes - num_read)
            buffer[:num_bytes] = data[:num_bytes]
            del data[:num_bytes]
            num_read += num_bytes
            self.outputs += self.link.received(num_bytes, now_ns) or []
        return num_read

    @property
    def reads(self) -> bool:
        return self.link.state is not State.OVER and not self.link.is_broken

    def use(self, incoming: Way, outgoing: Way) -> None:
        """Go on over another connection."""
        assert not self.buffers
        self.leave()
        self.incoming, self.outgoing = incoming, outgoing
        self._reader = FrameReader(2**20)
        self.outputs += self.link.attach()

    def leave(self) -> None:
        """Close the connection."""
        self.outgoing.is_shut = True
        self.incoming.is_unread = True

    def look(self, now_ns: int) -> None:
        """End a wait and begin the next one."""
        if self.is_closed:
            return
        if not self.can_read or self.link.is_broken:
            if self.link.is_broken:
                outputs = self.link.could_not_attach("no way", now_ns)
            else:
                outputs = self.link.waited(now_ns)
            self.outputs += outputs
            if outputs:
                # Of a stop, no more than one wait counts as the peer's silence.
                quiet_ns = now_ns - self.heard_ns - self.stopped_ns
                assert quiet_ns + HEARTBEAT_NS * self.num_stops >= SILENCE_NS
        self.link.patience_ns(now_ns)

    def close_if_over(self) -> None:
        """What a driver does once its link is over, or broken, and no write is under way."""
        if self.link.is_broken and not self.buffers:
            self.leave()
        if self.is_closed or self.link.state is not State.OVER or self.buffers:
            return
        self.is_closed = True
        if not self.outgoing.is_unread:
            self._put(b"".join(self.link.last_words()))
        if self.incoming.data and not self.outgoing.is_shut:
            # As TCP does: what a socket has not read when it is closed takes the rest along.
            self.outgoing.data.clear()
        self.leave()
