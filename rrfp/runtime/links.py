"""The two ends of a directed link: one connection, one thread at each end.

Messages, reports and decisions go from source to destination; credits come back on the same
connection; heartbeats and the farewell go both ways. The socket of an end never blocks: its thread
waits in `poll` for the socket and for a wake-up pipe, so that a new message, a close, a due
heartbeat and a silent peer all end the same wait. Only the thread reads. It also writes what
whoever sends could not: `SourceEnd` puts into the socket at once as much as that takes without
waiting, for every hand-over to a thread costs both of them time on the way of every task.

An end is open, then draining (`begin_close`: what is queued is written, then the farewell), then
lingering (nothing more is written; what comes is read until the peer's farewell or end of file, for
closing a socket with unread bytes can destroy those under way to the peer), then over. The peer's
farewell makes an open end answer with its own and be over: a directed link has no use for one end.

Credits: the destination owns the bound. It gives all of it when the link opens and one back for
each message consumed, some at a time; messages wait for credit in the source's queue, and its
compute thread goes on.
"""

import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread

from rrfp.errors import RrfpError
from rrfp.runtime.delays import Delays
from rrfp.runtime.pace import sleep_until
from rrfp.runtime.protocols import (
    Clock,
    Failed,
    Inbox,
    Message,
    PeerLostError,
    PeerSilentError,
    monotonic,
)
from rrfp.runtime.wire import Frame, FrameError, FrameReader, Header, Purpose, encode_header
from rrfp.trace.records import Record

MAX_BUFFERS_PER_WRITE = 64
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What the ends of all links of a rank have in common."""

    heartbeat_s: float
    """An end that has written nothing for so long writes a heartbeat."""
    silence_s: float
    """A peer that was not heard for so long is lost."""
    close_s: float
    """How long closing may take to write what is queued and to hear the peer's farewell."""
    max_message_bytes: int
    """The largest message; the same on all ranks."""
    record: Callable[[Record], None] | None
    """Called with each send and receive, by the links' threads and by whoever sends; must be safe
    for that."""
    delays: Delays | None = None
    """Delays before each message that is sent."""
    clock: Clock = monotonic


@dataclass(slots=True)
class Outbound:
    """A frame on its way out."""

    buffers: list[memoryview]
    header: Header
    message: Message | None = None
    start_ns: int | None = None
    """When its first byte was written; in a paced run, when its modelled time began."""


