"""The handshake: two ranks prove that they know the listener's secret, before anything else is
read.

The accepting side begins, with a random challenge only, so that another process learns nothing:

    accepting -> dialing    magic, version, challenge
    dialing   -> accepting  magic, version, source, destination, attempt, own challenge, proof
    accepting -> dialing    proof

A proof is an HMAC-SHA256 over the role, both ranks, the attempt and both challenges. A source
numbers its attempts to make one link, so that a delayed attempt does not replace a newer one.
"""

import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager

from rrfp.runtime.link.wire import MAGIC, VERSION

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_CHALLENGE = struct.Struct(f"<4sB3x{_CHALLENGE_BYTES}s")
_CLAIM = struct.Struct(f"<4sB3xIII{_CHALLENGE_BYTES}s{_PROOF_BYTES}s")
_CLAIMED = struct.Struct("<III")
"""Source, destination and attempt."""


class HandshakeError(Exception):
    """The other side is not the expected rank, or closed the connection, or took too long."""


def dial_handshake(
    connection: socket.socket,
    secret: bytes,
    source: int,
    destination: int,
    timeout_s: float,
    attempt: int = 0,
) -> None:
    """Authenticate as rank `source` to rank `destination`, and verify that side's proof, within the
    timeout. Raises HandshakeError, also for another version or a closed connection."""
    deadline_s = time.monotonic() + timeout_s
    magic, version, challenge = _CHALLENGE.unpack(_read(connection, _CHALLENGE.size, deadline_s))
    _check_version(magic, version)
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    claimed = source, destination, attempt
    proof = _proof(secret, b"dial", claimed, challenge, own)
    _write(connection, _CLAIM.pack(MAGIC, VERSION, *claimed, own, proof), deadline_s)
    answer = _read(connection, _PROOF_BYTES, deadline_s)
    expected = _proof(secret, b"accept", claimed, challenge, own)
    if not hmac.compare_digest(answer, expected):
        raise HandshakeError("it does not know the secret")


def accept_handshake(
    connection: socket.socket,
    secret: bytes,
    sources: Container[int],
    destination: int,
    timeout_s: float,
) -> tuple[int, int]:
    """Verify that the other side is one of the ranks `sources` and knows the secret, and
    authenticate as rank `destination`. Return the other side's rank and attempt number. Raises
    HandshakeError; the caller closes the connection."""
    deadline_s = time.monotonic() + timeout_s
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    _write(connection, _CHALLENGE.pack(MAGIC, VERSION, own), deadline_s)
    magic, version, source, wanted, attempt, challenge, proof = _CLAIM.unpack(
        _read(connection, _CLAIM.size, deadline_s)
    )
    _check_version(magic, version)
    claimed = source, wanted, attempt
    if wanted != destination:
        raise HandshakeError(f"it wants rank {wanted}")
    if not hmac.compare_digest(proof, _proof(secret, b"dial", claimed, own, challenge)):
        raise HandshakeError("it does not know the secret")
    if source not in sources:
        raise HandshakeError(f"rank {source} is not expected")
    _write(connection, _proof(secret, b"accept", claimed, own, challenge), deadline_s)
    return source, attempt


def _check_version(magic: bytes, version: int) -> None:
    """Raise HandshakeError if the other side has another magic or protocol version."""
    if magic != MAGIC or version != VERSION:
        raise HandshakeError(f"it speaks {magic!r} version {version}, not {MAGIC!r} {VERSION}")


def _proof(
    secret: bytes,
    role: bytes,
    claimed: tuple[int, int, int],
    accepting_challenge: bytes,
    dialing_challenge: bytes,
) -> bytes:
    """Compute the HMAC-SHA256 that the side of this role (`dial` or `accept`) sends."""
    text = role + _CLAIMED.pack(*claimed) + accepting_challenge + dialing_challenge
    return hmac.digest(secret, text, "sha256")


def _read(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Read exactly this many bytes; the deadline is for all of them together. Raises HandshakeError
    at the deadline, or if the connection breaks or is closed."""
    data = b""
    while len(data) < num_bytes:
        _set_time_left(connection, deadline_s)
        try:
            part = connection.recv(num_bytes - len(data))
        except TimeoutError:
            raise HandshakeError("it did not answer in time") from None
        except OSError as error:
            raise HandshakeError(f"the connection broke ({error})") from None
        if not part:
            raise HandshakeError("it closed the connection")
        data += part
    return data


def _write(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    """Write all bytes before the deadline. Raises HandshakeError."""
    _set_time_left(connection, deadline_s)
    try:
        connection.sendall(data)
    except OSError as error:
        raise HandshakeError(f"the connection broke ({error})") from None


def _set_time_left(connection: socket.socket, deadline_s: float) -> None:
    """Set the socket's timeout to the time left. Raises HandshakeError at the deadline, or if the
    connection is closed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise HandshakeError("it did not answer in time")
    try:
        connection.settimeout(left_s)
    except OSError as error:
        raise HandshakeError(f"the connection broke ({error})") from None


# A Unix socket for one user's processes only, with its secret in a file beside it.
#
# Both lie in a directory that only its owner may enter. A connecting rank first checks the owner
# and the mode of the directory, because anybody may have written its path to the store.
#
# The rank keeps the socket's file open, and can connect through it after its name was removed. So a
# listening rank removes the directory as soon as all its peers have opened the file: no other
# process finds the socket then, and a rank that is killed leaves no file.

_SOCKET, _SECRET = "socket", "secret"
"""The files in the directory."""


class UntrustedFileError(Exception):
    """A file or directory belongs to another user, or others may access it."""


def bind_private(directory: str) -> tuple[socket.socket, bytes]:
    """Bind, without listening, a Unix socket in this directory, which `mkdtemp` has just made, and
    write a new secret to a file beside it; return both."""
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
    """Open the file of the socket in a directory; return it, for `connect_opened`, and the secret.

    Raises UntrustedFileError if another user may have put them there or the secret has another
    length, and OSError if there is no socket.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with _opened(directory, flags | os.O_DIRECTORY) as opened:
        _check_is_private(opened)
        # Relative to the checked directory: its path may name another one by now.
        with _opened(_SECRET, flags | os.O_NONBLOCK, dir_fd=opened) as file:
            _check_is_private(file)
            secret = os.read(file, SECRET_BYTES + 1)
        if len(secret) != SECRET_BYTES:
            raise UntrustedFileError(f"its secret has {len(secret)} bytes, not {SECRET_BYTES}")
        return os.open(_SOCKET, os.O_PATH | os.O_NOFOLLOW, dir_fd=opened), secret


def connect_opened(file: int, timeout_s: float | None = None) -> socket.socket:
    """Connect to a Unix socket by its open file, which needs no name. Raises OSError if that fails:
    ConnectionRefusedError if no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"/proc/self/fd/{file}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_is_private(descriptor: int) -> None:
    """Raise UntrustedFileError unless it belongs to this user and grants nothing to group and
    others."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UntrustedFileError(
            f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and"
            f" not to user {os.geteuid()} alone"
        )


@contextmanager
def _opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """Yield the descriptor of an opened file, and close it at the end. A new file is readable and
    writable by this user only. A relative path is below `dir_fd`."""
    descriptor = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path_in(directory: int) -> str:
    """Return the socket's path by the descriptor of its directory, because a Unix socket's path
    must be short."""
    return f"/proc/self/fd/{directory}/{_SOCKET}"
