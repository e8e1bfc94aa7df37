"""TLS on the connections between hosts.

Each listener makes its own certificate, and publishes its fingerprint with its address: the dialing
side trusts that one certificate and no authority. It authenticates itself inside the TLS session,
by the listener's secret (`rrfp.runtime.net.handshake`).

Links write several buffers at once and wait in `poll`, which a socket under TLS does not support.
So a link uses the plain end of a tunnel, and a thread copies bytes between that and the TLS
connection. If one side ends, fails or is full, so does the other.
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
"""Validity before and after now. Trust is by fingerprint, and hosts' clocks may be wrong."""
_GIVE_UP_MS = 30_000
_OVER = select.POLLHUP | select.POLLERR


class TlsError(Exception):
    """The other side does not speak TLS, has the wrong certificate, or closed the connection."""


def is_installed() -> bool:
    """Return whether the package `cryptography` is installed, which makes certificates."""
    return find_spec("cryptography") is not None


class Tunnels:
    """One rank's connections under TLS. Its owner closes it after the links that use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tunnels: list[_Tunnel] = []
        self._accepting: ssl.SSLContext | None = None
        self._dialing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._dialing.minimum_version = ssl.TLSVersion.TLSv1_3
        self._dialing.check_hostname = False
        self._dialing.verify_mode = ssl.CERT_NONE  # `_open` compares the fingerprint

    def make_certificate(self) -> bytes:
        """Make the certificate of this rank's listener, for each later `accept`, and return its
        SHA-256 fingerprint."""
        pem, fingerprint = _make_certificate()
        accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepting.minimum_version = ssl.TLSVersion.TLSv1_3
        accepting.num_tickets = 0  # no session is resumed
        with _temporary_file(pem) as path:
            accepting.load_cert_chain(path)
        self._accepting = accepting
        return fingerprint

    def accept(self, connection: socket.socket, timeout_s: float) -> socket.socket:
        """Do the TLS handshake as the server on an accepted connection, and return the plain end of
        a tunnel, which then owns the connection. Raises TlsError, and then closes the connection.
        Needs `make_certificate` before."""
        assert self._accepting is not None
        return self._open(connection, self._accepting, None, timeout_s)

    def dial(
        self, connection: socket.socket, fingerprint: bytes, timeout_s: float
    ) -> socket.socket:
        """Do the TLS handshake as the client on a dialed connection, and return the plain end of a
        tunnel, which then owns the connection. Raises TlsError if the listener's certificate has
        another fingerprint or TLS fails, and then closes the connection."""
        return self._open(connection, self._dialing, fingerprint, timeout_s)

    def _open(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        fingerprint: bytes | None,
        timeout_s: float,
    ) -> socket.socket:
        """Do the TLS handshake, start a tunnel, and return its plain end. With a `fingerprint` it
        is the client and compares it; None: the server. Raises TlsError, and closes the connection
        on any error."""
        try:
            tunnel = _Tunnel(connection, context, is_dialing=fingerprint is not None)
            tunnel.do_handshake(time.monotonic() + timeout_s)
            if fingerprint is not None and not hmac.compare_digest(tunnel.fingerprint, fingerprint):
                raise TlsError("its certificate is not the one that it published")
            with self._lock:
                plain = tunnel.start()
                # Forget those that have ended, such as tunnels of unauthenticated peers.
                self._tunnels = [*(each for each in self._tunnels if each.is_alive), tunnel]
        except OSError as error:  # ssl's errors included
            connection.close()
            raise TlsError(f"{error}") from None
        except BaseException:
            connection.close()
            raise
        return plain

    def close(self, timeout_s: float) -> None:
        """Send what the links have written, and end every tunnel; after the timeout, for all
        together, cut the rest. Call it when the links are over."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            tunnels = self._tunnels
        for tunnel in tunnels:
            tunnel.close(max(0.0, deadline_s - time.monotonic()))


@contextmanager
def _temporary_file(pem: bytes) -> Iterator[str]:
    """Yield the path of a file with this key, which no other user can read and which exists only
    inside the `with`; in memory where the system can do that. `ssl` reads keys from files only."""
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


