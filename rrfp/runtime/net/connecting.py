"""How the connections of a rank's links come about: listening for sources, for as long as it lives.

A destination listens before it publishes where, and accepts on threads of its own while it dials,
so that ranks may start in any order and none waits for another's accept to dial. It goes on
listening, for a source whose connection breaks dials again; and a rank without sources listens,
too, for its destinations knock to see whether it is still there (`rrfp.runtime.net.connecting`).

Between hosts a connection may be under TLS (`rrfp.runtime.net.tls`).

Who may connect is who knows the listener's secret. That of a Unix socket lies in a file beside it,
in a directory that only its owner may enter, and goes nowhere else; both are removed once all peers
know them. That of a TCP port, where a peer is on another host, stands in the store with the port's
address: whoever can read the store can connect.

Strangers may connect at any time, and get nothing but a challenge. So many at a time may try to
prove themselves; beyond that the one that has tried longest is dropped, for a rank takes no time.
"""

import errno
import json
import os
import secrets
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Condition, Lock, Thread
from typing import Self

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables
from rrfp.runtime.link.driver import NotYetError, Pause, PeerGoneError
from rrfp.runtime.net.handshake import (
    SECRET_BYTES,
    HandshakeError,
    StrangeFileError,
    accept_handshake,
    connect_opened,
    dial_handshake,
    open_private,
)
from rrfp.runtime.net.sockets import listen_tcp, listen_unix, prepare
from rrfp.runtime.net.tls import FINGERPRINT_BYTES, TlsError, Tunnels
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, reachable_address
from rrfp.strict_json import integer, member, text

