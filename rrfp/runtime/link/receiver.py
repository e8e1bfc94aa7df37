"""The receiving direction of a link: credits, the order of messages, and their fetching.

The destination owns the bound on messages in flight. It gives all credits when the link opens and
one back for each message that was consumed, several at a time; without credit messages wait in the
source's queue.

A staged message is fetched through the data plane before it arrives, and then its slot is released.
The receiver says farewell only when nothing is being fetched, so that its source may then free the
memory.
"""

from collections import deque
from dataclasses import dataclass

from rrfp.runtime.link.channel import Channel, OutgoingFrame, Output, State
from rrfp.runtime.link.wire import Frame, Header, Purpose
from rrfp.runtime.planes.codec import FrameError, form_bytes, forms_of
from rrfp.runtime.planes.plane import (
    NO_SLOT,
    Completion,
    Descriptor,
    Fetch,
    Fetched,
    PlaneFailed,
    SlotFreed,
)
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import (
    InputForecast,
    InputReported,
    Message,
    MessageArrived,
    PeerLeft,
    TaskDecided,
)
from rrfp.schedule.tasks import Task
from rrfp.trace.records import ReceiveRecord

_INLINE = str(TransportName.INLINE)

_BATCHES = 8
"""A link gives its credits back in this many batches, if it has as many or more."""


@dataclass(frozen=True, slots=True, eq=False)
class FetchTicket:
    """A message that the data plane fetches."""

    step: int
    task: Task
    sequence: int
    descriptor: Descriptor
    frame_ns: int
    """Time at which its frame arrived."""
    begun_ns: int
    """Time at which the fetch began."""


@dataclass(frozen=True, slots=True)
class PlaneUse:
    """The receiver's use of its link's data plane."""

    name: str
    lands: bool = False
    """True if tensors that the socket has carried are fetched, too: to the device."""
    is_carried: bool = False
    """True if the peer's slot of such tensors is free once this end has acknowledged them."""


