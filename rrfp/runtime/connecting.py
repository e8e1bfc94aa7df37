"""How the connections of a rank's links come about: listening for sources, dialling destinations.

A destination listens before it publishes where, and accepts on threads of its own while it dials,
so that ranks may start in any order and none waits for another's accept to dial. It stops
listening once all its sources are there.
"""

import json
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from rrfp.errors import UsageError
from rrfp.runtime.handshake import HandshakeError, accept_handshake, dial_handshake
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, reachable_address

_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_LOOK_S = 0.02
_UNIX_BUFFER_BYTES = 4 * 2**20
_LONGEST_UNIX_PATH = 100


class Listener:
    """Accepts the connections of this rank's sources, and drops everybody else's."""

    def __init__(
        self,
        rank: int,
        secret: bytes,
        sources: Collection[int],
        on_connected: Callable[[int, socket.socket], None],
        *,
        unix: bool,
        tcp: bool,
        address: str | None,
    ) -> None:
        """Listen at a Unix socket, at a TCP port, or both; `address` is the host name or address
        to listen at (default: `reachable_address()`).

        `on_connected` is called on a thread of the listener, once for each source, with a socket
        that it then owns. Raises UsageError when the address cannot be listened at.
        """
        self._rank = rank
        self._secret = secret
        self._on_connected = on_connected
        self._condition = Condition()
        # Guarded by the condition.
        self._missing = set(sources)
        self._pending: set[socket.socket] = set()
        self._handshakes: list[Thread] = []
        self._is_closed = False
        self._directory = ""
        self._sockets: list[socket.socket] = []
        self._unix_path = ""
        self._tcp_address: tuple[str, int] | None = None
        try:
            if unix:
                self._listen_unix()
            if tcp:
                self._listen_tcp(address)
        except BaseException:
            self._release()
            raise
        self._thread = Thread(target=self._accept, name="rrfp-listen", daemon=True)
        self._thread.start()

    def _listen_unix(self) -> None:
        # Only its owner may enter a directory that mkdtemp makes.
        self._directory = tempfile.mkdtemp(prefix="rrfp-")
        if len(self._directory) > _LONGEST_UNIX_PATH:
            Path(self._directory).rmdir()
            self._directory = tempfile.mkdtemp(prefix="rrfp-", dir="/tmp")
        self._unix_path = str(Path(self._directory) / "s")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listening)
        listening.bind(self._unix_path)
        listening.listen(_BACKLOG)

    def _listen_tcp(self, address: str | None) -> None:
        host = address if address is not None else reachable_address()
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise UsageError(
                f"rank {self._rank} cannot listen at '{host}' ({error}); give an address of this"
                " host that the others can reach"
            ) from None
        self._sockets.append(listening)
        self._tcp_address = (host, listening.getsockname()[1])

    def where(self) -> str:
        """What a source must know to dial this rank."""
        return json.dumps({"unix": self._unix_path, "tcp": self._tcp_address})

    def wait(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Wait until every source is connected; raises PeerLostError naming those that are not."""
        with self._condition:
            while self._missing:
                if rendezvous.remaining_s == 0:
                    ranks = ", ".join(str(source) for source in sorted(self._missing))
                    raise PeerLostError(
                        f"rank {self._rank} waited {timeout_s:g} s for a connection from rank"
                        f" {ranks}; see whether it has started and can reach this host"
                    )
                self._condition.wait(min(rendezvous.remaining_s, 1.0))

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
        for listening in self._sockets:
            listening.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        poller = select.poll()
        by_descriptor = {listening.fileno(): listening for listening in self._sockets}
        for listening in self._sockets:
            listening.setblocking(False)
            poller.register(listening, select.POLLIN)
        while True:
            ready = poller.poll(int(_LOOK_S * 1000))
            with self._condition:
                if self._is_closed or not self._missing:
                    return
                self._handshakes = [thread for thread in self._handshakes if thread.is_alive()]
            for descriptor, _ in ready:
                try:
                    connection, _ = by_descriptor[descriptor].accept()
                except BlockingIOError:
                    continue
                except OSError:
                    # Out of file descriptors, or the dialler is gone already: others may do better.
                    time.sleep(_LOOK_S)
                    continue
                self._begin_handshake(connection)

    def _begin_handshake(self, connection: socket.socket) -> None:
        handshake = Thread(
            target=self._prove, args=(connection,), name="rrfp-handshake", daemon=True
        )
        with self._condition:
            if self._is_closed:
                connection.close()
                return
            self._pending.add(connection)
            self._handshakes.append(handshake)
            handshake.start()

    def _prove(self, connection: socket.socket) -> None:
        """Have one dialler prove itself; a stranger is dropped without a word."""
        try:
            source = accept_handshake(
                connection, self._secret, self._missing, self._rank, _HANDSHAKE_S
            )
        except HandshakeError:
            source = None
        with self._condition:
            self._pending.discard(connection)
            if source is None or source not in self._missing or self._is_closed:
                connection.close()
                return
            self._missing.discard(source)
            _prepare(connection)
            self._on_connected(source, connection)
            self._condition.notify_all()


def dial(
    rank: int, peer: int, where: bytes, secret: bytes, *, unix: bool, timeout_s: float
) -> socket.socket:
    """Connect to rank `peer`, which listens at `where`; raises RrfpError naming it otherwise."""
    addresses = json.loads(where)
    try:
        if unix:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(addresses["unix"])
            except BaseException:
                connection.close()
                raise
        else:
            connection = socket.create_connection(addresses["tcp"], timeout=timeout_s)
    except OSError as error:
        place = addresses["unix"] if unix else addresses["tcp"]
        raise PeerLostError(
            f"rank {rank} cannot connect to rank {peer} at {place} ({error}); see whether it still"
            " runs and whether a firewall lies between"
        ) from None
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


def _prepare(connection: socket.socket) -> None:
    """Set what a link wants of its socket, whichever side made it."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # The kernel cuts this to its own maximum. TCP is left to size its buffers by itself.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
