"""Moves the bytes of one end of a link between its endpoint and a socket.

Each end has a thread. The socket never blocks: the thread waits in `poll` for the socket and for a
wake-up pipe, so that a new message, a close, a due heartbeat and a silent peer all end the same
wait. Only the thread reads. A thread that queues something writes at once as much as the socket
takes without waiting, and the link's thread writes the rest: waking a thread for each message would
cost both of them time on the path of every task.

The thread that writes to the socket, closes it or replaces it holds `_write_lock`, from
`next_write` to the `wrote` that follows. `_lock` is held around each call of the endpoint, never
around a system call that may take time, and never while the inbox, the recorder or the plane is
called.

The driver is the queue into which its link's data plane completes. The next thread that has the
lock handles what is in it, usually the one that has put it there.

When the connection breaks, the thread obtains another one from its `Reconnector`, and the link
goes on.
"""

import os
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Generic, Protocol

from rrfp.errors import RrfpError
from rrfp.runtime.link.channel import Output, State
from rrfp.runtime.link.endpoint import D, Endpoint
from rrfp.runtime.pace import sleep_until
from rrfp.runtime.planes.plane import Completion, Fetch, Fetcher, Release, SlotFreed, Stager
from rrfp.runtime.protocols import Clock, Inbox, monotonic
from rrfp.trace.records import NS_PER_S, ReceiveRecord, Record, SendRecord

MAX_BUFFERS_PER_WRITE = 64
_NS_PER_MS = 1_000_000
_RECORDS = (SendRecord, ReceiveRecord)

Pause = Callable[[float], None]
"""Waits for this many seconds, or until the link's thread is woken."""


class NotYetError(Exception):
    """There is no connection yet; a sentence says why."""


class PeerGoneError(Exception):
    """The peer has ended, so that there will never be a connection."""


class Reconnector(Protocol):
    """Obtains further connections for one end of a link."""

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        """Try once to obtain a connection. `num_useless` connections in a row have broken and
        carried nothing. Raises NotYetError or PeerGoneError."""
        ...

    @property
    def has_other(self) -> bool:
        """True if the peer has connected again, although this end's connection may seem whole."""
        ...

    def close(self) -> None:
        """Accept no other connection: the link is over."""


