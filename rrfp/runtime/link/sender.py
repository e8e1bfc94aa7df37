"""The sending end of a directed link.

Reports, decisions and forecasts need no credit and overtake messages. In a paced run a message
stays in front of the queue until its modelled time has passed, one after the other, as on a link of
the simulator; the wire's own time comes after that.

A posted message (`rrfp.runtime.planes.plane`) waits in the same queue as others, and its slot is
lent to the peer from its frame on until the peer releases it.
"""

from collections import deque
from collections.abc import Callable

from rrfp.runtime.link.channel import Far, Link, LinkOptions, Outbound, Output, Released, State
from rrfp.runtime.link.wire import (
    Frame,
    FrameError,
    Header,
    Purpose,
    checksum_of,
    payload_bytes,
    tensor_bytes,
)
from rrfp.runtime.planes.codec import payload_of
from rrfp.runtime.planes.plane import Posted
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Message, PeerLostError
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, SendRecord

_INLINE = str(TransportName.INLINE)
_QUICK_BYTES = 2**18
"""A message of fewer bytes is checksummed by whoever sends it."""


class SourceLink(Link):
    """The end that sends messages, and announces what needs no credit."""

    is_source = True

    def __init__(
        self,
        rank: int,
        peer: int,
        options: LinkOptions,
        now_ns: int,
        draw_delay_s: Callable[[], float] | None = None,
        plane: str = TransportName.INLINE,
        far: Far | None = None,
    ) -> None:
        """`draw_delay_s` draws by how long each message is delayed, for tests of whole runs;
        `plane` is named in the records of posted messages."""
        super().__init__(rank, peer, options, now_ns, far)
        self._plane = str(plane)
        self._lent: set[int] = set()
        """The offsets of slots that the peer has not released."""
        self._messages: deque[tuple[Message | Posted, int]] = deque()
        """Each with the time at which it was queued."""
        self._announcements: deque[Header] = deque()
        self._num_credits = 0
        self._num_sent = 0
        self._free_ns = 0
        """When the last message was out."""
        self._draw_delay_s = draw_delay_s
        self._delayed_until_ns: int | None = None
        """Of the message in front, once its delay has begun."""

    def send(self, message: Message, now_ns: int) -> list[Output]:
        """Queue a message that `prepare_message` made."""
        if self.state is State.OVER:
            return self._tell_unsent(message.task)
        self._messages.append((message, now_ns))
        return []

    def post(self, posted: Posted) -> list[Output]:
        """Queue a message that lies in its slot."""
        if self.state is State.OVER:
            return self._tell_unsent(posted.task)
        self._messages.append((posted, posted.queued_ns))
        return []

    def announce(self, purpose: Purpose, step: int, task: Task, number: int) -> list[Output]:
        """Queue a report, a decision or a forecast, with its `Header.number`."""
        if self.state is State.OVER:
            return self._tell_unsent(task)
        self._announcements.append(Header(purpose, step, task, number=number))
        return []

    def _tell_unsent(self, task: Task) -> list[Output]:
        told = self.ends.lost(f"has left or was lost before it was sent what {task} needs")
        return self._tell(PeerLostError(told, self.ends.lost_culprit))

    @property
    def may_write_at_once(self) -> bool:
        """Whether whoever sends may write by itself: no frame is half written, none is to be
        written again, and there is no checksum of a large message to be computed."""
        if self.state is not State.OPEN or not self._may_speak or self._sending.is_busy:
            return False
        if self.ends.checks_tensors and self._messages and not self._announcements:
            message, _ = self._messages[0]
            return isinstance(message, Posted) or payload_bytes(message.tensors) < _QUICK_BYTES
        return True

    @property
    def waits_for_peer(self) -> bool:
        """Whether there is nothing to do before the peer says something."""
        is_empty = not self._sending.is_busy and not self._announcements
        return is_empty and not (self._messages and self._num_credits)

    @property
    def due_ns(self) -> int | None:
        if self._sending.is_busy or not self._may_speak:
            return None
        if not self._messages or self._num_credits == 0:
            return None
        if self._delayed_until_ns is not None:
            return self._delayed_until_ns
        return self._start_ns() + self._messages[0][0].latency_ns

    def _start_ns(self) -> int:
        """When the message in front came to the front."""
        return max(self._messages[0][1], self._free_ns)

    def _num_queued(self) -> int:
        return len(self._messages) + len(self._announcements)

    def _next_outbound(self, now_ns: int) -> Outbound | None:
        if self._announcements:
            return Outbound(self._announcements.popleft())
        if not self._messages or self._num_credits == 0:
            return None
        message, queued_ns = self._messages[0]
        start_ns = None
        if message.latency_ns:
            start_ns = self._start_ns()
            if now_ns < start_ns + message.latency_ns:
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
        if isinstance(message, Posted) and message.inline is None:
            return self._posting(message, sequence, start_ns)
        tensors = message.tensors if isinstance(message, Message) else message.inline
        assert tensors is not None
        header = Header(Purpose.MESSAGE, message.step, message.task, sequence)
        payload = [
            tensor_bytes(tensor) for tensor in tensors if tensor is not None and tensor.numel()
        ]
        checksum = checksum_of(payload) if self.ends.checks_tensors else 0
        return Outbound(header, tensors, payload, checksum, message, queued_ns, start_ns)

    def _posting(self, posted: Posted, sequence: int, start_ns: int | None) -> Outbound:
        self._lent.add(posted.offset)
        purpose = Purpose.LENT if posted.is_lent else Purpose.POSTED
        header = Header(purpose, posted.step, posted.task, sequence, posted.offset)
        return Outbound(header, posted.forms, (), 0, posted, posted.queued_ns, start_ns)

    def _sent(self, outbound: Outbound, now_ns: int) -> list[Output]:
        message = outbound.message
        if message is None:
            return []
        self._free_ns = now_ns
        if not self._options.keeps_records:
            return []
        start_ns = outbound.start_ns
        assert start_ns is not None
        plane, copy_ns = _INLINE, 0
        if isinstance(message, Posted):
            start_ns, plane = min(start_ns, message.begun_ns), self._plane
            copy_ns = message.copied_ns - message.begun_ns
            num_bytes = payload_of(message.forms)
        else:
            num_bytes = payload_bytes(message.tensors)
        return [
            SendRecord(
                start_ns,
                now_ns,
                message.step,
                message.task.kind,
                message.task.stage,
                message.task.microbatch,
                self.peer,
                outbound.header.sequence,
                num_bytes,
                plane,
                start_ns - outbound.queued_ns,
                copy_ns,
            )
        ]

    def _acknowledged(self, outbound: Outbound) -> list[Output]:
        message = outbound.message
        if isinstance(message, Posted) and message.inline is not None and message.offset >= 0:
            return [Released(message.offset)]
        return []

    def _peer_left(self) -> list[Output]:
        # A later `send` tells it, and what the peer sent comes on another link.
        return []

    def _take(self, frame: Frame, now_ns: int) -> list[Output]:
        header = frame.header
        if header.purpose is Purpose.CREDIT:
            self._num_credits += header.number
            return []
        if header.purpose is Purpose.RELEASED:
            if header.number not in self._lent:
                raise FrameError(f"a destination released the slot at {header.number}, not its own")
            self._lent.discard(header.number)
            return [Released(header.number)]
        raise FrameError(f"a destination sent a {header.purpose.name.lower()}")
