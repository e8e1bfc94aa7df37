"""The sending end of a directed link."""

import socket
import time
from collections import deque

from rrfp.runtime.links import LinkEnd, LinkOptions, Outbound, bare, drop_written
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
        self._messages: deque[Message] = deque()
        self._announcements: deque[Header] = deque()
        self._num_credits = 0
        self._num_sent = 0
        delays = options.delays
        self._delay = None if delays is None else delays.stream(f"messages to {peer}")
        super().__init__(rank, peer, connection, inbox, options)

    def send(self, message: Message) -> None:
        """Queue a message that `prepare_message` made."""
        with self._lock:
            self._messages.append(message)
            self._queued(message.task)

    def announce(self, purpose: Purpose, step: int, task: Task, position: int) -> None:
        """Send a report or a decision: it needs no credit and overtakes messages."""
        header = Header(purpose, step, task, number=position)
        if not self._write_at_once(header):
            with self._lock:
                self._announcements.append(header)
                self._queued(task)

    def _write_at_once(self, header: Header) -> bool:
        """Write a frame that is only a header, without waiting for anything; tell whether that was
        possible. When not, the caller queues it for the thread."""
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            with self._lock:
                if self._is_over or self._close_deadline_s is not None or self._announcements:
                    return False
            if self._outbound is not None or not self._can_write:
                return False
            outbound = bare(header)
            try:
                num_bytes = self._connection.send(outbound.buffers[0])
            except OSError:
                # Full, or broken: the thread will meet it again, and act on it.
                return False
            self._last_write_s = time.monotonic()
            drop_written(outbound.buffers, num_bytes)
            if outbound.buffers:
                self._outbound = outbound
                with self._lock:
                    self._wake()
            return True
        finally:
            self._write_lock.release()

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
            message = self._messages.popleft()
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
        return Outbound(buffers, header, message)

    def _written(self, outbound: Outbound) -> None:
        message, record = outbound.message, self._options.record
        if message is None or record is None:
            return
        assert outbound.start_ns is not None
        record(
            SendRecord(
                outbound.start_ns,
                self._options.clock(),
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
        self._num_credits += frame.header.number