class LinkEnd(ABC):
    """What both ends share. The constructor starts the thread, which closes the socket; so a
    subclass sets up its own state before it calls it."""

    def __init__(
        self, rank: int, peer: int, connection: socket.socket, inbox: Inbox, options: LinkOptions
    ) -> None:
        connection.setblocking(False)
        self.peer = peer
        self._rank = rank
        self._connection = connection
        self._inbox = inbox
        self._options = options
        self._lock = Lock()
        # Guarded by the lock.
        self._is_over = False
        self._is_woken = False
        self._close_deadline_s: float | None = None
        # Whoever writes to the socket or closes it holds this one; taken before `_lock`.
        self._write_lock = Lock()
        self._outbound: Outbound | None = None
        self._last_write_s = time.monotonic()
        self._can_write = True
        # Of the thread alone.
        self._reader = FrameReader(options.max_message_bytes, options.clock)
        self._is_full = False
        self._is_lingering = False
        self._quiet_s = 0.0
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._poller = select.poll()
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(connection, select.POLLIN)
        self._thread = Thread(target=self._run, name=self._name(), daemon=True)
        self._thread.start()

    # Called by other threads.

    def begin_close(self, deadline_s: float, *, farewell: bool) -> None:
        """Drain, say farewell and end by the deadline (of `time.monotonic`); without a farewell
        the connection closes at once, and the peer takes this rank for lost."""
        with self._lock:
            if self._close_deadline_s is None or not farewell:
                self._close_deadline_s = deadline_s if farewell else 0.0
            self._wake()

    def join(self) -> None:
        """Wait for the thread, which ends by the deadline given to `begin_close`."""
        self._thread.join()

    def _wake(self) -> None:
        """Make the thread look; the caller holds the lock."""
        if not self._is_woken and not self._is_over:
            self._is_woken = True
            os.write(self._wake_writer, b"\0")

    # What the two ends do differently; called by the thread.

    @abstractmethod
    def _name(self) -> str: ...

    @abstractmethod
    def _next_outbound(self) -> Outbound | None:
        """The next frame to write, if there is one that may be written."""

    def _due_ns(self) -> int | None:
        """When the next frame may be written, where one is only held back until a moment."""
        return None

    @abstractmethod
    def _num_queued(self) -> int:
        """How many things wait to be written, credit or not; the caller holds the lock."""

    @abstractmethod
    def _take(self, frame: Frame) -> None:
        """Act on a frame that is neither a heartbeat nor a farewell."""

    @abstractmethod
    def _written(self, outbound: Outbound) -> None:
        """A frame was written whole."""

    @abstractmethod
    def _peer_left(self) -> None:
        """The peer said farewell on this link, and this end was not closing."""

    # The thread.

    def _run(self) -> None:
        try:
            self._exchange()
        except FrameError as error:
            self._fail(
                RrfpError(
                    f"what rank {self.peer} sent to rank {self._rank} cannot be read: {error};"
                    " see that all ranks run the same version of rrfp"
                )
            )
        except RrfpError as error:
            self._fail(error)
        except Exception as error:  # A thread that dies in silence would hang the run.
            self._fail(
                RrfpError(
                    f"the link between ranks {self._rank} and {self.peer} failed on rank"
                    f" {self._rank} with {type(error).__name__}: {error}"
                )
            )
        finally:
            with self._lock:
                self._is_over = True
                os.close(self._wake_reader)
                os.close(self._wake_writer)
            with self._write_lock:
                # Closing alone tells the peer nothing while a process that was forked meanwhile,
                # such as a data loader's worker, has the connection open, too.
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                self._connection.close()

    def _fail(self, error: RrfpError) -> None:
        """Tell the compute thread, unless this rank is closing: then a loss is nobody's concern."""
        with self._lock:
            is_closing = self._close_deadline_s is not None
        if not is_closing:
            self._inbox.put(Failed(error))

    def _lost(self, what: str, kind: type[PeerLostError] = PeerLostError) -> PeerLostError:
        return kind(
            f"rank {self.peer} {what} (seen by rank {self._rank}); see its own output for the cause"
        )

    def _exchange(self) -> None:
        while True:
            with self._lock:
                close_deadline_s = self._close_deadline_s
            now_s = time.monotonic()
            if close_deadline_s is not None and now_s >= close_deadline_s:
                return
            if not self._is_lingering and self._can_write and not self._is_full:
                with self._write_lock:
                    self._write(now_s, is_closing=close_deadline_s is not None)
            if self._wait(now_s, close_deadline_s) and self._read():
                return

    def _wait(self, now_s: float, close_deadline_s: float | None) -> bool:
        """Wait for whatever comes first; tell whether the connection has something to read."""
        options = self._options
        writes = self._can_write and not self._is_full and not self._is_lingering
        if self._outbound is not None and not self._is_full:
            patience_s = 0.0
        else:
            patience_s = min(
                max(0.0, self._last_write_s + options.heartbeat_s - now_s)
                if writes
                else options.heartbeat_s,
                max(0.0, options.silence_s - self._quiet_s),
            )
            if close_deadline_s is not None:
                patience_s = min(patience_s, close_deadline_s - now_s)
        began_s = time.monotonic()
        # Rounded up: rounding down would spin through the last millisecond.
        patience_ms = int(patience_s * 1000) + 1 if patience_s > 0 else 0
        if writes and self._outbound is None and (due_ns := self._due_ns()) is not None:
            left_ns = max(0, due_ns - options.clock())
            patience_ms = min(patience_ms, left_ns // _NS_PER_MS)
            if patience_ms == 0:
                sleep_until(time.monotonic_ns() + left_ns)
        events = dict(self._poller.poll(patience_ms))
        if self._wake_reader in events:
            with self._lock:
                os.read(self._wake_reader, 1)
                self._is_woken = False
        state = events.get(self._connection.fileno(), 0)
        if self._is_full and state & (select.POLLOUT | select.POLLHUP | select.POLLERR):
            self._set_full(False)
        if state & ~select.POLLOUT:
            self._quiet_s = 0.0
            return True
        # At most the patience: time in which this very process was stopped is not the peer's.
        self._quiet_s += min(time.monotonic() - began_s, patience_s)
        if self._quiet_s >= options.silence_s:
            raise self._lost(f"was silent for {options.silence_s:g} s", PeerSilentError)
        return False

    def _set_full(self, is_full: bool) -> None:
        if is_full != self._is_full:
            self._is_full = is_full
            self._poller.modify(
                self._connection, select.POLLIN | (select.POLLOUT if is_full else 0)
            )

    def _write(self, now_s: float, *, is_closing: bool) -> None:
        """Write of one frame as much as the socket takes, then see whether there is another."""
        self._outbound = self._outbound or self._choose(now_s, is_closing=is_closing)
        if self._outbound is None or not self._push(self._outbound, now_s):
            return
        self._written(self._outbound)
        if self._outbound.header.purpose is Purpose.FAREWELL:
            self._outbound = None
            self._is_lingering = True
            self._connection.shutdown(socket.SHUT_WR)
        else:
            self._outbound = self._choose(now_s, is_closing=is_closing)

    def _choose(self, now_s: float, *, is_closing: bool) -> Outbound | None:
        """The next frame to write, if there is any."""
        outbound = self._next_outbound()
        if outbound is not None:
            return outbound
        if is_closing:
            with self._lock:
                is_drained = self._num_queued() == 0
            if is_drained:
                return bare(Header(Purpose.FAREWELL))
        if now_s - self._last_write_s >= self._options.heartbeat_s:
            return bare(Header(Purpose.HEARTBEAT))
        return None

    def _push(self, outbound: Outbound, now_s: float) -> bool:
        """Write until the frame is out (True) or the socket is full (False)."""
        clock = self._options.clock
        try:
            while outbound.buffers:
                tried_ns = clock()
                num_bytes = self._connection.sendmsg(outbound.buffers[:MAX_BUFFERS_PER_WRITE])
                self._last_write_s = now_s
                if outbound.start_ns is None:
                    outbound.start_ns = tried_ns
                drop_written(outbound.buffers, num_bytes)
        except BlockingIOError:
            self._set_full(True)
            return False
        except (BrokenPipeError, ConnectionResetError):
            # What the peer wrote before it closed is still to be read: a farewell, or nothing.
            self._can_write = False
            return False
        return True

    def _read(self) -> bool:
        """Take at most one frame; tell whether the link is over."""
        try:
            frame = self._reader.read(self._connection)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise self._lost("closed its connection without a farewell") from None
        except OSError as error:
            raise self._lost(f"cannot be reached any more ({error})") from None
        if frame is None or frame.header.purpose is Purpose.HEARTBEAT:
            return False
        if frame.header.purpose is not Purpose.FAREWELL:
            self._take(frame)
            return False
        with self._write_lock:
            self._answer_farewell()
        return True

    def _answer_farewell(self) -> None:
        """The peer has left: so does this end, unless something was still to go to the peer."""
        with self._lock:
            self._is_over = True
            is_closing = self._close_deadline_s is not None
            num_queued = self._num_queued()
        if self._outbound is not None and self._outbound.header.task is not None:
            num_queued += 1
        if num_queued:
            self._fail(self._lost(f"said farewell while {num_queued} frames waited for it"))
            return
        if self._can_write and not self._is_lingering and self._outbound is None:
            self._push(bare(Header(Purpose.FAREWELL)), time.monotonic())
        if not is_closing:
            self._peer_left()


def bare(header: Header) -> Outbound:
    """A frame that is only a header."""
    return Outbound([memoryview(encode_header(header))], header)


def drop_written(buffers: list[memoryview], num_bytes: int) -> None:
    """Cut off the first so many bytes."""
    num_whole = 0
    for buffer in buffers:
        if num_bytes < buffer.nbytes:
            break
        num_bytes -= buffer.nbytes
        num_whole += 1
    del buffers[:num_whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]
