"""The receiving end of a directed link."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rrfp.runtime.link.channel import Far, Link, LinkOptions, Outbound, Output, State
from rrfp.runtime.link.wire import Frame, FrameError, Header, Purpose
from rrfp.runtime.planes.codec import forms_of, payload_of
from rrfp.runtime.planes.plane import Pull
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Arrived, Decided, Forecast, Left, Message, Reported
from rrfp.schedule.tasks import Task
from rrfp.trace.records import ReceiveRecord

_INLINE = str(TransportName.INLINE)

_BATCHES = 8
"""In which credits are given back, of a link that holds as many or more."""


@dataclass(frozen=True, slots=True)
class LinkPlane:
    """What the receiving end of a link knows of its data plane."""

    name: str
    lands: bool = False
    """Whether tensors that the socket has carried are still to be taken to the device."""
    frees_slots: bool = False
    """Whether the peer's slot of such tensors is free once this end has acknowledged them."""


class DestinationLink(Link):
    """The end that receives messages and what is announced, and gives credits."""

    is_source = False

    def __init__(
        self,
        rank: int,
        peer: int,
        options: LinkOptions,
        now_ns: int,
        num_credits: int,
        plane: LinkPlane | None = None,
        far: Far | None = None,
    ) -> None:
        """The link must be able to hold `num_credits` messages that were not consumed; `plane`
        serves its posted messages."""
        super().__init__(rank, peer, options, now_ns, far)
        self._plane = plane
        if plane is not None and plane.frees_slots:
            # The peer's slot is free as soon as it knows.
            self._heard.confirm_bytes = 1
        self._has_let_go = plane is None
        self._pulls: dict[int, Pull] = {}
        """What is being pulled, by its sequence number."""
        self._releases: deque[int] = deque()
        """The offsets of slots that the peer may fill again."""
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

    @property
    def is_pulling(self) -> bool:
        return bool(self._pulls)

    @property
    def is_lost(self) -> bool:
        """Whether it is over and the peer has not said farewell."""
        return self.state is State.OVER and not self.has_peer_left

    @property
    def may_detach(self) -> bool:
        """Whether nothing is pulled any more: its farewell is next or out, or the link is over."""
        return self.state is State.OVER or (self.state is not State.OPEN and not self._pulls)

    def let_go(self) -> None:
        """This rank has let go of the peer's memory."""
        self._has_let_go = True

    def release(self, offset: int) -> None:
        """The tensors in a lent slot are gone. Any thread may call it at any time, without a lock:
        whatever is written next tells the peer."""
        self._releases.append(offset)

    def pulled(
        self, pull: Pull, tensors: Sequence[torch.Tensor | None], now_ns: int
    ) -> list[Output]:
        """A message is here."""
        if self.state is State.OVER:
            return []
        plane = self._plane
        assert plane is not None
        del self._pulls[pull.sequence]
        if pull.inline is None and not pull.is_lent:
            self._releases.append(pull.offset)
        outputs = self._arrived(
            *(Message(pull.step, pull.task, tuple(tensors)), pull.sequence, pull.heard_ns, now_ns),
            *(payload_of(pull.forms), plane.name, pull.begun_ns),
        )
        return outputs + self._answer_farewell()

    def _num_queued(self) -> int:
        # Credits are of no use to a source once this end closes, and its farewell frees its slots.
        return len(self._pulls)

    def _own_outbound(self, now_ns: int) -> Outbound | None:
        # The peer frees its memory once it has this end's farewell.
        if self.state is State.DRAINING and not self._has_let_go:
            return None
        return super()._own_outbound(now_ns)

    def _next_outbound(self, now_ns: int) -> Outbound | None:
        if self._releases:
            return Outbound(Header(Purpose.RELEASED, number=self._releases.popleft()))
        if self._num_unannounced < self._batch:
            return None
        number, self._num_unannounced = self._num_unannounced, 0
        self._num_announced += number
        return Outbound(Header(Purpose.CREDIT, self._last_step, number=number))

    def _sent(self, outbound: Outbound, now_ns: int) -> list[Output]:
        return []

    def _acknowledged(self, outbound: Outbound) -> list[Output]:
        return []

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
        if header.purpose is not Purpose.MESSAGE:
            return self._posted(frame, task, now_ns)
        plane = self._plane
        if plane is not None and plane.lands and frame.tensors:
            return self._begin(frame, task, 0, now_ns, frame.tensors)
        message = Message(header.step, task, frame.tensors)
        return self._arrived(message, header.sequence, frame.arrived_ns, now_ns, frame.num_bytes)

    def _posted(self, frame: Frame, task: Task, now_ns: int) -> list[Output]:
        if self._plane is None:
            raise FrameError(f"a source posted {task} on a link without an outbox")
        return self._begin(frame, task, frame.header.number, now_ns)

    def _begin(
        self,
        frame: Frame,
        task: Task,
        offset: int,
        now_ns: int,
        inline: tuple[torch.Tensor | None, ...] | None = None,
    ) -> list[Output]:
        """Have a message pulled."""
        if self._is_closing:
            return []
        header = frame.header
        pull = Pull(
            *(header.step, task, header.sequence),
            *(frame.forms if inline is None else forms_of(inline), offset, frame.arrived_ns),
            is_lent=header.purpose is Purpose.LENT,
            inline=inline,
            begun_ns=now_ns,
        )
        self._pulls[header.sequence] = pull
        return [pull]

    def _arrived(
        self,
        message: Message,
        sequence: int,
        heard_ns: int,
        now_ns: int,
        num_bytes: int,
        plane: str = _INLINE,
        begun_ns: int | None = None,
    ) -> list[Output]:
        outputs: list[Output] = [Arrived(self.peer, message, now_ns)]
        if self._options.keeps_records:
            task = message.task
            outputs.append(
                ReceiveRecord(
                    heard_ns,
                    now_ns,
                    message.step,
                    task.kind,
                    task.stage,
                    task.microbatch,
                    self.peer,
                    sequence,
                    num_bytes,
                    plane,
                    *(() if begun_ns is None else (begun_ns - heard_ns, now_ns - begun_ns)),
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
