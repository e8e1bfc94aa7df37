"""The sending end of a directed link.

Reports, decisions and forecasts need no credit and overtake messages. In a paced run a message
stays in front of the queue until its modelled time has passed, one after the other, as on a link of
the simulator; the wire's own time comes after that.
"""

from collections import deque
from collections.abc import Callable

from rrfp.runtime.protocols import Message
from rrfp.runtime.transport.link import Link, LinkOptions, Outbound, Output, State, bare
from rrfp.runtime.transport.wire import (
    Frame,
    FrameError,
    Header,
    Purpose,
    encode_header,
    payload_bytes,
    tensor_bytes,
)
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, SendRecord


class SourceLink(Link):
    """The end that sends messages, and announces what needs no credit."""

    def __init__(
        self,
        rank: int,
        peer: int,
        options: LinkOptions,
        now_ns: int,
        draw_delay_s: Callable[[], float] | None = None,
    ) -> None:
        """`draw_delay_s` draws by how long each message is delayed, for tests of whole runs."""
        super().__init__(rank, peer, options, now_ns)
        self._messages: deque[tuple[Message, int]] = deque()
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

    def announce(self, purpose: Purpose, step: int, task: Task, number: int) -> list[Output]:
        """Queue a report, a decision or a forecast, with its `Header.number`."""
        if self.state is State.OVER:
            return self._tell_unsent(task)
        self._announcements.append(Header(purpose, step, task, number=number))
        return []

    def _tell_unsent(self, task: Task) -> list[Output]:
        return self._tell(self._loss(f"has left or was lost before it was sent what {task} needs"))

    @property
    def may_write_at_once(self) -> bool:
        """Whether whoever sends may write by itself: no frame is half written."""
        return self.state is State.OPEN and self._may_write and self._outbound is None

    @property
    def waits_for_peer(self) -> bool:
        """Whether there is nothing to do before the peer says something."""
        is_empty = self._outbound is None and not self._announcements
        return is_empty and not (self._messages and self._num_credits)

    @property
    def due_ns(self) -> int | None:
        if self._outbound is not None or not self._may_write:
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
            return bare(self._announcements.popleft())
        if not self._messages or self._num_credits == 0:
            return None
        message = self._messages[0][0]
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
        header = Header(Purpose.MESSAGE, message.step, message.task, self._num_sent)
        self._num_sent += 1
        buffers = [memoryview(encode_header(header, message.tensors))]
        buffers += [
            tensor_bytes(tensor)
            for tensor in message.tensors
            if tensor is not None and tensor.numel()
        ]
        return Outbound(buffers, header, message, start_ns)

    def _sent(self, outbound: Outbound, message: Message, now_ns: int) -> list[Output]:
        self._free_ns = now_ns
        if not self._options.keeps_records:
            return []
        assert outbound.start_ns is not None
        return [
            SendRecord(
                outbound.start_ns,
                now_ns,
                message.step,
                message.task.kind,
                message.task.stage,
                message.task.microbatch,
                self.peer,
                outbound.header.sequence,
                payload_bytes(message.tensors),
            )
        ]

    def _peer_left(self) -> list[Output]:
        # A later `send` tells it, and what the peer sent comes on another link.
        return []

    def _take(self, frame: Frame, now_ns: int) -> list[Output]:
        if frame.header.purpose is not Purpose.CREDIT:
            raise FrameError(f"a destination sent a {frame.header.purpose.name.lower()}")
        self._num_credits += frame.header.number
        return []
