"""How the connections of a rank's links come about: listening for sources, dialling destinations.

A destination listens before it publishes where, and accepts on threads of its own while it dials,
so that ranks may start in any order and none waits for another's accept to dial. It stops
listening once all its sources are there.

Between hosts a connection may be under TLS (`rrfp.runtime.transport.tls`).

Who may connect is who knows the listener's secret. That of a Unix socket lies in a file beside it,
in a directory that only its owner may enter, and goes nowhere else. That of a TCP port, where a
source is on another host, stands in the store with the port's address: whoever can read the store
can connect.
"""

import secrets
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Condition, Thread

from rrfp.errors import UsageError
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, reachable_address
from rrfp.runtime.transport.doorman import let_in, named_sources
from rrfp.runtime.transport.handshake import (
    SECRET_BYTES,
    HandshakeError,
    accept_handshake,
    dial_handshake,
)
from rrfp.runtime.transport.private_socket import StrangeFileError, bind_private, connect_private
from rrfp.runtime.transport.tls import TlsError, Tunnels
from rrfp.runtime.transport.whereabouts import Port, Where

_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_LOOK_S = 0.02
_UNIX_BUFFER_BYTES = 4 * 2**20
_FAILURE_LOOK_S = 0.2
"""How often a rank that waits for its sources looks whether one has failed."""