class Receiver:
    """The receiving direction of a link: receives messages and announcements, and gives credits.
    Implements `Direction`."""

    is_quick = waits_for_peer = False
    due_ns = None

    def __init__(self, channel: Channel, num_credits: int, plane: PlaneUse | None = None) -> None:
        """The link must be able to hold `num_credits` messages that were not consumed; `plane`
        serves its staged messages."""
        self._channel = channel
        self._link = channel.link
        self._plane = plane
        if plane is not None and plane.is_carried:
            # The peer's slot is free as soon as it has the acknowledgement.
            channel.acknowledge_bytes = 1
        self._fetching: dict[int, FetchTicket] = {}
        """Messages in flight on the plane, by sequence number."""
        self._releases: deque[int] = deque()
        """Offsets of slots that the peer may use again."""
        self._bound = num_credits
        self._batch = _batch(num_credits)
        self._num_unannounced = _granted(num_credits)
        self._num_announced = 0
        self._num_received = 0
        self._num_unconsumed = 0
        self._last_step = 0

    def consumed(self, step: int) -> bool:
        """Note that the compute thread took a message, whose credit may be given back. Return
        whether a batch of credits is to be written now."""
        assert self._num_unconsumed > 0, f"more consumed than rank {self._link.peer} has sent"
        self._num_unconsumed -= 1
        self._num_unannounced += 1
        self._last_step = step
        return self._num_unannounced >= self._batch

    def grant(self, num_credits: int) -> bool:
        """Raise the bound on messages in flight; a smaller one changes nothing. Return whether a
        batch of credits is to be written now."""
        if num_credits > self._bound:
            self._num_unannounced += _granted(num_credits) - _granted(self._bound)
            self._bound = num_credits
            self._batch = _batch(num_credits)
        return self._num_unannounced >= self._batch

    @property
    def num_queued(self) -> int:
        """Number of messages that are being fetched; credits and released slots do not count."""
        # A source has no use for credits once this end closes, and its farewell frees its slots.
        return len(self._fetching)

    @property
    def uses_plane(self) -> bool:
        """True while a message is being fetched."""
        return bool(self._fetching)

    awaits_plane = uses_plane

    def complete(self, completion: Completion, now_ns: int) -> list[Output]:
        """Return the arrival of a fetched message, and queue the release of its slot unless it is
        lent or the socket carried it; nothing once the link is over. A freed lent slot is queued
        for release; a failure of the plane ends the link."""
        if isinstance(completion, SlotFreed):
            # The next frame that is written carries it.
            self._releases.append(completion.offset)
            return []
        if isinstance(completion, PlaneFailed):
            return self._channel.fail(completion.error)
        assert isinstance(completion, Fetched)
        if self._channel.state is State.OVER:
            return []
        ticket = completion.ticket
        assert isinstance(ticket, FetchTicket)
        assert self._plane is not None
        del self._fetching[ticket.sequence]
        descriptor = ticket.descriptor
        if descriptor.carried is None and not descriptor.is_lent:
            self._releases.append(descriptor.offset)
        message = Message(ticket.step, ticket.task, tuple(completion.tensors))
        return self._arrived(
            message,
            ticket.sequence,
            ticket.frame_ns,
            now_ns,
            form_bytes(descriptor.forms),
            self._plane.name,
            ticket.begun_ns,
        )

    def next_frame(self, now_ns: int) -> OutgoingFrame | None:
        """Remove and return the frame of the next released slot, or else one with all free credits
        once they are a batch; else None."""
        if self._releases:
            return OutgoingFrame(Header(Purpose.RELEASED, number=self._releases.popleft()))
        if self._num_unannounced < self._batch:
            return None
        number, self._num_unannounced = self._num_unannounced, 0
        self._num_announced += number
        return OutgoingFrame(Header(Purpose.CREDIT, self._last_step, number=number))

    def written(self, frame: OutgoingFrame, now_ns: int) -> list[Output]:
        """Return nothing: the frames of a receiver need no record."""
        return []

    def acknowledged(self, frame: OutgoingFrame) -> list[Output]:
        """Return nothing: the frames of a receiver hold no memory."""
        return []

    def peer_left(self) -> list[Output]:
        """Return the event that the peer has left."""
        return [PeerLeft(self._link.peer)]

    def received(self, frame: Frame, now_ns: int) -> list[Output]:
        """Return the event of an announcement, or of a message with its record; a message in a
        slot, or one to copy to the device, is fetched first. Raises FrameError for another frame,
        or a message out of order or without a credit."""
        header, task, peer = frame.header, frame.header.task, self._link.peer
        if task is None:
            raise FrameError(f"a source sent a {header.purpose.name.lower()}")
        match header.purpose:
            case Purpose.REPORT:
                return [InputReported(peer, header.step, task)]
            case Purpose.DECISION:
                return [TaskDecided(peer, header.step, header.number, task)]
            case Purpose.FORECAST:
                return [InputForecast(peer, header.step, task, frame.arrived_ns, header.number)]
        self._admit(header.sequence)
        plane = self._plane
        if header.purpose is not Purpose.MESSAGE:
            if plane is None:
                raise FrameError(f"a source posted {task} on a link without an outbox")
            is_lent = header.purpose is Purpose.LENT
            return self._fetch(frame, task, Descriptor(frame.forms, header.number, is_lent), now_ns)
        if plane is not None and plane.lands and frame.tensors:
            forms = forms_of(frame.tensors)
            descriptor = Descriptor(forms, NO_SLOT, carried=frame.tensors)
            return self._fetch(frame, task, descriptor, now_ns)
        message = Message(header.step, task, frame.tensors)
        return self._arrived(message, header.sequence, frame.arrived_ns, now_ns, frame.num_bytes)

    def _fetch(self, frame: Frame, task: Task, descriptor: Descriptor, now_ns: int) -> list[Output]:
        """Return the request to fetch a message's tensors by the plane, and note the fetch; nothing
        if this end closes."""
        if self._channel.is_closing:
            return []
        header = frame.header
        ticket = FetchTicket(
            header.step, task, header.sequence, descriptor, frame.arrived_ns, now_ns
        )
        self._fetching[header.sequence] = ticket
        return [Fetch(descriptor, ticket)]

    def _arrived(
        self,
        message: Message,
        sequence: int,
        frame_ns: int,
        now_ns: int,
        num_bytes: int,
        plane: str = _INLINE,
        begun_ns: int | None = None,
    ) -> list[Output]:
        """Return the event of a message that is here, and its record if records are kept;
        `begun_ns` is the begin of its fetch, if any."""
        peer, task = self._link.peer, message.task
        outputs: list[Output] = [MessageArrived(peer, message, now_ns)]
        if self._channel.options.keeps_records:
            record = ReceiveRecord(
                frame_ns,
                now_ns,
                message.step,
                task.kind,
                task.stage,
                task.microbatch,
                peer,
                sequence,
                num_bytes,
                plane,
            )
            if begun_ns is not None:
                record = record._replace(queued_ns=begun_ns - frame_ns, copy_ns=now_ns - begun_ns)
            outputs.append(record)
        return outputs

    def _admit(self, sequence: int) -> None:
        """Check that a message is the next one, and within its credits, and count it. Raises
        FrameError."""
        if sequence != self._num_received:
            raise FrameError(f"message {sequence} came where {self._num_received} was due")
        if self._num_received >= self._num_announced:
            raise FrameError(f"message {sequence} came beyond {self._num_announced} credits")
        self._num_received += 1
        self._num_unconsumed += 1


def _batch(num_credits: int) -> int:
    """Return the number of credits to give back at a time, one more than an eighth of all: each
    time wakes a thread on both ranks."""
    return 1 + num_credits // _BATCHES


def _granted(num_credits: int) -> int:
    """Return the credits of a link that must hold this many messages while up to a batch less one
    is not given back yet."""
    return num_credits + _batch(num_credits) - 1