class LinkDriver(Generic[D]):
    """One end of a link over connected sockets, one after the other, which it owns."""

    def __init__(
        self,
        endpoint: Endpoint[D],
        reconnector: Reconnector,
        inbox: Inbox,
        record: Callable[[Record], None] | None,
        name: str,
        *,
        stager: Stager | None = None,
        fetcher: Fetcher | None = None,
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
        clock: Clock = monotonic,
    ) -> None:
        """`record` is called by the thread and by threads that send. `name` is the thread's.
        `stager` or `fetcher` is this end of the link's data plane. `wrap` is given every connected
        socket, and returns the one to use."""
        self._endpoint = endpoint
        self._link = endpoint.channel.link
        self._reconnector = reconnector
        self._wrap = wrap
        self._connection: socket.socket
        self._inbox = inbox
        self._record = record
        self._stager = stager
        self._fetcher = fetcher
        self._clock = clock
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._write_lock = Lock()
        """Acquired before `_lock`, or within it without waiting."""
        self._lock = Lock()
        # Guarded by the lock, as the endpoint is.
        self._is_woken = False
        self._has_ended = False
        self._may_have_other = False
        # Used by the thread alone.
        self._is_full = False
        """True while the socket takes nothing more."""

    def start(self, connection: socket.socket) -> None:
        """Continue over this connection, and start the thread, which closes the connection once the
        link is over."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._wake_poller = select.poll()
        self._wake_poller.register(self._wake_reader, select.POLLIN)
        self._use(connection)
        self._thread.start()

    def _use(self, connection: socket.socket) -> None:
        """Wrap this connection, make it nonblocking, and continue over it; the caller has dropped
        the last one."""
        self._connection = self._wrap(connection)
        self._connection.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(self._connection, select.POLLIN)
        self._is_full = False

    def begin_close(self, deadline_ns: int, *, farewell: bool) -> None:
        """Begin to close the link (`Channel.begin_close`), and wake its thread."""
        with self._lock:
            self._endpoint.channel.begin_close(deadline_ns, farewell=farewell)
            self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, at most this long; it ends by the deadline given to `begin_close`,
        unless it waits for a device that hangs. Return whether it has ended and the peer has said
        farewell."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._endpoint.channel.has_peer_left

    # Called by any thread.

    def submit(self, queue: Callable[[], list[Output]]) -> None:
        """Call `queue`, which adds something to write to the endpoint, and write as much as the
        socket takes without waiting; the link's thread writes the rest."""
        now_ns = self._clock()
        with self._lock:
            outputs = queue()
            buffers = self._begin_at_once(now_ns)
        if outputs:
            self._emit(outputs)
        if buffers:
            self._write_at_once(buffers)

    def change(self, change: Callable[[], bool]) -> None:
        """Call `change` with the lock held, and wake the link's thread if it returns True: there is
        something to write."""
        with self._lock:
            if change():
                self._wake()

    def put(self, completion: Completion) -> None:
        """Queue the result of a call of the data plane, and handle it on this thread; `SlotFreed`,
        which a finalizer may put, only wakes the link's thread, and not if the lock is held."""
        self._completions.put(completion)
        if not isinstance(completion, SlotFreed):
            self.submit(self._complete)
        elif self._lock.acquire(blocking=False):
            # A finalizer may interrupt the thread that has the lock. Its completion is then handled
            # with the next write.
            try:
                self._wake()
            finally:
                self._lock.release()

    def _complete(self) -> list[Output]:
        """Handle all queued completions, and return the endpoint's outputs; the caller holds the
        lock."""
        outputs: list[Output] = []
        while not self._completions.empty():
            outputs += self._endpoint.complete(self._completions.get(), self._clock())
        return outputs

    def note_other_connection(self) -> None:
        """Wake the thread, and let it look for another connection: the peer has connected again."""
        with self._lock:
            self._may_have_other = True
            self._wake()

    def _begin_at_once(self, now_ns: int) -> list[memoryview]:
        """Return the bytes for the calling thread to write, with `_write_lock` acquired. Without
        any return an empty list, and wake the link's thread, unless that is the calling one or has
        nothing to do before the peer sends something. The caller holds the lock."""
        endpoint = self._endpoint
        if endpoint.may_write_at_once and self._write_lock.acquire(blocking=False):
            buffers = endpoint.next_write(now_ns)
            if buffers:
                return buffers
            self._write_lock.release()
            if endpoint.waits_for_peer:
                return []
        if current_thread() is not self._thread:
            self._wake()
        return []

    def _write_at_once(self, buffers: list[memoryview]) -> None:
        """Write as many bytes as the socket takes on the calling thread, and release `_write_lock`.
        The link's thread writes the rest and handles errors."""
        endpoint = self._endpoint
        try:
            try:
                num_bytes = self._connection.sendmsg(buffers[:MAX_BUFFERS_PER_WRITE])
            except OSError:
                # Full, or broken: the link's thread will get the same error, and handle it.
                num_bytes = 0
            with self._lock:
                outputs = endpoint.wrote(num_bytes, self._clock())
                if not endpoint.waits_for_peer:
                    self._wake()
            if outputs:
                self._emit(outputs)
        finally:
            self._write_lock.release()

    def _wake(self) -> None:
        """End the thread's wait, unless it is woken already or has ended; the caller holds the
        lock."""
        if not self._is_woken and not self._has_ended:
            self._is_woken = True
            os.write(self._wake_writer, b"\0")

    def _emit(self, outputs: Iterable[Output]) -> None:
        """Pass outputs of the endpoint to the inbox, the recorder or the plane."""
        for output in outputs:
            if isinstance(output, _RECORDS):
                if self._record is not None:
                    self._record(output)
            elif isinstance(output, Fetch):
                assert self._fetcher is not None
                self._fetcher.fetch(output.descriptor, output.ticket, self)
            elif isinstance(output, Release):
                assert self._stager is not None
                self._stager.release(output.offset)
            else:
                self._inbox.put(output)

    # The thread.

    def _run(self) -> None:
        """Serve the link on its thread until it is over, and then close everything; an unexpected
        error ends the link and is reported to the inbox."""
        try:
            self._exchange()
        except Exception as error:  # A thread that ends silently would hang the run.
            with self._lock:
                outputs = self._endpoint.channel.fail(
                    RrfpError(
                        f"the link between ranks {self._link.own} and {self._link.peer} failed on"
                        f" rank {self._link.own} with {type(error).__name__}: {error}"
                    )
                )
            self._emit(outputs)
        finally:
            self._end()

    def _end(self) -> None:
        """Close everything once the link is over: detach the plane, refuse other connections, close
        the wake-up pipe, write the last bytes, and close the connection."""
        self._detach_if_done()
        self._reconnector.close()
        with self._lock:
            self._has_ended = True
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        with self._write_lock:
            with suppress(OSError):
                if final_bytes := self._endpoint.channel.final_bytes():
                    self._connection.sendmsg(final_bytes)
            self._drop()

    def _drop(self) -> None:
        """Shut down and close the connection; the caller holds the lock for it."""
        # Closing alone does not inform the peer while a process that was forked meanwhile, such as
        # a data loader's worker, has the connection open, too.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _detach_if_done(self) -> None:
        """Detach the data plane from the peer's memory, once: before a farewell, when nothing uses
        it any more, or when the link is over. If the link is lost, do not wait for the device."""
        with self._lock:
            may_detach, is_lost = self._endpoint.may_detach, self._endpoint.is_lost
        if may_detach:
            for plane in (self._stager, self._fetcher):
                if plane is not None:
                    plane.detach(waits=not is_lost)
            with self._lock:
                self._endpoint.detached()

    def _exchange(self) -> None:
        """Write, read and wait until the link is over. Reconnects when the connection is broken or
        the peer has connected again; a wait without anything to read counts as silence."""
        endpoint, channel = self._endpoint, self._endpoint.channel
        while True:
            if channel.state is not State.OPEN:
                self._detach_if_done()
            if self._may_have_other:
                self._may_have_other = False
                if self._reconnector.has_other:
                    self._break_connection("has connected again")
            if channel.is_broken:
                self._reconnect()
            with self._write_lock:
                self._write()
            with self._lock:
                if channel.state is State.OVER:
                    return
                if channel.is_broken:
                    continue
                now_ns = self._clock()
                patience_ns, due_ns = channel.patience_ns(now_ns), endpoint.due_ns
            if self._wait(now_ns, patience_ns, due_ns):
                self._read()
                continue
            with self._lock:
                outputs = channel.waited(self._clock())
            self._emit(outputs)

    def _break_connection(self, what: str) -> None:
        """Mark the connection as broken because of `what` the peer did, and pass on the outputs."""
        with self._lock:
            outputs = self._endpoint.channel.break_connection(what)
        self._emit(outputs)

    def _reconnect(self) -> None:
        """Close the broken connection, and try once to obtain another one. Without one the time
        counts as silence, and the link fails if the peer has ended."""
        channel = self._endpoint.channel
        with self._write_lock:
            self._drop()
        with self._lock:
            patience_s = channel.patience_ns(self._clock()) / NS_PER_S
            num_useless = channel.num_useless
        outputs: list[Output] = []
        try:
            connection = self._reconnector.attempt(patience_s, num_useless, self._pause)
        except NotYetError as error:
            with self._lock:
                outputs = channel.could_not_attach(str(error), self._clock())
        except PeerGoneError:
            with self._lock:
                outputs = channel.fail_by_gone_peer()
        else:
            with self._write_lock:
                self._use(connection)
                with self._lock:
                    channel.attach()
        self._emit(outputs)

    def _pause(self, pause_s: float) -> None:
        """Wait for this many seconds, or until the link's thread is woken."""
        self._clear_wake(dict(self._wake_poller.poll(pause_s * 1000)))

    def _clear_wake(self, events: dict[int, int]) -> None:
        """Empty the wake-up pipe, if it has woken the thread."""
        if self._wake_reader in events:
            with self._lock:
                os.read(self._wake_reader, 1)
                self._is_woken = False

    def _wait(self, now_ns: int, patience_ns: int, due_ns: int | None) -> bool:
        """Wait for the socket, a wake-up, the end of the patience or the due time, whichever is
        first; return whether the connection has something to read, its end and an error
        included."""
        # Rounded up: rounding down would spin through the last millisecond.
        patience_ms = patience_ns // _NS_PER_MS + 1 if patience_ns else 0
        if due_ns is not None:
            left_ms = max(0, due_ns - now_ns) // _NS_PER_MS
            patience_ms = min(patience_ms, left_ms)
            if left_ms == 0:
                sleep_until(due_ns)
        # The connection of a peer that has left is closed, and `poll` would return at once.
        poller = self._wake_poller if self._endpoint.awaits_plane_only else self._poller
        events = dict(poller.poll(patience_ms))
        self._clear_wake(events)
        state = events.get(self._connection.fileno(), 0)
        if self._is_full and state & (select.POLLOUT | select.POLLHUP | select.POLLERR):
            self._set_full(False)
        return bool(state & ~select.POLLOUT)

    def _set_full(self, is_full: bool) -> None:
        """Note whether the socket takes nothing more, and wait for it to be writable only then."""
        self._is_full = is_full
        events = select.POLLIN | (select.POLLOUT if is_full else 0)
        self._poller.modify(self._connection, events)

    def _write(self) -> None:
        """Handle queued completions, and write frames until there are no more or the socket is
        full; the caller holds `_write_lock`. After a reset by the peer it writes nothing more;
        another error breaks the connection. After its farewell it shuts the sending direction."""
        endpoint = self._endpoint
        if not self._completions.empty():
            with self._lock:
                outputs = self._complete()
            self._emit(outputs)
        while not self._is_full:
            with self._lock:
                buffers = endpoint.next_write(self._clock())
            if not buffers:
                return
            first = buffers[:MAX_BUFFERS_PER_WRITE]
            try:
                num_bytes = self._connection.sendmsg(first)
                is_full = num_bytes < sum(buffer.nbytes for buffer in first)
            except BlockingIOError:
                num_bytes, is_full = 0, True
            except (BrokenPipeError, ConnectionResetError):
                num_bytes, is_full = -1, False
            except OSError as error:
                self._break_connection(f"cannot be reached any more ({error})")
                num_bytes, is_full = 0, False
            if is_full:
                self._set_full(True)
            with self._lock:
                outputs = (
                    endpoint.write_failed()
                    if num_bytes < 0
                    else endpoint.wrote(num_bytes, self._clock())
                )
                has_written_all = endpoint.channel.has_written_all
            if outputs:
                self._emit(outputs)
            if has_written_all:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Read at most one frame, without waiting, and handle it. The end of the connection or an
        error breaks it."""
        endpoint = self._endpoint
        outputs: list[Output] | None = None
        while outputs is None:
            try:
                num_bytes = self._connection.recv_into(endpoint.channel.next_read())
            except BlockingIOError:
                return
            except (ConnectionResetError, BrokenPipeError):
                num_bytes = 0
            except OSError as error:
                self._break_connection(f"cannot be reached any more ({error})")
                return
            with self._lock:
                outputs = endpoint.received(num_bytes, self._clock())
        if outputs:
            self._emit(outputs)