def _make_certificate() -> tuple[bytes, bytes]:
    """Make a private key and a self-signed certificate; return both in one PEM, and the
    certificate's SHA-256 fingerprint."""
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
    """A link's end of a tunnel. At its end it raises the error of the TLS connection, if any."""

    error: OSError | None = None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive bytes; at the end of the stream raise the error of the TLS connection, if any."""
        num_bytes = super().recv_into(buffer, nbytes, flags)
        if num_bytes == 0 and self.error is not None:
            raise self.error
        return num_bytes


class _Tunnel:
    """Copies bytes between a plain socket and a connection under TLS, on a thread."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, is_dialing: bool
    ) -> None:
        self._connection = connection
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        """Encrypted bytes that TLS has yet to read, and that it has written."""
        self._session = context.wrap_bio(self._received, self._to_send, server_side=not is_dialing)
        self._plain: _PlainEnd
        self._inner: socket.socket
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._encrypted = memoryview(b"")
        """Bytes to write to the connection."""
        self._decrypted = memoryview(b"")
        """Bytes to write to the plain end; a part of the buffer."""
        self._reads_plain = True
        self._is_sending = True
        self._is_receiving = True
        self._thread = Thread(target=self._run, name="rrfp-tls", daemon=True)

    def do_handshake(self, deadline_s: float) -> None:
        """Complete the TLS handshake before the deadline. Raises TlsError if the peer closes the
        connection, and OSError."""
        connection = self._connection
        while True:
            try:
                self._session.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
            connection.sendall(self._to_send.read())
            if is_done:
                return
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
            piece = connection.recv(_PIECE_BYTES)
            if not piece:
                raise TlsError("it closed the connection")
            self._received.write(piece)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 fingerprint of the other side's certificate."""
        shown = self._session.getpeercert(binary_form=True)
        return hashlib.sha256(shown or b"").digest()

    def start(self) -> socket.socket:
        """Set the sockets' options, start the thread, and return the plain end."""
        plain, self._inner = socket.socketpair()
        self._plain = _PlainEnd(fileno=plain.detach())
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A link abandons a dead connection; its tunnel must end, too.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)
        self._connection.setblocking(False)
        self._inner.setblocking(False)
        self._thread.start()
        return self._plain

    @property
    def is_alive(self) -> bool:
        """True while the tunnel's thread runs."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Wait for the thread, which ends once it has sent everything; after the timeout shut the
        connection to end it, and wait again. Call it after the plain end was closed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            shut_down(self._connection)
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        """Copy bytes until both directions have ended, and then close both sockets; runs on the
        tunnel's thread. A TLS error is stored for the plain end."""
        try:
            while self._is_sending or self._is_receiving:
                self._copy()
        except ssl.SSLError as error:
            self._plain.error = error
        finally:
            for each in (self._inner, self._connection):
                shut_down(each)
                each.close()

    def _copy(self) -> None:
        """Read and write once what is ready in both directions; wait if nothing is. Notes each
        direction that has ended."""
        if not self._encrypted and self._to_send.pending:
            self._encrypted = memoryview(self._to_send.read())
        if self._is_sending and not self._reads_plain and not self._encrypted:
            self._is_sending = False
            shut_down(self._connection, socket.SHUT_WR)
            return
        has_more = self._received.pending or self._session.pending()
        if self._is_receiving and not self._decrypted and has_more and self._decrypt():
            return
        reads_plain = self._reads_plain and not self._encrypted
        receives = self._is_receiving and not self._decrypted
        wanted = {
            self._inner: select.POLLIN * reads_plain | select.POLLOUT * bool(self._decrypted),
            self._connection: select.POLLIN * receives | select.POLLOUT * bool(self._encrypted),
        }
        poller = select.poll()
        for each, events in wanted.items():
            # `poll` would report the end of a closed connection forever. The end of the plain side
            # must be noticed while bytes are received for it.
            if events or (each is self._inner and self._is_receiving):
                poller.register(each, events)
        ready = dict(poller.poll())
        plain, connection = (ready.get(each.fileno(), 0) for each in wanted)
        if self._encrypted and connection & (select.POLLOUT | _OVER):
            self._send()
        if self._decrypted and plain & (select.POLLOUT | _OVER):
            self._write_plain()
        if reads_plain and plain & (select.POLLIN | _OVER):
            self._read_plain()
        if receives and connection & (select.POLLIN | _OVER):
            self._receive()
        if plain & select.POLLHUP:
            # The link has closed its end, and reads no more. What it wrote is still sent.
            self._is_receiving, self._decrypted = False, memoryview(b"")

    def _read_plain(self) -> None:
        """Read and encrypt what the link has written, or drop it if nothing more can be sent. At
        the end or an error, note that the link writes nothing more."""
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
        """Send encrypted bytes to the peer, as many as the socket takes. On an error drop the rest,
        send nothing more, and store the error for the plain end."""
        try:
            self._encrypted = self._encrypted[self._connection.send(self._encrypted) :]
        except BlockingIOError:
            pass
        except OSError as error:
            # What the peer sent before is still received.
            self._plain.error = error
            self._is_sending, self._encrypted = False, memoryview(b"")

    def _receive(self) -> None:
        """Receive encrypted bytes from the peer. At the end or an error receive nothing more, and
        end the stream of the plain end, after an error with that error."""
        try:
            piece = self._connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._plain.error = error
            piece = b""
        if piece:
            self._received.write(piece)
        else:
            self._is_receiving = False
            shut_down(self._inner, socket.SHUT_WR)

    def _decrypt(self) -> bool:
        """Decrypt complete TLS records, up to the size of the buffer; return whether there were
        any. Raises SSLError, also if the peer ends the TLS session."""
        num_bytes = 0
        try:
            while num_bytes < _PIECE_BYTES:
                free = self._buffer[num_bytes:]
                # With a buffer it returns a number, unlike its annotations.
                num_read = cast(int, cast(object, self._session.read(len(free), free)))
                if num_read == 0:
                    # No rank ends its TLS session: links end by their own farewell.
                    raise ssl.SSLZeroReturnError(
                        ssl.SSL_ERROR_ZERO_RETURN, "the other side has ended TLS"
                    )
                num_bytes += num_read
        except ssl.SSLWantReadError:
            pass
        self._decrypted = self._buffer[:num_bytes]
        return num_bytes > 0

    def _write_plain(self) -> None:
        """Write decrypted bytes to the plain end, as many as it takes. If the link has closed it,
        drop the rest and receive nothing more."""
        try:
            self._decrypted = self._decrypted[self._inner.send(self._decrypted) :]
        except BlockingIOError:
            pass
        except OSError:
            self._is_receiving, self._decrypted = False, memoryview(b"")


def shut_down(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a socket down in one direction or both, without closing it; errors are ignored."""
    with suppress(OSError):
        connection.shutdown(how)
