"""Two ranks prove to each other that they know the listener's secret, before anything else is read.

The accepting side speaks first, with a random challenge only, so that a stranger learns nothing:

    accepting -> dialling   magic, version, challenge
    dialling -> accepting   magic, version, source, destination, attempt, own challenge, proof
    accepting -> dialling   proof

A proof is an HMAC-SHA256 over the role, both ranks, the attempt and both challenges. A source
numbers its attempts to make one link, so that a late one does not take the place of a later one.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Container

from rrfp.runtime.links.wire import MAGIC, VERSION

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_CHALLENGE = struct.Struct(f"<4sB3x{_CHALLENGE_BYTES}s")
_CLAIM = struct.Struct(f"<4sB3xIII{_CHALLENGE_BYTES}s{_PROOF_BYTES}s")
_CLAIMED = struct.Struct("<III")


class HandshakeError(Exception):
    """The other side is not the rank it should be, or closed, or took too long."""


def dial_handshake(
    connection: socket.socket,
    secret: bytes,
    source: int,
    destination: int,
    timeout_s: float,
    attempt: int = 0,
) -> None:
    """Prove to be rank `source` to rank `destination`, and have it prove itself."""
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
    """Have the other side prove to be one of the ranks `sources`, and prove to be rank
    `destination`; gives the other side's rank and the number of its attempt."""
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
    if magic != MAGIC or version != VERSION:
        raise HandshakeError(f"it speaks {magic!r} version {version}, not {MAGIC!r} {VERSION}")


def _proof(
    secret: bytes,
    role: bytes,
    claimed: tuple[int, int, int],
    accepting_challenge: bytes,
    dialling_challenge: bytes,
) -> bytes:
    text = role + _CLAIMED.pack(*claimed) + accepting_challenge + dialling_challenge
    return hmac.digest(secret, text, "sha256")


def _read(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Exactly so many bytes; the deadline bounds them all, however slowly they drip."""
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
    _set_time_left(connection, deadline_s)
    try:
        connection.sendall(data)
    except OSError as error:
        raise HandshakeError(f"the connection broke ({error})") from None


def _set_time_left(connection: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise HandshakeError("it did not answer in time")
    try:
        connection.settimeout(left_s)
    except OSError as error:
        raise HandshakeError(f"the connection broke ({error})") from None