class Listener:
    """Accepts the connections of this rank's sources, and drops everybody else's."""

    def __init__(
        self,
        rank: int,
        sources: Collection[int],
        on_connected: Callable[[int, socket.socket], None],
        *,
        unix: bool,
        tcp: bool,
        address: str | None,
        tunnels: Tunnels | None = None,
    ) -> None:
        """To listen at a Unix socket, at a TCP port, or both; `address` is the host name or address
        to listen at (default: `reachable_address()`). With `tunnels` the port speaks TLS.

        `on_connected` is called on a thread of the listener, once for each source, with a socket
        that it then owns.
        """
        self._rank = rank
        self._on_connected = on_connected
        self._unix, self._tcp, self._address = unix, tcp, address
        self._tunnels = tunnels
        self._condition = Condition()
        # Guarded by the condition.
        self._missing = set(sources)
        self._opening: set[int] = set()
        """Sources that have proved themselves and are handed over."""
        self._pending: set[socket.socket] = set()
        self._handshakes: list[Thread] = []
        self._is_closed = False
        self._directory: str | None = None
        self._port: Port | None = None
        self._sockets: list[tuple[socket.socket, bytes]] = []
        """Each with the secret that opens it."""
        self._thread = Thread(target=self._accept, name="rrfp-listen", daemon=True)

    def open(self) -> None:
        """Listen and accept, until every source is there or until `close`. Raises UsageError when
        the address cannot be listened at."""
        try:
            if self._unix:
                self._listen_unix()
            if self._tcp:
                self._listen_tcp()
        except BaseException:
            self._release()
            raise
        self._thread.start()

    def _listen_unix(self) -> None:
        # Only its owner may enter a directory that mkdtemp makes.
        self._directory = tempfile.mkdtemp(prefix="rrfp-")
        listening, secret = bind_private(self._directory)
        self._sockets.append((listening, secret))
        listening.listen(_BACKLOG)

    def _listen_tcp(self) -> None:
        host = self._address if self._address is not None else reachable_address()
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
            let_in(listening, named_sources())
        except OSError as error:
            raise UsageError(
                f"rank {self._rank} cannot listen at '{host}' ({error}); give an address of this"
                " host that the others can reach"
            ) from None
        fingerprint = None if self._tunnels is None else self._tunnels.certify()
        secret = secrets.token_bytes(SECRET_BYTES)
        self._port = Port(host, listening.getsockname()[1], secret, fingerprint)
        self._sockets.append((listening, self._port.secret))

    @property
    def where(self) -> Where:
        """What a source must know to dial this rank."""
        return Where(self._directory, self._port)

    def wait(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Wait until every source is connected; raises PeerLostError naming those that are not, or
        the rank that said that it has failed."""
        while not self._is_complete(min(rendezvous.remaining_s, _FAILURE_LOOK_S)):
            rendezvous.raise_if_failed()
            if rendezvous.remaining_s == 0:
                with self._condition:
                    missing = sorted(self._missing | self._opening)
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

    def close(self) -> None:
        """Stop listening, drop whoever has not proved itself, and join every thread."""
        with self._condition:
            self._is_closed = True
            for connection in self._pending:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for handshake in self._handshakes:
            handshake.join()
        self._release()

    def _release(self) -> None:
        for listening, _ in self._sockets:
            listening.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        poller = select.poll()
        by_descriptor = {each[0].fileno(): each for each in self._sockets}
        for listening, _ in self._sockets:
            listening.setblocking(False)
            poller.register(listening, select.POLLIN)
        while True:
            ready = poller.poll(int(_LOOK_S * 1000))
            with self._condition:
                if self._is_closed or not self._missing:
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
                    time.sleep(_LOOK_S)
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
            self._pending.add(connection)
            self._handshakes.append(handshake)
            handshake.start()

    def _prove(self, connection: socket.socket, secret: bytes) -> None:
        """Have one dialler prove itself; a stranger is dropped without a word."""
        accepted, source = connection, None
        with suppress(TlsError, HandshakeError):
            if self._tunnels is not None and connection.family != socket.AF_UNIX:
                connection = self._tunnels.accept(accepted, _HANDSHAKE_S)
            source = accept_handshake(connection, secret, self._missing, self._rank, _HANDSHAKE_S)
        with self._condition:
            if source is None or source not in self._missing or self._is_closed:
                self._pending.discard(accepted)
                connection.close()
                return
            self._missing.discard(source)
            self._opening.add(source)
        # Not within the lock: it may take long, and other sources dial meanwhile.
        try:
            _prepare(connection)
            self._on_connected(source, connection)
        except BaseException:
            connection.close()
            with self._condition:
                self._missing.add(source)
            raise
        finally:
            with self._condition:
                self._pending.discard(accepted)
                self._opening.discard(source)
                self._condition.notify_all()


def dial(
    rank: int,
    peer: int,
    where: Where,
    *,
    unix: bool,
    timeout_s: float,
    tunnels: Tunnels | None = None,
) -> socket.socket:
    """Connect to rank `peer`, which listens at `where`, under TLS with `tunnels` unless
    that is a Unix socket. Raises PeerLostError naming the peer where that fails."""
    try:
        connection, secret = _connect(where, unix=unix, timeout_s=timeout_s)
    except (OSError, StrangeFileError) as error:
        place = f"{where.directory}" if unix else f"{where.tcp and where.tcp.shown}"
        told = f"rank {rank} cannot connect to rank {peer} at {place} ({error}); "
        if isinstance(error, StrangeFileError):
            told += "start all ranks as one user, and see who else can write to the run's store"
        else:
            told += "see whether it still runs and whether a firewall lies between"
        raise PeerLostError(told) from None
    if tunnels is not None and not unix:
        connection = _under_tls(connection, rank, peer, where, tunnels, timeout_s)
    try:
        dial_handshake(connection, secret, rank, peer, min(timeout_s, _HANDSHAKE_S))
    except HandshakeError as error:
        connection.close()
        raise PeerLostError(
            f"rank {rank} could not prove itself to rank {peer}: {error}; see whether rank {peer}"
            " still runs, belongs to this run and receives from this rank"
        ) from None
    except BaseException:
        connection.close()
        raise
    _prepare(connection)
    return connection


def _under_tls(
    connection: socket.socket,
    rank: int,
    peer: int,
    where: Where,
    tunnels: Tunnels,
    timeout_s: float,
) -> socket.socket:
    assert where.tcp is not None
    assert where.tcp.fingerprint is not None
    try:
        return tunnels.dial(connection, where.tcp.fingerprint, min(timeout_s, _HANDSHAKE_S))
    except TlsError as error:
        raise PeerLostError(
            f"rank {rank} has no TLS with rank {peer} at {where.tcp.shown}: {error}; see whether"
            f" rank {peer} still runs, and who else can write to the run's store"
        ) from None


def _connect(where: Where, *, unix: bool, timeout_s: float) -> tuple[socket.socket, bytes]:
    if unix and where.directory is not None:
        return connect_private(where.directory)
    if not unix and where.tcp is not None:
        address = where.tcp.host, where.tcp.port
        return socket.create_connection(address, timeout=timeout_s), where.tcp.secret
    raise OSError(f"it listens at no {'Unix socket' if unix else 'TCP port'}")


def _prepare(connection: socket.socket) -> None:
    """Set what a link wants of its socket, whichever side made it."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # The kernel cuts this to its own maximum. TCP is left to size its buffers by itself.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
