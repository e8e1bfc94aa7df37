"""The receiving end of a directed link."""

from rrfp.runtime.protocols import Arrived, Decided, Forecast, Left, Message, Reported
from rrfp.runtime.transport.link import Link, LinkOptions, Outbound, Output, bare
from rrfp.runtime.transport.wire import Frame, FrameError, Header, Purpose
from rrfp.trace.records import ReceiveRecord

_BATCHES = 8
"""In which credits are given back, of a link that holds as many or more."""


class DestinationLink(Link):
    """The end that receives messages and what is announced, and gives credits."""

    def __init__(
        self, rank: int, peer: int, options: LinkOptions, now_ns: int, num_credits: int
    ) -> None:
        """The link must be able to hold `num_credits` messages that were not consumed."""
        super().__init__(rank, peer, options, now_ns)
        self._bound = num_credits
        self._batch = _batch(num_credits)
        self._num_unannounced = _granted(num_credits)
        self._num_announced = 0
        self._num_received = 0
        self._num_unconsumed = 0
        self._last_step = 0

    def consumed(self, step: int) -> bool:
        """The compute thread took a message: give its credit back. Tells whether there are credits
        to write now."""
        assert self._num_unconsumed > 0, f"more consumed than rank {self.peer} has sent"
        self._num_unconsumed -= 1
        self._num_unannounced += 1
        self._last_step = step
        return self._num_unannounced >= self._batch

    def grant(self, num_credits: int) -> bool:
        """Raise the bound on messages in flight; a smaller one changes nothing. Tells whether there
        are credits to write now."""
        if num_credits > self._bound:
            self._num_unannounced += _granted(num_credits) - _granted(self._bound)
            self._bound = num_credits
            self._batch = _batch(num_credits)
        return self._num_unannounced >= self._batch

    def _num_queued(self) -> int:
        # Credits are of no use to a source once this end closes.
        return 0

    def _next_outbound(self, now_ns: int) -> Outbound | None:
        if self._num_unannounced < self._batch:
            return None
        number, self._num_unannounced = self._num_unannounced, 0
        self._num_announced += number
        return bare(Header(Purpose.CREDIT, self._last_step, number=number))

    def _sent(self, outbound: Outbound, message: Message, now_ns: int) -> list[Output]:
        raise AssertionError("a destination sends no message")

    def _peer_left(self) -> list[Output]:
        return [Left(self.peer)]

    def _take(self, frame: Frame, now_ns: int) -> list[Output]:
        header, task = frame.header, frame.header.task
        if task is None:
            raise FrameError(f"a source sent a {header.purpose.name.lower()}")
        match header.purpose:
            case Purpose.REPORT:
                return [Reported(self.peer, header.step, task)]
            case Purpose.DECISION:
                return [Decided(self.peer, header.step, header.number, task)]
            case Purpose.FORECAST:
                return [Forecast(self.peer, header.step, task, frame.arrived_ns, header.number)]
        self._admit(header.sequence)
        message = Message(header.step, task, frame.tensors)
        outputs: list[Output] = [Arrived(self.peer, message, now_ns)]
        if self._options.keeps_records:
            outputs.append(
                ReceiveRecord(
                    frame.arrived_ns,
                    now_ns,
                    header.step,
                    task.kind,
                    task.stage,
                    task.microbatch,
                    self.peer,
                    header.sequence,
                    frame.num_bytes,
                )
            )
        return outputs

    def _admit(self, sequence: int) -> None:
        """Check that a message is the next one and within its credits."""
        if sequence != self._num_received:
            raise FrameError(f"message {sequence} came where {self._num_received} was due")
        if self._num_received >= self._num_announced:
            raise FrameError(f"message {sequence} came beyond {self._num_announced} credits")
        self._num_received += 1
        self._num_unconsumed += 1


def _batch(num_credits: int) -> int:
    """So many credits are given back at a time: each time wakes a thread on both ranks."""
    return 1 + num_credits // _BATCHES


def _granted(num_credits: int) -> int:
    """Credits of a link that is to hold so many messages while a part of a batch waits."""
    return num_credits + _batch(num_credits) - 1
