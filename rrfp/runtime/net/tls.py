"""TLS on the connections between hosts.

A listener makes a certificate of its own for each opening, and its fingerprint travels with its
address: whoever dials trusts that one certificate and no authority. The dialling side proves itself
inside, by the listener's secret (`rrfp.runtime.net.handshake`).

Links write scattered buffers and wait in `poll`, which a socket under TLS cannot serve. So a link
has the plain end of a tunnel: a thread carries bytes between that and the connection. What happens
to the one end happens to the other: its end, its loss, its being full.
"""

import hashlib
import hmac
import os
import select
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any, cast

from rrfp.requirements import install_hint

HOW_TO_INSTALL = install_hint("tls")
FINGERPRINT_BYTES = hashlib.sha256().digest_size
_PIECE_BYTES = 2**18
_NAME = "rrfp"
_VALID = timedelta(days=365)
"""Either way of now. Trust is by fingerprint, and hosts' clocks may be wrong."""
_GIVE_UP_MS = 30_000
_OVER = select.POLLHUP | select.POLLERR


class TlsError(Exception):
    """The other side does not speak TLS, is not who it should be, or went away."""


def is_installed() -> bool:
    """Whether certificates can be made."""
    return find_spec("cryptography") is not None


class Tunnels:
    """One rank's connections under TLS. Its owner closes them after the links that use them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tunnels: list[_Tunnel] = []
        self._accepting: ssl.SSLContext | None = None
        self._dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._dialling.minimum_version = ssl.TLSVersion.TLSv1_3
        self._dialling.check_hostname = False
        self._dialling.verify_mode = ssl.CERT_NONE  # it is one certificate that is trusted

    def certify(self) -> bytes:
        """Make the certificate that this rank's listener shows; gives its fingerprint."""
        pem, fingerprint = _certificate()
        accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepting.minimum_version = ssl.TLSVersion.TLSv1_3
        accepting.num_tickets = 0  # nothing is resumed
        with _file_of(pem) as path:
            accepting.load_cert_chain(path)
        self._accepting = accepting
        return fingerprint

    def accept(self, connection: socket.socket, timeout_s: float) -> socket.socket:
        """The plain end of a tunnel to whoever has connected. Takes the connection. Raises
        TlsError."""
        assert self._accepting is not None
        return self._open(connection, self._accepting, None, timeout_s)

    def dial(
        self, connection: socket.socket, fingerprint: bytes, timeout_s: float
    ) -> socket.socket:
        """The plain end of a tunnel to a listener whose certificate has this fingerprint. Takes the
        connection. Raises TlsError."""
        return self._open(connection, self._dialling, fingerprint, timeout_s)

    def _open(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        fingerprint: bytes | None,
        timeout_s: float,
    ) -> socket.socket:
        try:
            tunnel = _Tunnel(connection, context, is_dialling=fingerprint is not None)
            tunnel.shake_hands(time.monotonic() + timeout_s)
            if fingerprint is not None and not hmac.compare_digest(tunnel.fingerprint, fingerprint):
                raise TlsError("its certificate is not the one that it told of")
            with self._lock:
                plain = tunnel.start()
                # Those of strangers have ended.
                self._tunnels = [*(each for each in self._tunnels if each.is_alive), tunnel]
        except OSError as error:  # of ssl's, too
            connection.close()
            raise TlsError(f"{error}") from None
        except BaseException:
            connection.close()
            raise
        return plain

    def close(self, timeout_s: float) -> None:
        """Wait until what the links have written is with the system, and end every tunnel. The
        links are over."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            tunnels = self._tunnels
        for tunnel in tunnels:
            tunnel.close(max(0.0, deadline_s - time.monotonic()))


@contextmanager
def _file_of(pem: bytes) -> Iterator[str]:
    """A path at which `ssl`, which takes a key from files only, finds this one: on no disk where
    the system can, and for no other user."""
    try:
        key = os.memfd_create("rrfp-key")
    except (AttributeError, OSError):
        key = -1  # the system lacks the call, or refuses it
    if key >= 0:
        with os.fdopen(key, "wb", buffering=0) as file:
            file.write(pem)
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile(prefix="rrfp-") as file:
        file.write(pem)
        file.flush()
        yield file.name


def _certificate() -> tuple[bytes, bytes]:
    """A private key and a certificate that it signs itself, in PEM; and its fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.fingerprint(hashes.SHA256())


class _PlainEnd(socket.socket):
    """A link's end of a tunnel. It ends with the error of its connection, if that had one."""

    error: OSError | None = None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        num_bytes = super().recv_into(buffer, nbytes, flags)
        if num_bytes == 0 and self.error is not None:
            raise self.error
        return num_bytes


