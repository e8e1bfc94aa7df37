"""A Unix socket for one user's processes alone, with its secret in a file beside it.

Both lie in a directory that only its owner may enter. Whoever connects looks first whether it is
such a directory, of its own user: a path that comes out of a store is no proof of it.

Whoever has looked keeps the socket's file open, and can connect through it when it has no name any
more. So a rank removes the directory as soon as all its peers have looked: from then on nobody else
finds the socket, and a rank that is killed leaves no file.
"""

import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from rrfp.runtime.transport.handshake import SECRET_BYTES

_SOCKET, _SECRET = "socket", "secret"
"""The files in the directory."""


class StrangeFileError(Exception):
    """A file or a directory that no process of this user can have made so."""


def bind_private(directory: str) -> tuple[socket.socket, bytes]:
    """A socket bound in this directory, which `mkdtemp` has just made, and its secret."""
    secret = secrets.token_bytes(SECRET_BYTES)
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as opened:
        with _opened(_SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=opened) as file:
            os.write(file, secret)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.bind(_path_in(opened))
        except BaseException:
            bound.close()
            raise
    return bound, secret


def open_private(directory: str) -> tuple[int, bytes]:
    """The file of the socket in a directory, for `connect_opened`, and its secret.

    Raises StrangeFileError where another user can have put them there, and OSError where there is
    no socket.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with _opened(directory, flags | os.O_DIRECTORY) as opened:
        _check_is_private(opened)
        # From here on by the directory that was looked at, whatever its path names by now.
        with _opened(_SECRET, flags | os.O_NONBLOCK, dir_fd=opened) as file:
            _check_is_private(file)
            secret = os.read(file, SECRET_BYTES + 1)
        if len(secret) != SECRET_BYTES:
            raise StrangeFileError(f"its secret has {len(secret)} bytes, not {SECRET_BYTES}")
        return os.open(_SOCKET, os.O_PATH | os.O_NOFOLLOW, dir_fd=opened), secret


def connect_opened(file: int, timeout_s: float | None = None) -> socket.socket:
    """A connection to a socket by its file, whether that has a name or not. Raises OSError where
    nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"/proc/self/fd/{file}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_is_private(descriptor: int) -> None:
    """Raise StrangeFileError unless this user alone can read and write it."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StrangeFileError(
            f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and"
            f" not to user {os.geteuid()} alone"
        )


@contextmanager
def _opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path_in(directory: int) -> str:
    """The socket's path by the descriptor of its directory: a Unix socket's path must be short."""
    return f"/proc/self/fd/{directory}/{_SOCKET}"