# Where a rank listens, as it tells its sources.


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port that a rank listens at."""

    host: str
    port: int
    secret: bytes
    fingerprint: bytes | None = None
    """Of the certificate that it shows; None: it speaks no TLS."""

    @property
    def shown(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Where:
    """What a peer must know to dial a rank, or to knock."""

    directory: str | None
    """Where its Unix socket is, with the secret; None: it has none."""
    tcp: Port | None
    transport: TransportName = TransportName.INLINE
    """What is to carry tensors, as this rank was asked."""

    def to_json(self) -> str:
        values = asdict(self)
        if self.tcp is not None:
            values["tcp"]["secret"] = self.tcp.secret.hex()
            shown = self.tcp.fingerprint
            values["tcp"]["fingerprint"] = None if shown is None else shown.hex()
        return json.dumps(values)

    @classmethod
    def decode(cls, value: object) -> Self:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        directory, tcp = member(value, "directory"), member(value, "tcp")
        return cls(
            None if directory is None else _plain_path(text(directory)),
            None if tcp is None else _port(tcp),
            TransportName(text(member(value, "transport"))),
        )


def _plain_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("its directory is not an absolute path")
    return path


def _port(value: object) -> Port:
    port = integer(member(value, "port"))
    secret = bytes.fromhex(text(member(value, "secret")))
    shown = member(value, "fingerprint")
    fingerprint = None if shown is None else bytes.fromhex(text(shown))
    if not 0 < port < 2**16 or len(secret) != SECRET_BYTES:
        raise ValueError("its port or its secret is invalid")
    if fingerprint is not None and len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError("its fingerprint is invalid")
    return Port(text(member(value, "host")), port, secret, fingerprint)


# Where a peer listens, known to a rank for as long as its links live.
#
# A source dials there, and dials again when its connection breaks. A destination only knocks, to
# see whether anybody is still there: each rank listens until its links are over, so where nobody
# does, the peer has ended. A dead process listens no more, and one that fails stops listening
# first.


class DialError(PeerLostError):
    """There is no connection. In one sentence: who cannot connect to whom, why, and what to see
    after."""

    def __init__(self, sentence: str, *, is_gone: bool = False) -> None:
        super().__init__(sentence)
        self.is_gone = is_gone
        """Whether nobody listens there."""


class Door:
    """Rank `peer`'s, as rank `rank` knows it."""

    def __init__(
        self, rank: int, peer: int, where: Where, *, unix: bool, tunnels: Tunnels | None = None
    ) -> None:
        """At its Unix socket or its TCP port; at that, with `tunnels`, under TLS. Raises
        PeerLostError naming the peer where there is no such place."""
        self._rank = rank
        self._peer = peer
        self._tunnels = None if unix else tunnels
        self._file = -1
        self._port = where.tcp
        self._shown = where.directory if unix else where.tcp and where.tcp.shown
        try:
            if unix and where.directory is not None:
                self._file, self._secret = open_private(where.directory)
            elif not unix and where.tcp is not None:
                self._secret = where.tcp.secret
            else:
                raise OSError(f"it listens at no {'Unix socket' if unix else 'TCP port'}")
        except (OSError, StrangeFileError) as error:
            raise self._no_connection(error) from None

    def dial(self, timeout_s: float, attempt: int = 0) -> socket.socket:
        """A connection whose two sides have proved themselves. Raises DialError."""
        deadline_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(deadline_s - time.monotonic(), 0.001)

        try:
            connection = self._connect(timeout_s)
        except OSError as error:
            raise self._no_connection(error) from None
        if self._tunnels is not None:
            connection = self._under_tls(connection, self._tunnels, left_s())
        try:
            dial_handshake(connection, self._secret, self._rank, self._peer, left_s(), attempt)
        except HandshakeError as error:
            connection.close()
            raise DialError(
                f"rank {self._rank} could not prove itself to rank {self._peer}: {error}; see"
                f" whether rank {self._peer} still runs, belongs to this run and receives from this"
                " rank"
            ) from None
        except BaseException:
            connection.close()
            raise
        prepare(connection)
        return connection

    def knock(self, timeout_s: float) -> None:
        """See whether somebody listens there. Raises DialError."""
        try:
            self._connect(timeout_s).close()
        except OSError as error:
            raise self._no_connection(error) from None

    def close(self) -> None:
        """Forget where it is; a second call does nothing."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _connect(self, timeout_s: float) -> socket.socket:
        if self._file >= 0:
            return connect_opened(self._file, timeout_s)
        if self._port is None:
            raise OSError(errno.EBADF, "its door is closed")
        return socket.create_connection((self._port.host, self._port.port), timeout=timeout_s)

    def _no_connection(self, error: OSError | StrangeFileError) -> DialError:
        told = f"rank {self._rank} cannot connect to rank {self._peer} at {self._shown} ({error}); "
        if isinstance(error, StrangeFileError):
            told += "start all ranks as one user, and see who else can write to the run's store"
        else:
            told += "see whether it still runs and whether a firewall lies between"
        return DialError(told, is_gone=isinstance(error, ConnectionRefusedError))

    def _under_tls(
        self, connection: socket.socket, tunnels: Tunnels, timeout_s: float
    ) -> socket.socket:
        assert self._port is not None
        assert self._port.fingerprint is not None
        try:
            return tunnels.dial(connection, self._port.fingerprint, timeout_s)
        except TlsError as error:
            raise DialError(
                f"rank {self._rank} has no TLS with rank {self._peer} at {self._port.shown}:"
                f" {error}; see whether rank {self._peer} still runs, and who else can write to the"
                " run's store"
            ) from None


_HANDSHAKE_S = 10.0
_MOST_UNPROVED = 64
_PAUSE_S = 0.02
"""Before the next try to accept, out of file descriptors."""
_FAILURE_LOOK_S = 0.2
"""How often a rank that waits for its sources looks whether one has failed."""


OnConnected = Callable[[int, socket.socket, int], None]
"""Is handed, on a thread of the listener, a source, a socket that it then owns, and the number of
the source's attempt: 0 once for each source, and perhaps higher ones later."""