class _Tunnel:
    """Carries bytes between a plain socket and a connection under TLS, on a thread."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, is_dialling: bool
    ) -> None:
        self._connection = connection
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        """Of the connection's bytes, what TLS is still to read, and what it has written."""
        self._session = context.wrap_bio(self._arrived, self._leaving, server_side=not is_dialling)
        self._plain: _PlainEnd
        self._inner: socket.socket
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._sealed = memoryview(b"")
        """On its way to the connection."""
        self._opened = memoryview(b"")
        """On its way to the plain end, in the buffer."""
        self._reads_plain = True
        self._is_sending = True
        self._is_receiving = True
        self._thread = Thread(target=self._run, name="rrfp-tls", daemon=True)

    def shake_hands(self, deadline_s: float) -> None:
        """Raises TlsError, or OSError."""
        connection = self._connection
        while True:
            try:
                self._session.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
            connection.sendall(self._leaving.read())
            if is_done:
                return
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
            piece = connection.recv(_PIECE_BYTES)
            if not piece:
                raise TlsError("it closed the connection")
            self._arrived.write(piece)

    @property
    def fingerprint(self) -> bytes:
        """Of the certificate that the other side has shown."""
        shown = self._session.getpeercert(binary_form=True)
        return hashlib.sha256(shown or b"").digest()

    def start(self) -> socket.socket:
        """Gives the plain end."""
        plain, self._inner = socket.socketpair()
        self._plain = _PlainEnd(fileno=plain.detach())
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A link leaves a connection that carries nothing; its tunnel must end, too.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)
        self._connection.setblocking(False)
        self._inner.setblocking(False)
        self._thread.start()
        return self._plain

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """The plain end is closed: end, after what it was given has left if there is time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _shut(self._connection, socket.SHUT_RDWR)
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while self._is_sending or self._is_receiving:
                self._carry()
        except ssl.SSLError as error:
            self._plain.error = error
        finally:
            for each in (self._inner, self._connection):
                _shut(each, socket.SHUT_RDWR)
                each.close()

    def _carry(self) -> None:
        """Do what can be done now, or wait until something can."""
        if not self._sealed and self._leaving.pending:
            self._sealed = memoryview(self._leaving.read())
        if self._is_sending and not self._reads_plain and not self._sealed:
            self._is_sending = False
            _shut(self._connection, socket.SHUT_WR)
            return
        has_more = self._arrived.pending or self._session.pending()
        if self._is_receiving and not self._opened and has_more and self._open():
            return
        seals = self._reads_plain and not self._sealed
        receives = self._is_receiving and not self._opened
        wanted = {
            self._inner: select.POLLIN * seals | select.POLLOUT * bool(self._opened),
            self._connection: select.POLLIN * receives | select.POLLOUT * bool(self._sealed),
        }
        poller = select.poll()
        for each, events in wanted.items():
            # Of an end that is gone `poll` never tires; that of the link's is to be heard of.
            if events or (each is self._inner and self._is_receiving):
                poller.register(each, events)
        ready = dict(poller.poll())
        plain, connection = (ready.get(each.fileno(), 0) for each in wanted)
        if self._sealed and connection & (select.POLLOUT | _OVER):
            self._send()
        if self._opened and plain & (select.POLLOUT | _OVER):
            self._hand_over()
        if seals and plain & (select.POLLIN | _OVER):
            self._seal()
        if receives and connection & (select.POLLIN | _OVER):
            self._receive()
        if plain & select.POLLHUP:
            # The link has closed its end: nobody reads any more. What it wrote is still carried.
            self._is_receiving, self._opened = False, memoryview(b"")

    def _seal(self) -> None:
        """Take what the link has written."""
        try:
            piece = self._inner.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._reads_plain = False
        elif self._is_sending:
            self._session.write(piece)

    def _send(self) -> None:
        try:
            self._sealed = self._sealed[self._connection.send(self._sealed) :]
        except BlockingIOError:
            pass
        except OSError as error:
            # What the peer has sent before it went is still received.
            self._plain.error = error
            self._is_sending, self._sealed = False, memoryview(b"")

    def _receive(self) -> None:
        try:
            piece = self._connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._plain.error = error
            piece = b""
        if piece:
            self._arrived.write(piece)
        else:
            self._is_receiving = False
            _shut(self._inner, socket.SHUT_WR)

    def _open(self) -> bool:
        """Read what TLS has whole; tells whether there was anything."""
        num_bytes = 0
        try:
            while num_bytes < _PIECE_BYTES:
                room = self._buffer[num_bytes:]
                # With a buffer it gives a number, which its annotations do not say.
                num_read = cast(int, cast(object, self._session.read(len(room), room)))
                if num_read == 0:
                    # No rank says so: links end by a farewell of their own.
                    raise ssl.SSLZeroReturnError(
                        ssl.SSL_ERROR_ZERO_RETURN, "the other side has ended TLS"
                    )
                num_bytes += num_read
        except ssl.SSLWantReadError:
            pass
        self._opened = self._buffer[:num_bytes]
        return num_bytes > 0

    def _hand_over(self) -> None:
        try:
            self._opened = self._opened[self._inner.send(self._opened) :]
        except BlockingIOError:
            pass
        except OSError:
            self._is_receiving, self._opened = False, memoryview(b"")


def _shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):
        connection.shutdown(how)
