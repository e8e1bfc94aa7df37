"""Carries the bytes of one end of a link between its protocol (`link.py`) and a socket.

Each end has a thread. The socket never blocks: the thread waits in `poll` for the socket and for a
wake-up pipe, so that a new message, a close, a due heartbeat and a silent peer all end the same
wait. Only the thread reads. It also writes what whoever sends could not: that one puts into the
socket at once as much as it takes without waiting, for every hand-over to a thread costs both of
them time on the way of every task.

Whoever writes to the socket, or closes it, or takes another, holds `_write_lock`, from `next_write`
to the `wrote` that follows. `_lock` is held around each call of the protocol, never around a system
call that may take time, and never while the inbox or the recorder is told something.

When the connection breaks, the thread comes to another one (`reconnecting.py`), and the link goes
on.
"""

import os
import select
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Generic, TypeVar

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.link.channel import Link, Output, Released, State
from rrfp.runtime.link.receiver import DestinationLink
from rrfp.runtime.link.sender import SourceLink
from rrfp.runtime.link.wire import Purpose
from rrfp.runtime.net.connecting import Awaiting, NotYetError, PeerGoneError, Reconnecting
from rrfp.runtime.net.faults import wrapped
from rrfp.runtime.pace import sleep_until
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Posted, Pull, Puller
from rrfp.runtime.protocols import Clock, Inbox, Message, monotonic
from rrfp.schedule.tasks import Task
from rrfp.trace.records import NS_PER_S, ReceiveRecord, Record, SendRecord

MAX_BUFFERS_PER_WRITE = 64
_NS_PER_MS = 1_000_000
_RECORDS = (SendRecord, ReceiveRecord)
_OF_PLANES = (Pull, Released)

L = TypeVar("L", bound=Link)

Wrap = Callable[[socket.socket, int, int], socket.socket]
"""Is given each connected socket of a link, this rank and the peer, and gives what is used instead:
the socket, or something that behaves like one and does harm, for tests of what links survive."""


