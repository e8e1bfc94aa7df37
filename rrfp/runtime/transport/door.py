"""Where a peer listens, known to a rank for as long as its links live.

A source dials there, and dials again when its connection breaks. A destination only knocks, to see
whether anybody is still there: each rank listens until its links are over, so where nobody does,
the peer has ended. A dead process listens no more, and one that fails stops listening first.
"""

import errno
import os
import socket
import time
from contextlib import suppress

from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.transport.handshake import HandshakeError, dial_handshake
from rrfp.runtime.transport.private_socket import StrangeFileError, connect_opened, open_private
from rrfp.runtime.transport.sockets import prepare
from rrfp.runtime.transport.tls import TlsError, Tunnels
from rrfp.runtime.transport.whereabouts import Where


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
