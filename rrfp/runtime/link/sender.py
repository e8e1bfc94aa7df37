"""The sending direction of a link: a queue of envelopes, credits, and announcements.

Reports, decisions and forecasts need no credit and overtake messages. In a paced run a message
stays in front of the queue until its modeled time has passed, one after the other, as on a link of
the simulator; the time of the wire itself follows.

A staged message waits in the same queue. The peer may use its slot from its frame on, until the
peer releases it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rrfp.runtime.link.channel import Channel, OutgoingFrame, Output, State
from rrfp.runtime.link.wire import Frame, Header, Purpose, checksum_of
from rrfp.runtime.planes.codec import FrameError, Tensors, tensor_bytes
from rrfp.runtime.planes.plane import (
    NO_SLOT,
    Completion,
    Descriptor,
    PlaneFailed,
    Release,
    Staged,
)
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, SendRecord

_INLINE = str(TransportName.INLINE)
_QUICK_BYTES = 2**18
"""The thread that sends a message computes its checksum, if it has fewer bytes than this."""


@dataclass(slots=True, eq=False)
class Envelope:
    """A message as its sender handles it: its task, and what the frame carries."""

    step: int
    task: Task
    tensors: Tensors
    """Tensors that the socket carries; none if the message is in a slot."""
    num_bytes: int
    """Bytes of the message's tensors, wherever they are."""
    queued_ns: int
    """Time at which the compute thread queued it."""
    latency_ns: int = 0
    descriptor: Descriptor | None = None
    """Place of its tensors, if they are staged."""
    begun_ns: int = 0
    copied_ns: int = 0
    """Begin and end of the copy to its slot."""


