"""The receiving end of a directed link."""

import socket

from rrfp.runtime.links import LinkEnd, LinkOptions, Outbound, bare
from rrfp.runtime.protocols import Arrived, Decided, Event, Inbox, Left, Message, Reported
from rrfp.runtime.wire import Frame, FrameError, Header, Purpose
from rrfp.trace.records import ReceiveRecord

_BATCHES = 8
"""In which credits are given back, of a link that holds as many or more."""


class DestinationEnd(LinkEnd):
    """The end that receives messages, reports and decisions, and gives credits."""

    def __init__(
        self,
        rank: int,
        peer: int,
        connection: socket.socket,
        inbox: Inbox,
        options: LinkOptions,
        num_credits: int,
    ) -> None:
        # Guarded by the lock.
        self._bound = num_credits
        self._num_unannounced = _granted(num_credits)
        self._num_unconsumed = 0
        self._last_step = 0
        # Of the thread alone.
        self._num_announced = 0
        self._num_received = 0
        super().__init__(rank, peer, connection, inbox, options)

    def consumed(self, step: int) -> None:
        """The compute thread took a message: give its credit back."""
        with self._lock:
            assert self._num_unconsumed > 0, f"more consumed than rank {self.peer} has sent"
            self._num_unconsumed -= 1
            self._num_unannounced += 1
            self._last_step = step
            if self._num_unannounced >= _batch(self._bound):
                self._wake()

    def grant(self, num_credits: int) -> None:
        """Raise the bound on messages in flight; a smaller one changes nothing."""
        with self._lock:
            if num_credits > self._bound:
                self._num_unannounced += _granted(num_credits) - _granted(self._bound)
                self._bound = num_credits
                self._wake()

    def _name(self) -> str:
        return f"rrfp-receive-from-{self.peer}"

    def _num_queued(self) -> int:
        # Credits are of no use to a source once this end closes.
        return 0

    def _next_outbound(self) -> Outbound | None:
        with self._lock:
            if self._num_unannounced < _batch(self._bound):
                return None
            number, self._num_unannounced = self._num_unannounced, 0
            step = self._last_step
        self._num_announced += number
        return bare(Header(Purpose.CREDIT, step, number=number))

    def _written(self, outbound: Outbound) -> None:
        """Nothing to do: only messages are recorded."""

    def _peer_left(self) -> None:
        self._inbox.put(Left(self.peer))

    def _take(self, frame: Frame) -> None:
        header, task = frame.header, frame.header.task
        if task is None:
            raise FrameError(f"a source sent a {header.purpose.name.lower()}")
        event: Event
        match header.purpose:
            case Purpose.REPORT:
                event = Reported(self.peer, header.step, task)
            case Purpose.DECISION:
                event = Decided(self.peer, header.step, header.number, task)
            case _:
                self._admit(header.sequence)
                event = Arrived(self.peer, Message(header.step, task, frame.tensors))
        # Taken first: once it is in the inbox, its task may begin before this thread goes on.
        end_ns = self._options.clock()
        self._inbox.put(event)
        record = self._options.record
        if header.purpose is Purpose.MESSAGE and record is not None:
            record(
                ReceiveRecord(
                    frame.arrived_ns,
                    end_ns,
                    header.step,
                    task.kind,
                    task.stage,
                    task.microbatch,
                    self.peer,
                    header.sequence,
                    frame.num_bytes,
                )
            )

    def _admit(self, sequence: int) -> None:
        """Check that a message is the next one and within its credits."""
        if sequence != self._num_received:
            raise FrameError(f"message {sequence} came where {self._num_received} was due")
        if self._num_received >= self._num_announced:
            raise FrameError(f"message {sequence} came beyond {self._num_announced} credits")
        self._num_received += 1
        with self._lock:
            self._num_unconsumed += 1


def _batch(num_credits: int) -> int:
    """So many credits are given back at a time: each time wakes a thread on both ranks."""
    return 1 + num_credits // _BATCHES


def _granted(num_credits: int) -> int:
    """Credits of a link that is to hold so many messages while a part of a batch waits."""
    return num_credits + _batch(num_credits) - 1
