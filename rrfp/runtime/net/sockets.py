"""The sockets of links: the one place where they are made to listen, and set up once connected."""

import socket

from rrfp.runtime.net.handshake import bind_private
from rrfp.runtime.net.source_filter import let_in, named_sources

_BACKLOG = 1024
_UNIX_BUFFER_BYTES = 4 * 2**20


def listen_unix(directory: str) -> tuple[socket.socket, bytes]:
    """Listens in a directory of this user's alone; with the secret that lies beside it."""
    listening, secret = bind_private(directory)
    listening.listen(_BACKLOG)
    return listening, secret


def listen_tcp(host: str) -> socket.socket:
    """Listens at a port of this address or name that the system chooses, to the run's hosts alone
    where these are known and the kernel permits it. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    if (sources := named_sources()) is not None:
        let_in(listening, sources)
    return listening


def prepare(connection: socket.socket) -> None:
    """Set what a link wants of its socket, whichever side made it."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # The kernel cuts this to its own maximum. TCP is left to size its buffers by itself.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
