"""A link without a socket, which a program drives, and what holds of it at every moment.

A program of random bytes says what happens next: who sends, reads, writes, waits, closes, is
stopped, and how much of it; where the connection is cut, when it is made again, and in which order
the destination hears of that. Each step is one call of the protocol, so that a write of one thread
may have begun and not ended while another one reads, closes or sends.
"""

from collections.abc import Callable
from typing import ClassVar

import torch

from rrfp.runtime.link.channel import MOST_USELESS, Far, Output, State
from rrfp.runtime.link.receiver import DestinationLink
from rrfp.runtime.link.sender import SourceLink
from rrfp.runtime.link.wire import Purpose
from rrfp.runtime.protocols import Arrived, Decided, Failed, Forecast, Left, Message, Reported
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, SendRecord
from tests.link_end import CLOSE_NS, HEARTBEAT_NS, OPTIONS, SILENCE_NS, End, Way

TASK_PURPOSES = (Purpose.MESSAGE, Purpose.REPORT, Purpose.DECISION, Purpose.FORECAST)
TENSORS = tuple(torch.arange(size, dtype=torch.uint8) for size in (0, 1, 5))


class World:
    """A link, its two ends and what became of all that was sent on it."""

    def __init__(self, num_credits: int, *, is_far: bool = False) -> None:
        self.now_ns = 0
        there, back = Way(), Way()
        far, raf = (Far("a", "b"), Far("b", "a")) if is_far else (None, None)
        self.source_link = SourceLink(0, 1, OPTIONS, 0, far=far)
        self.destination_link = DestinationLink(1, 0, OPTIONS, 0, num_credits, far=raf)
        self.source = End(self.source_link, back, there)
        self.destination = End(self.destination_link, there, back)
        self.ends = (self.source, self.destination)
        self.bound = num_credits
        self.messages: list[tuple[Task, int, int]] = []
        """What was sent: each task, which tensor it took, and its latency."""
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
        """What the source has dialled and the destination has not heard of, by attempt."""
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
            self.source.outputs += self.source_link.send(message, self.now_ns)

    def announce(self, number: int) -> None:
        if self.source.is_stopped:
            return
        task = Task(1, Kind.B, len(self.announcements))
        purpose = TASK_PURPOSES[1 + number % 3]
        self.announcements.append(task)
        self.source.outputs += self.source_link.announce(purpose, 0, task, number)

    def consume(self, number: int) -> None:
        if not self.destination.is_stopped and self.num_consumed < self.num_arrived:
            self.num_consumed += 1
            self.destination_link.consumed(number)

    def grant(self, number: int) -> None:
        if not self.destination.is_stopped:
            self.bound = max(self.bound, number % 12)
            self.destination_link.grant(number % 12)

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
        if end.link.state is not State.OVER:
            end.was_closing = True
            end.was_aborted |= not farewell
            end.close_deadline_ns = end.close_deadline_ns or self.now_ns + CLOSE_NS
        if end.num_unsent_at_close is None:
            end.num_unsent_at_close = self.num_unsent()
        end.link.begin_close(self.now_ns + CLOSE_NS, farewell=farewell)

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
        """What the source's driver does when its link is broken."""
        source, answered = self.source, self.destination.link
        if not source.link.is_broken or source.is_stopped or source.buffers:
            return
        if self.is_parted or (self.destination.is_closed and not answered.has_peer_left):
            source.outputs += source.link.lose_gone()
            return
        self.num_attempts += 1
        there, back = Way(), Way()
        source.use(back, there)
        if self.destination.is_closed:
            back.data += answered.parting_words()
            back.is_shut = there.is_unread = True
        else:
            self.offers.append((self.num_attempts, there, back))

    def be_dialled(self, number: int) -> None:
        """What the destination's driver does, with whatever attempt it hears of first."""
        end = self.destination
        if end.is_stopped or end.is_closed:
            return
        if self.offers and not end.buffers:
            attempt, there, back = self.offers.pop(number % len(self.offers))
            if attempt < self.last_attempt:
                there.is_unread = back.is_shut = True
                return
            self.last_attempt = attempt
            end.outputs += end.link.break_off("has connected again")
            if end.link.is_broken:
                end.use(there, back)
            return
        if end.link.is_broken and (self.is_parted or self.source.is_closed):
            end.outputs += end.link.lose_gone()

    ACTIONS: ClassVar[tuple[Callable[["World", int], None], ...]] = (
        *(send, send, send, send, announce, consume, consume, grant),
        *(begin_write, carry, write, write, write, read, read, read, look, look),
        *(pass_time, serve, serve, serve, stop_or_resume, close, part),
        *(cut, cut, dial, dial, be_dialled, be_dialled),
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
            case Failed(error):
                assert not end.failure, "a loss is told once"
                assert not end.was_closing, "who closes tells nothing"
                assert not end.has_left, "a clean farewell is no loss"
                end.failure = str(error)
                assert f"rank {end.link.peer} " in end.failure
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
        """What comes is what was sent, in the order in which it was sent, once."""
        match output:
            case Left():
                self.destination.has_left = True
            case Arrived(_, message):
                task, size, _ = self.messages[self.num_arrived]
                tensor, nothing = message.tensors
                assert message.task == task
                assert nothing is None
                assert tensor is not None
                assert tensor.equal(TENSORS[size])
                self.num_arrived += 1
            case Reported() | Decided() | Forecast():
                assert output.task == self.announcements[self.num_told]
                self.num_told += 1

    def check_cause(self, end: End) -> None:
        """A loss that was told has a cause."""
        told = end.failure
        peer = self.ends[1 - self.ends.index(end)]
        if "closed its connection" in told or "connected again" in told:
            assert self.is_parted or peer.was_aborted or peer.failure
        elif "while" in told or "has left or was lost" in told:
            assert end is self.source
            assert self.num_unsent() or self.num_cuts
        elif "times in a row" in told:
            assert self.num_cuts >= MOST_USELESS
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
                while end.begin_write(self.now_ns) and end.end_write(1000, self.now_ns):
                    is_moving = True
                is_moving |= end.read(1000, self.now_ns) > 0
                if end.incoming.is_shut:
                    end.read(1000, self.now_ns)
                end.close_if_over()
            self.dial(0)
            self.be_dialled(0)
            is_moving |= self.connections != was
            self.check()
            consumes &= not self.destination.is_stopped
            while consumes and self.num_consumed < self.num_arrived:
                self.consume(0)
                is_moving = True
            due_ns = self.source_link.due_ns
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
        """What dialling changes."""
        states = [(end.link.state, end.link.connection) for end in self.ends]
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
        is_fair = not self.is_parted and all(end.link.state is State.OPEN for end in self.ends)
        if number & 4:
            self.settle()
            if is_fair and number & 8:
                self.idle()
            if is_fair and number & 32:
                self.flood()
        is_whole = is_fair and all(end.link.state is State.OPEN for end in self.ends)
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
            assert end.link.state is State.OVER
            assert end.is_closed
        self.check_what_was_told()

    def leave_alone(self, closing: list[End]) -> None:
        """Whoever closes is over by its deadline, whatever the other end does."""
        for end in self.ends:
            end.is_stopped = end not in closing
        self.settle()
        self.advance(CLOSE_NS)
        self.settle()
        for end in self.ends:
            assert end.link.state is State.OVER or end.is_stopped
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
            assert end.link.state is State.OVER, "one end that closes ends both"
            if farewell:
                assert not end.failure, "a clean farewell is no loss"
            elif end not in closing:
                assert "closed its connection without a farewell" in end.failure
        if farewell:
            assert self.destination.has_left is (self.destination not in closing)

    def check_what_was_told(self) -> None:
        """An end that was over without having closed has told why, once."""
        if not self.destination.was_closing:
            assert self.destination.has_left != bool(self.destination.failure)
        if not self.source.was_closing and self.source.num_unsent_at_close:
            assert self.source.failure