class Listener:
    """Accepts the connections of this rank's sources, and drops everybody else's."""

    def __init__(
        self,
        rank: int,
        sources: Collection[int],
        on_connected: OnConnected,
        *,
        unix: bool,
        tcp: bool,
        address: str | None,
        tunnels: Tunnels | None = None,
    ) -> None:
        """To listen at a Unix socket, at a TCP port, or both; `address` is the host name or address
        to listen at (default: `reachable_address()`). With `tunnels` the port speaks TLS."""
        self._rank = rank
        self._sources = frozenset(sources)
        self._on_connected = on_connected
        self._unix, self._tcp, self._address = unix, tcp, address
        self._tunnels = tunnels
        self._condition = Condition()
        # Guarded by the condition.
        self._missing = set(sources)
        self._opening: set[int] = set()
        """Sources that have proved themselves for the first time and are handed over."""
        self._unproved: dict[socket.socket, Thread] = {}
        """In the order in which they came."""
        self._handshakes: list[Thread] = []
        self._is_closed = False
        self._directory: str | None = None
        self._port: Port | None = None
        self._sockets: list[tuple[socket.socket, bytes]] = []
        """Each with the secret that opens it."""
        self._thread = Thread(target=self._accept, name="rrfp-listen", daemon=True)

    def open(self) -> None:
        """Listen. Raises UsageError when the address cannot be listened at."""
        try:
            if self._unix:
                # Only its owner may enter a directory that mkdtemp makes.
                where = os.environ.get(variables.DIRECTORY)
                self._directory = tempfile.mkdtemp(prefix="rrfp-", dir=where)
                self._sockets.append(listen_unix(self._directory))
            if self._tcp:
                self._open_port()
        except BaseException:
            self._release()
            raise

    def _open_port(self) -> None:
        host = self._address if self._address is not None else reachable_address()
        try:
            listening = listen_tcp(host)
        except OSError as error:
            raise UsageError(
                f"rank {self._rank} cannot listen at '{host}' ({error}); give an address of this"
                " host that the others can reach"
            ) from None
        secret = secrets.token_bytes(SECRET_BYTES)
        self._sockets.append((listening, secret))
        fingerprint = None if self._tunnels is None else self._tunnels.certify()
        self._port = Port(host, listening.getsockname()[1], secret, fingerprint)

    @property
    def where(self) -> Where:
        """What a peer must know to dial this rank, or to knock."""
        return Where(self._directory, self._port)

    def accept(self) -> None:
        """Accept connections from now on, until `close`."""
        if self._sockets:  # a rank without peers has none, and nothing would end the wait
            self._thread.start()

    def wait(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        raise_if_gone: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Wait until every source is connected; raises PeerLostError naming those that are not, or
        the rank that said that it has failed. `raise_if_gone` raises it for a source that has
        died."""
        while not self._is_complete(min(rendezvous.remaining_s, _FAILURE_LOOK_S)):
            rendezvous.raise_if_failed()
            with self._condition:
                missing = sorted(self._missing | self._opening)
            for source in missing:
                raise_if_gone(source)
            if missing:
                rendezvous.notice(missing)
            if rendezvous.remaining_s == 0:
                ranks = ", ".join(str(source) for source in missing)
                raise PeerLostError(
                    f"rank {self._rank} waited {timeout_s:g} s for a connection from rank"
                    f" {ranks}; see whether it has started and can reach this host"
                )

    def _is_complete(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._missing and not self._opening, timeout_s
            )

    def hide(self) -> None:
        """Remove the files: all peers know them, and nobody else is to."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Stop listening, drop whoever has not proved itself, and join every thread; a second call
        does nothing."""
        with self._condition:
            self._is_closed = True
            for connection in self._unproved:
                _shut_down(connection)
        for listening, _ in self._sockets:
            # Ends the wait of the thread, and also what a process that was forked keeps open.
            _shut_down(listening)
        if self._thread.ident is not None:
            self._thread.join()
        for handshake in self._handshakes:
            handshake.join()
        self._release()

    def _release(self) -> None:
        for listening, _ in self._sockets:
            listening.close()
        self.hide()

    def _accept(self) -> None:
        poller = select.poll()
        by_descriptor = {each[0].fileno(): each for each in self._sockets}
        for listening, _ in self._sockets:
            listening.setblocking(False)
            poller.register(listening, select.POLLIN)
        while True:
            ready = poller.poll()
            with self._condition:
                if self._is_closed:
                    return
                self._handshakes = [thread for thread in self._handshakes if thread.is_alive()]
            for descriptor, _ in ready:
                listening, secret = by_descriptor[descriptor]
                try:
                    connection, _ = listening.accept()
                except BlockingIOError:
                    continue
                except OSError:
                    # Out of file descriptors, or the dialler is gone already: others may do better.
                    time.sleep(_PAUSE_S)
                    continue
                self._begin_handshake(connection, secret)

    def _begin_handshake(self, connection: socket.socket, secret: bytes) -> None:
        handshake = Thread(
            target=self._prove, args=(connection, secret), name="rrfp-handshake", daemon=True
        )
        with self._condition:
            if self._is_closed:
                connection.close()
                return
            evicted = None
            if len(self._unproved) >= _MOST_UNPROVED:
                oldest = next(iter(self._unproved))
                evicted = self._unproved.pop(oldest)
                _shut_down(oldest)
            try:
                handshake.start()
            except RuntimeError:
                # There may be no more threads for now; who is no stranger dials again.
                connection.close()
                return
            self._unproved[connection] = handshake
            self._handshakes.append(handshake)
        if evicted is not None:
            evicted.join(_PAUSE_S)  # so that no more threads are made than can end

    def _prove(self, connection: socket.socket, secret: bytes) -> None:
        """Have one dialler prove itself; a stranger is dropped without a word."""
        accepted, source, attempt = connection, -1, 0
        with suppress(TlsError, HandshakeError):
            if self._tunnels is not None and connection.family != socket.AF_UNIX:
                connection = self._tunnels.accept(accepted, _HANDSHAKE_S)
            source, attempt = accept_handshake(
                connection, secret, self._sources, self._rank, _HANDSHAKE_S
            )
        is_first = attempt == 0
        with self._condition:
            self._unproved.pop(accepted, None)
            is_known = source in self._sources and source not in self._opening
            if not is_known or is_first != (source in self._missing) or self._is_closed:
                connection.close()
                return
            if is_first:
                self._missing.discard(source)
                self._opening.add(source)
        # Not within the lock: it may take long, and other sources dial meanwhile.
        try:
            prepare(connection)
            self._on_connected(source, connection, attempt)
        except BaseException:
            connection.close()
            with self._condition:
                if is_first:
                    self._missing.add(source)
            raise
        finally:
            with self._condition:
                self._opening.discard(source)
                self._condition.notify_all()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# How an end obtains another connection: a source dials, and a destination waits to be dialled.
#
# Each `attempt` is one step, on the link's own thread, within the time that it is given. It returns
# a connection, or raises why there is none yet, or that the peer is gone.


_KNOCK_S = 0.25
"""Interval at which a destination that waits checks whether its source is still there."""
_DIAL_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Dialling:
    """Connects a source again. Implements `rrfp.runtime.link.driver.Reconnector`."""

    has_other = False

    def __init__(self, door: Door) -> None:
        self._door = door
        self._num_attempts = 0

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        if num_useless > 1:
            pause(min(timeout_s, _DIAL_AGAIN_S * 2**num_useless, _LONGEST_PAUSE_S))
        began_s = time.monotonic()
        self._num_attempts += 1
        try:
            return self._door.dial(timeout_s, self._num_attempts)
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            # Whoever refuses does it at once, and may not do it soon.
            pause(max(0.0, began_s + _DIAL_AGAIN_S - time.monotonic()))
            raise NotYetError(str(error)) from None

    def close(self) -> None:
        pass


class Awaiting:
    """Waits until a destination's source connects again. Implements
    `rrfp.runtime.link.driver.Reconnector`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = Lock()
        # Guarded by the lock, but that `has_other` may look.
        self._other: socket.socket | None = None
        self._last_attempt = 0
        self._is_closed = False

    @property
    def has_other(self) -> bool:
        return self._other is not None

    def offer(self, connection: socket.socket, attempt: int) -> bool:
        """The source has connected again; on a thread of the listener. Takes the connection, unless
        a later one is here or the link is over, which it tells."""
        with self._lock:
            if self._is_closed:
                return False
            dropped: socket.socket | None = connection
            if attempt > self._last_attempt:
                dropped, self._other = self._other, connection
                self._last_attempt = attempt
        if dropped is not None:
            dropped.close()
        return True

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        if not self.has_other:
            pause(min(timeout_s, _KNOCK_S))
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            return other
        try:
            self._door.knock(min(timeout_s, _KNOCK_S))
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            raise NotYetError(str(error)) from None
        raise NotYetError("its source has not connected again")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            other, self._other = self._other, None
        if other is not None:
            with suppress(OSError):
                other.close()
