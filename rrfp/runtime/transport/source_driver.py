"""Drives the sending end of a link: any thread may send, and none waits."""

from rrfp.errors import RrfpError
from rrfp.runtime.links.source_link import SourceLink
from rrfp.runtime.links.states import Output, Released
from rrfp.runtime.links.wire import Purpose
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Posted, Pull
from rrfp.runtime.protocols import Message
from rrfp.runtime.transport.driver import MAX_BUFFERS_PER_WRITE, LinkDriver
from rrfp.schedule.tasks import Task


class SourceDriver(LinkDriver[SourceLink]):
    """The end that sends."""

    outbox: Outbox | None = None
    """Where large messages wait for their receiver; set before the first one is sent."""

    def _serve(self, output: Pull | Released) -> None:
        assert isinstance(output, Released)
        assert self.outbox is not None
        self.outbox.release(output.offset)

    def send(self, message: Message) -> None:
        """Send a message that `prepare_message` made."""
        now_ns = self._clock()
        with self._lock:
            outputs = self._link.send(message, now_ns)
            buffers = self._begin_at_once(now_ns)
        self._go_on(outputs, buffers)

    def post(self, posted: Posted) -> None:
        """Send a message that lies in the outbox."""
        now_ns = self._clock()
        with self._lock:
            outputs = self._link.post(posted)
            buffers = self._begin_at_once(now_ns)
        self._go_on(outputs, buffers)

    def fail(self, error: RrfpError) -> None:
        """The outbox has failed."""
        with self._lock:
            outputs = self._link.fail(error)
            self._wake()
        self._tell(outputs)

    def announce(self, purpose: Purpose, step: int, task: Task, number: int) -> None:
        """Send a report, a decision or a forecast: it needs no credit and overtakes messages."""
        now_ns = self._clock()
        with self._lock:
            outputs = self._link.announce(purpose, step, task, number)
            buffers = self._begin_at_once(now_ns)
        self._go_on(outputs, buffers)

    def _begin_at_once(self, now_ns: int) -> list[memoryview]:
        """What whoever has queued something may write by itself, with `_write_lock` taken for it;
        else the thread is woken. The caller holds the lock."""
        link = self._link
        if link.may_write_at_once and self._write_lock.acquire(blocking=False):
            buffers = link.next_write(now_ns)
            if buffers:
                return buffers
            self._write_lock.release()
            if link.waits_for_peer:
                return buffers
        self._wake()
        return []

    def _go_on(self, outputs: list[Output], buffers: list[memoryview]) -> None:
        """Write what the socket takes without waiting, and leave the rest to the thread."""
        if outputs:
            self._tell(outputs)
        if not buffers:
            return
        try:
            try:
                num_bytes = self._connection.sendmsg(buffers[:MAX_BUFFERS_PER_WRITE])
            except OSError:
                # Full, or broken: the thread will meet it again, and act on it.
                num_bytes = 0
            with self._lock:
                outputs = self._link.wrote(num_bytes, self._clock())
                if not self._link.waits_for_peer:
                    self._wake()
            if outputs:
                self._tell(outputs)
        finally:
            self._write_lock.release()