class LinkDriver(Generic[L]):
    """One end of a link over connected sockets, one after the other, which it owns."""

    def __init__(
        self,
        link: L,
        rank: int,
        reconnecting: Reconnecting,
        inbox: Inbox,
        record: Callable[[Record], None] | None,
        name: str,
        wrap: Wrap = wrapped,
        clock: Clock = monotonic,
    ) -> None:
        """`record` is called by the thread and by whoever sends. `name` is the thread's."""
        self._link = link
        self._rank = rank
        self._reconnecting = reconnecting
        self._wrap = wrap
        self._connection: socket.socket
        self._inbox = inbox
        self._record = record
        self._clock = clock
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._write_lock = Lock()
        """Taken before `_lock`, or within it where that does not wait."""
        self._lock = Lock()
        # Guarded by the lock, as the link is.
        self._is_woken = False
        self._has_ended = False
        # Of the thread alone.
        self._is_full = False
        """The socket takes nothing more for now."""

    def start(self, connection: socket.socket) -> None:
        """Start the thread, which closes the connection once the link is over."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._wake_poller = select.poll()
        self._wake_poller.register(self._wake_reader, select.POLLIN)
        self._use(connection)
        self._thread.start()

    def _use(self, connection: socket.socket) -> None:
        """Exchange over this connection from now on."""
        self._connection = self._wrap(connection, self._rank, self._link.peer)
        self._connection.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(self._connection, select.POLLIN)
        self._is_full = False

    def begin_close(self, deadline_ns: int, *, farewell: bool) -> None:
        """Begin to close the link (`Link.begin_close`)."""
        with self._lock:
            self._link.begin_close(deadline_ns, farewell=farewell)
            self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, which ends by the deadline given to `begin_close`, unless it waits
        for a device that hangs. Tells whether it has ended, and the peer said farewell."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._link.has_peer_left

    def _wake(self) -> None:
        """Make the thread look; the caller holds the lock."""
        if not self._is_woken and not self._has_ended:
            self._is_woken = True
            os.write(self._wake_writer, b"\0")

    def _tell(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, _RECORDS):
                if self._record is not None:
                    self._record(output)
            elif isinstance(output, _OF_PLANES):
                self._serve(output)
            else:
                self._inbox.put(output)

    def _serve(self, output: Pull | Released) -> None:
        """Hand on what concerns the link's data plane."""
        raise AssertionError(f"a link without a data plane told {output}")

    def _let_go(self) -> None:
        """Detach from the peer's memory, if nothing is pulled any more; called before a
        farewell."""

    # The thread.

    def _run(self) -> None:
        try:
            self._exchange()
        except Exception as error:  # A thread that dies in silence would hang the run.
            with self._lock:
                outputs = self._link.fail(
                    RrfpError(
                        f"the link between ranks {self._rank} and {self._link.peer} failed on rank"
                        f" {self._rank} with {type(error).__name__}: {error}"
                    )
                )
            self._tell(outputs)
        finally:
            self._end()

    def _end(self) -> None:
        self._let_go()
        self._reconnecting.close()
        with self._lock:
            self._has_ended = True
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        with self._write_lock:
            with suppress(OSError):
                if last_words := self._link.last_words():
                    self._connection.sendmsg(last_words)
            self._drop()

    def _drop(self) -> None:
        """Close the connection; the caller holds the lock for it."""
        # Closing alone tells the peer nothing while a process that was forked meanwhile, such as a
        # data loader's worker, has the connection open, too.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exchange(self) -> None:
        link = self._link
        while True:
            if link.state is not State.OPEN:
                self._let_go()
            if self._reconnecting.has_other:
                self._break_off("has connected again")
            if link.is_broken:
                self._reconnect()
            with self._write_lock:
                self._write()
            with self._lock:
                if link.state is State.OVER:
                    return
                if link.is_broken:
                    continue
                now_ns = self._clock()
                patience_ns, due_ns = link.patience_ns(now_ns), link.due_ns
            if self._wait(now_ns, patience_ns, due_ns):
                self._read()
                continue
            with self._lock:
                outputs = link.waited(self._clock())
            self._tell(outputs)

    def _break_off(self, what: str) -> None:
        with self._lock:
            outputs = self._link.break_off(what)
        self._tell(outputs)

    def _reconnect(self) -> None:
        """Try once to come to another connection."""
        link = self._link
        with self._write_lock:
            self._drop()
        with self._lock:
            patience_s = link.patience_ns(self._clock()) / NS_PER_S
            num_useless = link.num_useless
        try:
            connection = self._reconnecting.attempt(patience_s, num_useless, self._pause)
        except NotYetError as error:
            with self._lock:
                outputs = link.could_not_attach(str(error), self._clock())
        except PeerGoneError:
            with self._lock:
                outputs = link.lose_gone()
        else:
            with self._write_lock:
                self._use(connection)
                with self._lock:
                    outputs = link.attach()
        self._tell(outputs)

    def _pause(self, pause_s: float) -> None:
        self._clear_wake(dict(self._wake_poller.poll(pause_s * 1000)))

    def _clear_wake(self, events: dict[int, int]) -> None:
        if self._wake_reader in events:
            with self._lock:
                os.read(self._wake_reader, 1)
                self._is_woken = False

    def _wait(self, now_ns: int, patience_ns: int, due_ns: int | None) -> bool:
        """Wait for whatever comes first; tell whether the connection has something to read."""
        # Rounded up: rounding down would spin through the last millisecond.
        patience_ms = patience_ns // _NS_PER_MS + 1 if patience_ns else 0
        if due_ns is not None:
            left_ms = max(0, due_ns - now_ns) // _NS_PER_MS
            patience_ms = min(patience_ms, left_ms)
            if left_ms == 0:
                sleep_until(due_ns)
        # A peer that has left leaves a closed connection, of which `poll` never tires.
        poller = self._wake_poller if self._link.awaits_pulls_only else self._poller
        events = dict(poller.poll(patience_ms))
        self._clear_wake(events)
        state = events.get(self._connection.fileno(), 0)
        if self._is_full and state & (select.POLLOUT | select.POLLHUP | select.POLLERR):
            self._set_full(False)
        return bool(state & ~select.POLLOUT)

    def _set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        events = select.POLLIN | (select.POLLOUT if is_full else 0)
        self._poller.modify(self._connection, events)

    def _write(self) -> None:
        """Write as much as the socket takes; the caller holds the lock for it."""
        link = self._link
        while not self._is_full:
            with self._lock:
                buffers = link.next_write(self._clock())
            if not buffers:
                return
            now = buffers[:MAX_BUFFERS_PER_WRITE]
            try:
                num_bytes = self._connection.sendmsg(now)
                is_full = num_bytes < sum(buffer.nbytes for buffer in now)
            except BlockingIOError:
                num_bytes, is_full = 0, True
            except (BrokenPipeError, ConnectionResetError):
                num_bytes, is_full = -1, False
            except OSError as error:
                self._break_off(f"cannot be reached any more ({error})")
                num_bytes, is_full = 0, False
            if is_full:
                self._set_full(True)
            with self._lock:
                outputs = (
                    link.write_failed() if num_bytes < 0 else link.wrote(num_bytes, self._clock())
                )
                has_said_all = link.has_said_all
            if outputs:
                self._tell(outputs)
            if has_said_all:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Take at most one frame."""
        link = self._link
        outputs: list[Output] | None = None
        while outputs is None:
            try:
                num_bytes = self._connection.recv_into(link.next_read())
            except BlockingIOError:
                return
            except (ConnectionResetError, BrokenPipeError):
                num_bytes = 0
            except OSError as error:
                self._break_off(f"cannot be reached any more ({error})")
                return
            with self._lock:
                outputs = link.received(num_bytes, self._clock())
        if outputs:
            self._tell(outputs)


# Drives the receiving end of a link: its thread alone writes.


class DestinationDriver(LinkDriver[DestinationLink]):
    """The end that receives."""

    puller: Puller | None = None
    """What takes messages out of the peer's outbox; set before the thread starts."""

    lander: Puller | None = None
    """Likewise, what takes to the device the tensors that the socket has carried."""

    def _serve(self, output: Pull | Released) -> None:
        assert isinstance(output, Pull)
        puller = self.puller if output.inline is None else self.lander
        assert puller is not None
        # A tensor that is kept is not to keep this driver, its inbox and what waits there.
        release = partial(_release, self._link, weakref.ref(self))
        puller.pull(output, self._pulled, release)

    def _pulled(self, pull: Pull, pulled: Sequence[torch.Tensor | None] | RrfpError) -> None:
        with self._lock:
            if isinstance(pulled, RrfpError):
                outputs = self._link.fail(pulled)
            else:
                outputs = self._link.pulled(pull, pulled, self._clock())
            if current_thread() is not self._thread:
                self._wake()
        self._tell(outputs)

    def wake_if_free(self) -> None:
        """Have the thread look, unless somebody holds the lock now."""
        if self._lock.acquire(blocking=False):
            try:
                self._wake()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        with self._lock:
            may_detach, is_lost = self._link.may_detach, self._link.is_lost
        if self.puller is not None and may_detach:
            self.puller.detach(waits=not is_lost)
            with self._lock:
                self._link.let_go()

    def consumed(self, step: int) -> None:
        """The compute thread took a message: give its credit back."""
        with self._lock:
            if self._link.consumed(step):
                self._wake()

    def grant(self, num_credits: int) -> None:
        """Raise the bound on messages in flight; a smaller one changes nothing."""
        with self._lock:
            if self._link.grant(num_credits):
                self._wake()

    def offer(self, awaiting: Awaiting, connection: socket.socket, attempt: int) -> None:
        """The source has connected again; on a thread of the listener. Takes the connection."""
        if awaiting.offer(connection, attempt):
            with self._lock:
                self._wake()
            return
        # It has not heard the answer to its farewell.
        with connection, suppress(OSError):
            connection.sendall(self._link.parting_words())


def _release(
    link: DestinationLink, of_driver: "weakref.ref[DestinationDriver]", offset: int
) -> None:
    """The tensors in a lent slot are gone: have the peer told. Whoever drops the last of them calls
    this between any two instructions, perhaps of the driver's own under its lock: so nobody waits
    for that, and what is not told now goes with whatever is written next."""
    link.release(offset)
    driver = of_driver()
    if driver is not None:
        driver.wake_if_free()


# Drives the sending end of a link: any thread may send, and none waits.


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
