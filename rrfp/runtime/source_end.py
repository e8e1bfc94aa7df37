"""The sending end of a directed link.

In a paced run a message stays in front of the queue until its modelled time has passed, one after
the other, as on a link of the simulator; the wire's own time comes after that.
"""

import socket
import time
from collections import deque

from rrfp.runtime.links import (
    MAX_BUFFERS_PER_WRITE,
    LinkEnd,
    LinkOptions,
    Outbound,
    bare,
    drop_written,
)
from rrfp.runtime.protocols import Failed, Inbox, Message
from rrfp.runtime.wire import (
    Frame,
    FrameError,
    Header,
    Purpose,
    encode_header,
    payload_bytes,
    tensor_bytes,
)
from rrfp.schedule.tasks import Task
from rrfp.trace.records import SendRecord


class SourceEnd(LinkEnd):
    """The end that sends messages, reports and decisions."""

    def __init__(
        self, rank: int, peer: int, connection: socket.socket, inbox: Inbox, options: LinkOptions
    ) -> None:
        self._messages: deque[tuple[Message, int]] = deque()
        """Each with the time at which it was queued."""
        self._announcements: deque[Header] = deque()
        self._num_credits = 0
        # Of whoever holds the lock for writing.
        self._num_sent = 0
        self._free_ns = 0
        """When the last message was out."""
        delays = options.delays
        self._delay = None if delays is None else delays.stream(f"messages to {peer}")
        super().__init__(rank, peer, connection, inbox, options)

    def send(self, message: Message) -> None:
        """Send a message that `prepare_message` made."""
        now_ns = self._options.clock()
        with self._lock:
            self._messages.append((message, now_ns))
        self._go_on(message.task)

    def announce(self, purpose: Purpose, step: int, task: Task, position: int) -> None:
        """Send a report or a decision: it needs no credit and overtakes messages."""
        with self._lock:
            self._announcements.append(Header(purpose, step, task, number=position))
        self._go_on(task)

    def _go_on(self, task: Task) -> None:
        """Write what was queued, or leave it to the thread."""
        if self._write_lock.acquire(blocking=False):
            try:
                if self._writes_at_once():
                    return
            finally:
                self._write_lock.release()
        with self._lock:
            self._queued(task)

    def _writes_at_once(self) -> bool:
        """Write what is queued without waiting for anything, and tell whether all of it is out; the
        caller holds the lock for writing, and wakes the thread for the rest."""
        with self._lock:
            if self._is_over or self._close_deadline_s is not None:
                return False
        if self._outbound is not None or not self._can_write:
            return False
        with self._lock:
            if self._delay is not None and not self._announcements:
                return False
        outbound = self._next_outbound()
        if outbound is None:
            return False
        outbound.start_ns = outbound.start_ns or self._options.clock()
        try:
            num_bytes = self._connection.sendmsg(outbound.buffers[:MAX_BUFFERS_PER_WRITE])
        except OSError:
            # Full, or broken: the thread will meet it again, and act on it.
            self._outbound = outbound
            return False
        self._last_write_s = time.monotonic()
        drop_written(outbound.buffers, num_bytes)
        if outbound.buffers:
            self._outbound = outbound
            return False
        self._written(outbound)
        with self._lock:
            return self._num_queued() == 0

    def _queued(self, task: Task) -> None:
        """Something was queued; the caller holds the lock."""
        if self._is_over and self._close_deadline_s is None:
            self._inbox.put(
                Failed(self._lost(f"has left or was lost before it was sent what {task} needs"))
            )
        self._wake()

    def _name(self) -> str:
        return f"rrfp-send-to-{self.peer}"

    def _num_queued(self) -> int:
        return len(self._messages) + len(self._announcements)

    def _next_outbound(self) -> Outbound | None:
        with self._lock:
            if self._announcements:
                return bare(self._announcements.popleft())
            if not self._messages or self._num_credits == 0:
                return None
            message, queued_ns = self._messages[0]
            start_ns = None
            if message.latency_ns:
                start_ns = max(queued_ns, self._free_ns)
                if self._options.clock() < start_ns + message.latency_ns:
                    return None
            self._messages.popleft()
            self._num_credits -= 1
        if self._delay is not None:
            self._delay()
        header = Header(Purpose.MESSAGE, message.step, message.task, self._num_sent)
        self._num_sent += 1
        buffers = [memoryview(encode_header(header, message.tensors))]
        buffers += [
            tensor_bytes(tensor)
            for tensor in message.tensors
            if tensor is not None and tensor.numel()
        ]
        return Outbound(buffers, header, message, start_ns)

    def _due_ns(self) -> int | None:
        with self._lock:
            if not self._messages or self._num_credits == 0:
                return None
            message, queued_ns = self._messages[0]
        return max(queued_ns, self._free_ns) + message.latency_ns

    def _written(self, outbound: Outbound) -> None:
        message, record = outbound.message, self._options.record
        if message is None:
            return
        self._free_ns = self._options.clock()
        if record is None:
            return
        assert outbound.start_ns is not None
        record(
            SendRecord(
                outbound.start_ns,
                self._free_ns,
                message.step,
                message.task.kind,
                message.task.stage,
                message.task.microbatch,
                self.peer,
                outbound.header.sequence,
                payload_bytes(message.tensors),
            )
        )

    def _peer_left(self) -> None:
        """Nothing to do: a later `send` tells it, and what the peer sent comes on another link."""

    def _take(self, frame: Frame) -> None:
        if frame.header.purpose is not Purpose.CREDIT:
            raise FrameError(f"a destination sent a {frame.header.purpose.name.lower()}")
        with self._lock:
            self._num_credits += frame.header.number
