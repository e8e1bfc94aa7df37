"""A link without a socket, which a program drives, and what holds of it at every moment.

A program of random bytes says what happens next: who sends, reads, writes, waits, closes, is
stopped, and how much of it; where the connection is cut, when it is made again, and in which order
the destination hears of that. Each step is one call of the protocol, so that a write of one thread
may have begun and not ended while another one reads, closes or sends.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rrfp.runtime.link.channel import (
    MAX_USELESS,
    Channel,
    Connection,
    CrossHost,
    LinkId,
    LinkOptions,
    Output,
    State,
)
from rrfp.runtime.link.endpoint import Endpoint
from rrfp.runtime.link.receiver import Receiver
from rrfp.runtime.link.sender import Envelope, Sender
from rrfp.runtime.link.wire import FrameReader, Purpose
from rrfp.runtime.planes.codec import payload_bytes
from rrfp.runtime.protocols import (
    InputForecast,
    InputReported,
    LinkFailed,
    Message,
    MessageArrived,
    PeerLeft,
    TaskDecided,
)
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, SendRecord

# One end of a link without a socket, which calls the protocol as a driver does, and the bytes that
# are under way between two of them.


HEARTBEAT_NS, SILENCE_NS, CLOSE_NS = 10, 100, 200
OPTIONS = LinkOptions(HEARTBEAT_NS, SILENCE_NS, 2**20, keeps_records=True)
PIPE_BYTES = 300
"""About two messages."""


def envelope(message: Message, now_ns: int) -> Envelope:
    """Make the envelope of a message whose tensors are contiguous and on the CPU."""
    num_bytes = payload_bytes(message.tensors)
    return Envelope(
        message.step, message.task, message.tensors, num_bytes, now_ns, message.latency_ns
    )


class Way:
    """The bytes under way in one direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_shut = False
        """Nothing more comes; what is under way still does."""
        self.is_unread = False
        """The reader has closed."""


class End:
    """One end with the state of a driver. It calls the protocol as a driver does, when a test calls
    it."""

    def __init__(self, link: Endpoint[Any], incoming: Way, outgoing: Way) -> None:
        self.link = link
        self.incoming = incoming
        self.outgoing = outgoing
        self.buffers: list[memoryview] = []
        """Bytes of the write that has begun."""
        self.num_carried: int | None = None
        """Number of its bytes that were carried, before the link knows that."""
        self.outputs: list[Output] = []
        self.written: list[Purpose] = []
        """Purposes of the frames that were written whole."""
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
        """Unsent messages when it was first closed, over or not."""
        self.num_checked = 0
        """Number of its outputs that were checked."""
        self.failure = ""
        """The loss that it reported."""
        self.has_left = False
        """It reported that its peer has left."""
        self.heard_ns = 0
        self.stopped_ns = 0
        """For how long it was stopped since anything was heard, and how often."""
        self.num_stops = 0

    @property
    def state(self) -> State:
        return self.link.channel.state

    @property
    def connection(self) -> Connection:
        return self.link.channel.connection

    def begin_write(self, now_ns: int) -> bool:
        if not self.buffers and not self.is_closed:
            self.buffers = self.link.next_write(now_ns)
        return bool(self.buffers)

    def end_write(self, most_bytes: int, now_ns: int) -> int:
        """Carry up to this many bytes of the write that has begun, and report them to the link."""
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
        if self.link.channel.has_written_all:
            way.is_shut = True
        return num_carried

    def carry(self, most_bytes: int) -> int:
        """Carry up to this many bytes; return the number, or -1 if the reader has closed."""
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
        """Read up to this many bytes; return the number of bytes read."""
        if self.is_closed or not self.can_read or self.link.channel.is_broken:
            return 0
        data = self.incoming.data
        if not data:
            self.outputs += self.link.received(0, now_ns) or []
            return 0
        num_read = 0
        self.heard_ns, self.stopped_ns, self.num_stops = now_ns, 0, 0
        while data and num_read < most_bytes and self.reads:
            buffer = self.link.channel.next_read()
            num_bytes = min(len(buffer), len(data), most_bytes - num_read)
            buffer[:num_bytes] = data[:num_bytes]
            del data[:num_bytes]
            num_read += num_bytes
            self.outputs += self.link.received(num_bytes, now_ns) or []
        return num_read

    @property
    def reads(self) -> bool:
        return self.state is not State.OVER and not self.link.channel.is_broken

    def use(self, incoming: Way, outgoing: Way) -> None:
        """Go on over another connection."""
        assert not self.buffers
        self.leave()
        self.incoming, self.outgoing = incoming, outgoing
        self._reader = FrameReader(2**20)
        self.link.channel.attach()

    def leave(self) -> None:
        """Close the connection."""
        self.outgoing.is_shut = True
        self.incoming.is_unread = True

    def look(self, now_ns: int) -> None:
        """End a wait and begin the next one."""
        if self.is_closed:
            return
        if not self.can_read or self.link.channel.is_broken:
            if self.link.channel.is_broken:
                outputs = self.link.channel.could_not_attach("no way", now_ns)
            else:
                outputs = self.link.channel.waited(now_ns)
            self.outputs += outputs
            if outputs:
                # Of a stop, no more than one wait counts as the peer's silence.
                quiet_ns = now_ns - self.heard_ns - self.stopped_ns
                assert quiet_ns + HEARTBEAT_NS * self.num_stops >= SILENCE_NS
        self.link.channel.patience_ns(now_ns)

    def close_if_over(self) -> None:
        """Do what a driver does once its link is over, or broken, and no write is in progress."""
        if self.link.channel.is_broken and not self.buffers:
            self.leave()
        if self.is_closed or self.state is not State.OVER or self.buffers:
            return
        self.is_closed = True
        if not self.outgoing.is_unread:
            self._put(b"".join(self.link.channel.final_bytes()))
        if self.incoming.data and not self.outgoing.is_shut:
            # As TCP does: what a socket has not read when it is closed takes the rest along.
            self.outgoing.data.clear()
        self.leave()


