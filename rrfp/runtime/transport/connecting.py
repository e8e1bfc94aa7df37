"""How the connections of a rank's links come about: listening for sources, for as long as it lives.

A destination listens before it publishes where, and accepts on threads of its own while it dials,
so that ranks may start in any order and none waits for another's accept to dial. It goes on
listening, for a source whose connection breaks dials again; and a rank without sources listens,
too, for its destinations knock to see whether it is still there (`rrfp.runtime.transport.door`).

Between hosts a connection may be under TLS (`rrfp.runtime.transport.tls`).

Who may connect is who knows the listener's secret. That of a Unix socket lies in a file beside it,
in a directory that only its owner may enter, and goes nowhere else; both are removed once all peers
know them. That of a TCP port, where a peer is on another host, stands in the store with the port's
address: whoever can read the store can connect.

Strangers may connect at any time, and get nothing but a challenge. So many at a time may try to
prove themselves; beyond that the one that has tried longest is dropped, for a rank takes no time.
"""

import os
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
from rrfp.runtime import variables
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, reachable_address
from rrfp.runtime.transport.handshake import SECRET_BYTES, HandshakeError, accept_handshake
from rrfp.runtime.transport.sockets import listen_tcp, listen_unix, prepare
from rrfp.runtime.transport.tls import TlsError, Tunnels
from rrfp.runtime.transport.whereabouts import Port, Where

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