class Sender:
    """The sending direction of a link: sends messages, which need a credit, and announcements,
    which need none. Implements `Direction`."""

    awaits_plane = False

    def __init__(
        self,
        channel: Channel,
        draw_delay_s: Callable[[], float] | None = None,
        plane: str = TransportName.INLINE,
    ) -> None:
        """`draw_delay_s` draws the delay of each message, for tests of whole runs; records of
        staged messages name the `plane`."""
        self._channel = channel
        self._link = channel.link
        self._checks_tensors = channel.link.checks_tensors
        self._plane = str(plane)
        self._num_staging = 0
        self._lent: set[int] = set()
        """Offsets of the slots that the peer has not released."""
        self._messages: deque[Envelope] = deque()
        self._announcements: deque[Header] = deque()
        self._num_credits = 0
        self._num_sent = 0
        self._free_ns = 0
        """Time at which the last message was written whole."""
        self._draw_delay_s = draw_delay_s
        self._delayed_until_ns: int | None = None
        """End of the delay of the message in front, once it has begun."""

    def send(self, envelope: Envelope) -> list[Output]:
        """Queue a message. If the link is over, return the error that reports it instead."""
        if self._channel.state is State.OVER:
            return self._report_unsent(envelope.task)
        self._messages.append(envelope)
        return []

    def begin_staging(self) -> bool:
        """Note that the plane stages a message, which `complete` will queue. Return False: there is
        nothing to write yet."""
        self._num_staging += 1
        return False

    def announce(self, purpose: Purpose, step: int, task: Task, number: int) -> list[Output]:
        """Queue a report, a decision or a forecast, with its `Header.number`. If the link is over,
        return the error that reports it instead."""
        if self._channel.state is State.OVER:
            return self._report_unsent(task)
        self._announcements.append(Header(purpose, step, task, number=number))
        return []

    def _report_unsent(self, task: Task) -> list[Output]:
        """Return the error that a task's message cannot be sent, because the link is over; empty if
        a loss was reported before or this end closes."""
        what = self._link.describe_lost(
            f"has left or was lost before it was sent what {task} needs"
        )
        return self._channel.report(PeerLostError(what, self._link.peer_origin))

    def complete(self, completion: Completion, now_ns: int) -> list[Output]:
        """Queue a message whose tensors the plane has staged. A failure of the plane ends the
        link."""
        if isinstance(completion, PlaneFailed):
            return self._channel.fail(completion.error)
        assert isinstance(completion, Staged)
        envelope = completion.ticket
        assert isinstance(envelope, Envelope)
        self._num_staging -= 1
        envelope.descriptor = completion.descriptor
        envelope.tensors = completion.descriptor.carried or ()
        envelope.begun_ns, envelope.copied_ns = completion.begun_ns, completion.copied_ns
        return self.send(envelope)

    @property
    def num_queued(self) -> int:
        """Number of messages and announcements that wait to be written."""
        return len(self._messages) + len(self._announcements)

    @property
    def uses_plane(self) -> bool:
        """True while the plane stages a message."""
        return self._num_staging > 0

    @property
    def is_quick(self) -> bool:
        """False if the message in front has 256 KiB or more, was not staged, and its checksum is to
        be computed, which the link's thread should do; else True, and always while an announcement
        is queued."""
        if self._checks_tensors and self._messages and not self._announcements:
            envelope = self._messages[0]
            return envelope.descriptor is not None or envelope.num_bytes < _QUICK_BYTES
        return True

    @property
    def waits_for_peer(self) -> bool:
        """True without an announcement, and without both a message and a credit for it."""
        return not self._announcements and not (self._messages and self._num_credits)

    @property
    def due_ns(self) -> int | None:
        """Time at which the message in front may be written, by its modeled time or its drawn
        delay; None without a message or a credit."""
        if not self._messages or self._num_credits == 0:
            return None
        if self._delayed_until_ns is not None:
            return self._delayed_until_ns
        return self._start_ns() + self._messages[0].latency_ns

    def _start_ns(self) -> int:
        """Return the time at which the message in front came to the front."""
        return max(self._messages[0].queued_ns, self._free_ns)

    def next_frame(self, now_ns: int) -> OutgoingFrame | None:
        """Remove and return the next frame: an announcement first, or else the next message, if
        there is a credit, which it takes, and its modeled time and its delay have passed; else
        None. A message in a slot has no payload, unless the socket carries it."""
        if self._announcements:
            return OutgoingFrame(self._announcements.popleft())
        if not self._messages or self._num_credits == 0:
            return None
        envelope = self._messages[0]
        start_ns = None
        if envelope.latency_ns:
            start_ns = self._start_ns()
            if now_ns < start_ns + envelope.latency_ns:
                return None
        if self._draw_delay_s is not None:
            if self._delayed_until_ns is None:
                self._delayed_until_ns = now_ns + int(self._draw_delay_s() * NS_PER_S)
            if now_ns < self._delayed_until_ns:
                return None
            self._delayed_until_ns = None
        self._messages.popleft()
        self._num_credits -= 1
        sequence = self._num_sent
        self._num_sent += 1
        descriptor = envelope.descriptor
        if descriptor is not None and descriptor.carried is None:
            self._lent.add(descriptor.offset)
            purpose = Purpose.LENT if descriptor.is_lent else Purpose.POSTED
            header = Header(purpose, envelope.step, envelope.task, sequence, descriptor.offset)
            return OutgoingFrame(header, descriptor.forms, message=envelope, start_ns=start_ns)
        tensors = envelope.tensors
        header = Header(Purpose.MESSAGE, envelope.step, envelope.task, sequence)
        payload = [
            tensor_bytes(tensor) for tensor in tensors if tensor is not None and tensor.numel()
        ]
        checksum = checksum_of(payload) if self._checks_tensors else 0
        return OutgoingFrame(header, tensors, payload, checksum, envelope, start_ns)

    def written(self, frame: OutgoingFrame, now_ns: int) -> list[Output]:
        """Return the record of a message that was written whole, if records are kept; nothing for
        an announcement."""
        envelope = frame.message
        if not isinstance(envelope, Envelope):
            return []
        self._free_ns = now_ns
        if not self._channel.options.keeps_records:
            return []
        start_ns = frame.start_ns
        assert start_ns is not None
        plane = _INLINE
        if envelope.descriptor is not None:
            start_ns, plane = min(start_ns, envelope.begun_ns), self._plane
        return [
            SendRecord(
                start_ns,
                now_ns,
                envelope.step,
                envelope.task.kind,
                envelope.task.stage,
                envelope.task.microbatch,
                self._link.peer,
                frame.header.sequence,
                envelope.num_bytes,
                plane,
                start_ns - envelope.queued_ns,
                envelope.copied_ns - envelope.begun_ns,
            )
        ]

    def acknowledged(self, frame: OutgoingFrame) -> list[Output]:
        """Return the release of the slot whose content the socket has carried and the peer now has;
        nothing for other frames."""
        envelope = frame.message
        if not isinstance(envelope, Envelope) or envelope.descriptor is None:
            return []
        descriptor = envelope.descriptor
        if descriptor.carried is None or descriptor.offset == NO_SLOT:
            return []
        return [Release(descriptor.offset)]

    def peer_left(self) -> list[Output]:
        """Return nothing: a later `send` reports it, and what the peer sent comes on another
        link."""
        return []

    def received(self, frame: Frame, now_ns: int) -> list[Output]:
        """Add the credits of a credit frame, or return the release of a slot that the peer has
        used. Raises FrameError for any other frame, or for a slot that the peer does not have."""
        header = frame.header
        if header.purpose is Purpose.CREDIT:
            self._num_credits += header.number
            return []
        if header.purpose is Purpose.RELEASED:
            if header.number not in self._lent:
                raise FrameError(f"a destination released the slot at {header.number}, not its own")
            self._lent.discard(header.number)
            return [Release(header.number)]
        raise FrameError(f"a destination sent a {header.purpose.name.lower()}")