TASK_PURPOSES = (Purpose.MESSAGE, Purpose.REPORT, Purpose.DECISION, Purpose.FORECAST)
TENSORS = tuple(torch.arange(size, dtype=torch.uint8) for size in (0, 1, 5))


class World:
    """A link, its two ends and what became of all that was sent on it."""

    def __init__(self, num_credits: int, *, is_far: bool = False) -> None:
        self.now_ns = 0
        there, back = Way(), Way()
        far, raf = (CrossHost("a", "b"), CrossHost("b", "a")) if is_far else (None, None)
        channel = Channel(LinkId(0, 1, is_source=True, cross_host=far), OPTIONS, 0)
        self.sender = Sender(channel)
        self.source = End(Endpoint(channel, self.sender), back, there)
        channel = Channel(LinkId(1, 0, is_source=False, cross_host=raf), OPTIONS, 0)
        self.receiver = Receiver(channel, num_credits)
        self.destination = End(Endpoint(channel, self.receiver), there, back)
        self.ends = (self.source, self.destination)
        self.bound = num_credits
        self.messages: list[tuple[Task, int, int]] = []
        """Messages that were sent: each task, the index of its tensor, and its latency."""
        self.announcements: list[Task] = []
        self.num_recorded = 0
        self.num_arrived = 0
        self.num_told = 0
        """Announcements that arrived."""
        self.num_consumed = 0
        self.is_parted = False
        """Neither end is there for the other one any more."""
        self.num_cuts = 0
        self.offers: list[tuple[int, Way, Way]] = []
        """Connections that the source has dialed and the destination has not accepted, by
        attempt."""
        self.num_attempts = self.last_attempt = 0
        self.story: list[str] = []

    # What a program may do. `number` is from 0 to 255.

    def send(self, number: int) -> None:
        """One message or several, some of which are to stay on their link for a while."""
        if self.source.is_stopped:
            return
        for _ in range(1 + number % 4):
            size = number // 4 % len(TENSORS)
            latency_ns = number // 16 if number >= 192 else 0
            task = Task(1, Kind.F, len(self.messages))
            self.messages.append((task, size, latency_ns))
            message = Message(0, task, (TENSORS[size], None), latency_ns)
            self.source.outputs += self.sender.send(envelope(message, self.now_ns))

    def announce(self, number: int) -> None:
        if self.source.is_stopped:
            return
        task = Task(1, Kind.B, len(self.announcements))
        purpose = TASK_PURPOSES[1 + number % 3]
        self.announcements.append(task)
        self.source.outputs += self.sender.announce(purpose, 0, task, number)

    def consume(self, number: int) -> None:
        if not self.destination.is_stopped and self.num_consumed < self.num_arrived:
            self.num_consumed += 1
            self.receiver.consumed(number)

    def grant(self, number: int) -> None:
        if not self.destination.is_stopped:
            self.bound = max(self.bound, number % 12)
            self.receiver.grant(number % 12)

    def begin_write(self, number: int) -> None:
        end = self.ends[number % 2]
        if not end.is_stopped:
            end.begin_write(self.now_ns)

    def write(self, number: int) -> None:
        end = self.ends[number % 2]
        if not end.is_stopped:
            end.begin_write(self.now_ns)
            end.end_write(number, self.now_ns)

    def carry(self, number: int) -> None:
        """Write, and be slow to say so."""
        end = self.ends[number % 2]
        if not end.is_stopped and end.begin_write(self.now_ns) and end.num_carried is None:
            end.num_carried = end.carry(number)

    def read(self, number: int) -> None:
        end = self.ends[number % 2]
        if not end.is_stopped:
            end.read(1 + number, self.now_ns)

    def look(self, number: int) -> None:
        end = self.ends[number % 2]
        if not end.is_stopped:
            end.look(self.now_ns)

    def pass_time(self, number: int) -> None:
        self.advance(number // 16 if number < 240 else 3 * SILENCE_NS)

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        for end in self.ends:
            if end.is_stopped:
                end.stopped_ns += duration_ns
            if end.close_deadline_ns is not None and self.now_ns >= end.close_deadline_ns:
                end.was_aborted = True

    def serve(self, number: int) -> None:
        """A whole round of a driver."""
        end = self.ends[number % 2]
        if not end.is_stopped:
            end.read(1000, self.now_ns)
            while end.begin_write(self.now_ns) and end.end_write(1000, self.now_ns):
                pass
            end.look(self.now_ns)

    def stop_or_resume(self, number: int) -> None:
        end = self.ends[number % 2]
        if end.is_stopped:
            end.is_stopped = False
        elif number >= 128:
            end.is_stopped = True
            end.num_stops += 1

    def close(self, number: int) -> None:
        end = self.ends[number % 2]
        if number < 160 or end.is_stopped:
            return
        self.begin_close(end, farewell=number < 240)

    def begin_close(self, end: End, *, farewell: bool) -> None:
        if end.state is not State.OVER:
            end.was_closing = True
            end.was_aborted |= not farewell
            end.close_deadline_ns = end.close_deadline_ns or self.now_ns + CLOSE_NS
        if end.num_unsent_at_close is None:
            end.num_unsent_at_close = self.num_unsent()
        end.link.channel.begin_close(self.now_ns + CLOSE_NS, farewell=farewell)

    def cut(self, number: int) -> None:
        """Break the connection, after some of what is under way."""
        if number < 64:
            return
        self.num_cuts += 1
        for end in self.ends:
            way = end.outgoing
            del way.data[number % 64 * len(way.data) // 63 :]
            way.is_shut = way.is_unread = True

    def part(self, number: int) -> None:
        if number < 250:
            return
        self.is_parted = True
        for end in self.ends:
            end.outgoing.data.clear()
            end.leave()

    def dial(self, number: int) -> None:
        """Do what the source's driver does when its link is broken."""
        source, answered = self.source, self.destination.link
        if not source.link.channel.is_broken or source.is_stopped or source.buffers:
            return
        if self.is_parted or (self.destination.is_closed and not answered.channel.has_peer_left):
            source.outputs += source.link.channel.fail_by_gone_peer()
            return
        self.num_attempts += 1
        there, back = Way(), Way()
        source.use(back, there)
        if self.destination.is_closed:
            back.data += answered.channel.reply_to_reconnect()
            back.is_shut = there.is_unread = True
        else:
            self.offers.append((self.num_attempts, there, back))

    def be_dialed(self, number: int) -> None:
        """Do what the destination's driver does with the first attempt that it receives."""
        end = self.destination
        if end.is_stopped or end.is_closed:
            return
        if self.offers and not end.buffers:
            attempt, there, back = self.offers.pop(number % len(self.offers))
            if attempt < self.last_attempt:
                there.is_unread = back.is_shut = True
                return
            self.last_attempt = attempt
            end.outputs += end.link.channel.break_connection("has connected again")
            if end.link.channel.is_broken:
                end.use(there, back)
            return
        if end.link.channel.is_broken and (self.is_parted or self.source.is_closed):
            end.outputs += end.link.channel.fail_by_gone_peer()

    ACTIONS: ClassVar[tuple[Callable[["World", int], None], ...]] = (  # pyright: ignore[reportAssignmentType]
        *(send, send, send, send, announce, consume, consume, grant),
        *(begin_write, carry, write, write, write, read, read, read, look, look),
        *(pass_time, serve, serve, serve, stop_or_resume, close, part),
        *(cut, cut, dial, dial, be_dialed, be_dialed),
    )

    def run(self, program: bytes) -> None:
        for index, number in zip(program[::2], program[1::2], strict=False):
            action = self.ACTIONS[index % len(self.ACTIONS)]
            self.story.append(f"{action.__name__}({number})")
            action(self, number)
            self.check()

    # What holds at every moment, and in the end.

    def check(self) -> None:
        for end in self.ends:
            end.close_if_over()
        for end in self.ends:
            for output in end.outputs[end.num_checked :]:
                self.check_output(end, output)
            end.num_checked = len(end.outputs)
            if end.failure:
                self.check_cause(end)
        held = self.num_arrived - self.num_consumed
        assert held <= self.bound + self.bound // 8, "more than the credits given"

    def check_output(self, end: End, output: Output) -> None:
        is_source = end is self.source
        match output:
            case LinkFailed(error):
                assert not end.failure, "a loss is told once"
                assert not end.was_closing, "who closes tells nothing"
                assert not end.has_left, "a clean farewell is no loss"
                end.failure = str(error)
                assert f"rank {end.link.channel.link.peer} " in end.failure
            case SendRecord():
                assert is_source
                assert output.sequence == self.num_recorded
                *_, latency_ns = self.messages[self.num_recorded]
                assert output.end_ns - output.start_ns >= latency_ns
                self.num_recorded += 1
            case ReceiveRecord():
                assert output.sequence == self.num_arrived - 1
            case _:
                assert not is_source
                assert not end.has_left, "nothing comes after a farewell"
                self.check_arrival(output)

    def check_arrival(self, output: Output) -> None:
        """Messages arrive once, and in the order in which they were sent."""
        match output:
            case PeerLeft():
                self.destination.has_left = True
            case MessageArrived(_, message):
                task, size, _ = self.messages[self.num_arrived]
                tensor, nothing = message.tensors
                assert message.task == task
                assert nothing is None
                assert tensor is not None
                assert tensor.equal(TENSORS[size])
                self.num_arrived += 1
            case InputReported() | TaskDecided() | InputForecast():
                assert output.task == self.announcements[self.num_told]
                self.num_told += 1

    def check_cause(self, end: End) -> None:
        """A reported loss has a cause."""
        told = end.failure
        peer = self.ends[1 - self.ends.index(end)]
        if "closed its connection" in told or "connected again" in told:
            assert self.is_parted or peer.was_aborted or peer.failure
        elif "while" in told or "has left or was lost" in told:
            assert end is self.source
            assert self.num_unsent() or self.num_cuts
        elif "times in a row" in told:
            assert self.num_cuts >= MAX_USELESS
        else:
            assert "was silent" in told or "has been down for" in told

    def num_unsent(self) -> int:
        """How many messages and announcements were not written whole."""
        return len(self.messages) + len(self.announcements) - len(self.source.tasks_written)

    def settle(self, *, consumes: bool = True) -> None:
        """Let both ends do all that they can, without more time than what messages wait for."""
        is_moving = True
        while is_moving:
            is_moving, was = False, self.connections
            for end in self.ends:
                if end.is_stopped:
                    continue
                if end.num_carried is not None:
                    # A slow write that ends may report a pipe that was full, and is not any more.
                    end.end_write(1000, self.now_ns)
                    is_moving = True
                while end.begin_write(self.now_ns) and end.end_write(1000, self.now_ns):
                    is_moving = True
                is_moving |= end.read(1000, self.now_ns) > 0
                if end.incoming.is_shut:
                    end.read(1000, self.now_ns)
                end.close_if_over()
            self.dial(0)
            self.be_dialed(0)
            is_moving |= self.connections != was
            self.check()
            consumes &= not self.destination.is_stopped
            while consumes and self.num_consumed < self.num_arrived:
                self.consume(0)
                is_moving = True
            due_ns = self.source.link.due_ns
            if not is_moving and due_ns is not None and not self.source.is_stopped:
                assert due_ns > self.now_ns
                self.advance(due_ns - self.now_ns)
                is_moving = True
        for end in self.ends:
            if not end.is_stopped:
                end.look(self.now_ns)
        self.check()

    @property
    def connections(self) -> tuple[object, ...]:
        """Choices for dialing again."""
        states = [(end.state, end.connection) for end in self.ends]
        return (*states, self.num_attempts, len(self.offers))

    def idle(self) -> None:
        """Let time pass; heartbeats keep both ends from taking the other one for lost."""
        written = [len(end.written) for end in self.ends]
        for _ in range(3 * SILENCE_NS // HEARTBEAT_NS):
            self.advance(HEARTBEAT_NS // 2)
            self.settle()
        for end, num_before in zip(self.ends, written, strict=True):
            assert Purpose.HEARTBEAT in end.written[num_before:]

    def flood(self) -> None:
        """A link holds as many messages as it was granted, before any is consumed."""
        for _ in range(2 * self.bound + 2):
            self.send(0)
        self.settle(consumes=False)
        assert self.num_arrived - self.num_consumed >= self.bound
        self.settle()

    def end(self, number: int) -> None:
        """Settle, close in one way or another, and see that everything has come to its end."""
        for end in self.ends:
            end.is_stopped = False
        is_fair = not self.is_parted and all(end.state is State.OPEN for end in self.ends)
        if number & 4:
            self.settle()
            if is_fair and number & 8:
                self.idle()
            if is_fair and number & 32:
                self.flood()
        is_whole = is_fair and all(end.state is State.OPEN for end in self.ends)
        assert is_whole or not is_fair
        if is_whole and number & 4:
            self.check_that_all_came()
        closing = [end for index, end in enumerate(self.ends) if number >> index & 1]
        closing = closing or [*self.ends]
        farewell = number < 160
        for end in closing:
            self.begin_close(end, farewell=farewell)
            self.check()
        if number & 16:
            self.leave_alone(closing)
            is_whole = False
        self.settle()
        if is_whole:
            self.check_end_of_whole_link(closing, farewell=farewell, is_settled=bool(number & 4))
        for end in self.ends:
            self.begin_close(end, farewell=True)
        self.settle()
        self.advance(CLOSE_NS)
        self.settle()
        for end in self.ends:
            assert end.state is State.OVER
            assert end.is_closed
        self.check_reports()

    def leave_alone(self, closing: list[End]) -> None:
        """An end that closes is over by its deadline, whatever the other end does."""
        for end in self.ends:
            end.is_stopped = end not in closing
        self.settle()
        self.advance(CLOSE_NS)
        self.settle()
        for end in self.ends:
            assert end.state is State.OVER or end.is_stopped
            end.is_stopped = False

    def check_that_all_came(self) -> None:
        assert self.num_consumed == len(self.messages), "a full link binds for ever"
        assert self.num_recorded == len(self.messages)
        assert self.num_told == len(self.announcements)
        assert self.num_unsent() == 0

    def check_end_of_whole_link(
        self, closing: list[End], *, farewell: bool, is_settled: bool
    ) -> None:
        """Both ends were open, and nobody was stopped or cut off."""
        if closing == [self.source] and farewell and not self.source.was_aborted:
            self.check_that_all_came()
        if not is_settled:
            return
        for end in self.ends:
            assert end.state is State.OVER, "one end that closes ends both"
            if farewell:
                assert not end.failure, "a clean farewell is no loss"
            elif end not in closing:
                assert "closed its connection without a farewell" in end.failure
        if farewell:
            assert self.destination.has_left is (self.destination not in closing)

    def check_reports(self) -> None:
        """An end that was over without having closed has told why, once."""
        if not self.destination.was_closing:
            assert self.destination.has_left != bool(self.destination.failure)
        if not self.source.was_closing and self.source.num_unsent_at_close:
            assert self.source.failure
