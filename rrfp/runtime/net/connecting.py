"""Making the connections of a rank's links: listening, dialing, and connecting again.

A destination listens before it publishes its address, and accepts on threads of its own while it
dials. So ranks may start in any order, and no dial waits for another rank's accept. Every rank
listens until its links are over: a source whose connection breaks dials again, and a destination
whose connection breaks checks whether its source still listens.

Between hosts a connection may be under TLS (`rrfp.runtime.net.tls`).

A process that knows the listener's secret may connect. The secret of a Unix socket lies in a file
beside it, in a directory that only its owner may enter, and is sent nowhere; both are removed once
all peers have read them. The secret of a TCP port, for peers on other hosts, is in the store with
the port's address: a process that can read the store can connect.

Unauthenticated peers may connect at any time, and receive a challenge only. At most 64 may
authenticate at the same time. Beyond that the oldest is dropped: a rank takes no time to do so.
"""

import errno
import json
import os
import secrets
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Condition, Lock, Thread
from typing import Self

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables
from rrfp.runtime.link.driver import NotYetError, Pause, PeerGoneError
from rrfp.runtime.net.handshake import (
    SECRET_BYTES,
    HandshakeError,
    UntrustedFileError,
    accept_handshake,
    bind_private,
    connect_opened,
    dial_handshake,
    open_private,
)
from rrfp.runtime.net.source_filter import accept_only, run_host_addresses
from rrfp.runtime.net.tls import FINGERPRINT_BYTES, TlsError, Tunnels, shut_down
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, reachable_address
from rrfp.strict_json import integer, member, text

# Sockets of links.

_BACKLOG = 1024
_UNIX_BUFFER_BYTES = 4 * 2**20


def listen_tcp(host: str) -> socket.socket:
    """Listen at this address or name, at a port that the system chooses, and return the socket.
    Where the addresses of the run's hosts are known and the kernel permits it, only they can
    connect. Raises OSError, and UsageError if RRFP_SOURCES is invalid."""
    sources = run_host_addresses()
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    if sources is not None:
        accept_only(listening, sources)
    return listening


def _set_link_options(connection: socket.socket) -> None:
    """Make a link's socket blocking without a timeout, and set a send buffer of 4 MiB (Unix) or
    TCP_NODELAY (TCP); both sides call it."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # The kernel cuts this to its own maximum. TCP is left to size its buffers by itself.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# The address of a listener, as a rank publishes it.


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port that a rank listens at."""

    host: str
    port: int
    secret: bytes
    fingerprint: bytes | None = None
    """Fingerprint of the listener's certificate; None without TLS."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ListenerAddress:
    """Everything that a peer must know to connect to a rank."""

    directory: str | None
    """Directory of its Unix socket and of the secret; None if it has no Unix socket."""
    tcp: TcpAddress | None
    transport: TransportName = TransportName.INLINE
    """Transport that this rank was configured with."""

    def to_json(self) -> str:
        """Encode the address as JSON, with its secret, and bytes in hexadecimal."""
        values = asdict(self)
        if self.tcp is not None:
            values["tcp"]["secret"] = self.tcp.secret.hex()
            fingerprint = self.tcp.fingerprint
            values["tcp"]["fingerprint"] = None if fingerprint is None else fingerprint.hex()
        return json.dumps(values)

    @classmethod
    def decode(cls, value: object) -> Self:
        """Read the decoded JSON of `to_json`. Raises ValueError for anything else."""
        directory, tcp = member(value, "directory"), member(value, "tcp")
        if directory is not None:
            directory = text(directory)
            if not directory.startswith("/") or "\0" in directory:
                raise ValueError("its directory is not an absolute path")
        transport = TransportName(text(member(value, "transport")))
        return cls(directory, None if tcp is None else _decode_tcp(tcp), transport)


def _decode_tcp(value: object) -> TcpAddress:
    """Read the TCP part of an address. Raises ValueError for an invalid port, secret or
    fingerprint."""
    port = integer(member(value, "port"))
    secret = bytes.fromhex(text(member(value, "secret")))
    shown = member(value, "fingerprint")
    fingerprint = None if shown is None else bytes.fromhex(text(shown))
    if not 0 < port < 2**16 or len(secret) != SECRET_BYTES:
        raise ValueError("its port or its secret is invalid")
    if fingerprint is not None and len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError("its fingerprint is invalid")
    return TcpAddress(text(member(value, "host")), port, secret, fingerprint)


# Dialing.


class DialError(PeerLostError):
    """There is no connection. One sentence names both ranks, the reason, and the next step."""

    def __init__(self, sentence: str, *, is_gone: bool = False) -> None:
        super().__init__(sentence)
        self.is_gone = is_gone
        """True if no process listens there."""


class PeerAddress:
    """The address at which rank `rank` dials rank `peer`, for as long as its links live.

    Each rank listens until its links are over, and a rank that fails stops listening first. So if
    no process listens there, the peer has ended.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        address: ListenerAddress,
        *,
        unix: bool,
        tunnels: Tunnels | None = None,
    ) -> None:
        """Use the peer's Unix socket, or else its TCP port, under TLS if `tunnels` is given. Raises
        PeerLostError naming the peer if it has no such listener."""
        self._rank = rank
        self._peer = peer
        self._tunnels = None if unix else tunnels
        self._file = -1
        self._tcp = None if unix else address.tcp
        self._place = address.directory if unix else address.tcp
        try:
            if unix and address.directory is not None:
                self._file, self._secret = open_private(address.directory)
            elif not unix and address.tcp is not None:
                self._secret = address.tcp.secret
            else:
                raise OSError(f"it listens at no {'Unix socket' if unix else 'TCP port'}")
        except (OSError, UntrustedFileError) as error:
            raise self._make_error(error) from None

    def dial(self, timeout_s: float, attempt: int = 0) -> socket.socket:
        """Connect, start TLS if it is used, and authenticate, all within the timeout; return the
        connection. `attempt` is sent to the peer, which prefers the connection with the highest
        number. Raises DialError, with `is_gone` if no process listens."""
        deadline_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(deadline_s - time.monotonic(), 0.001)

        try:
            connection = self._connect(timeout_s)
        except OSError as error:
            raise self._make_error(error) from None
        if self._tunnels is not None:
            connection = self._start_tls(connection, self._tunnels, left_s())
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
        _set_link_options(connection)
        return connection

    def check_listening(self, timeout_s: float) -> None:
        """Connect and close at once. Raises DialError if that fails, with `is_gone` if no process
        listens."""
        try:
            self._connect(timeout_s).close()
        except OSError as error:
            raise self._make_error(error) from None

    def close(self) -> None:
        """Close the file of the Unix socket; a second call does nothing."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _connect(self, timeout_s: float) -> socket.socket:
        """Open a connection to the Unix socket or the TCP port, without TLS or a handshake. Raises
        OSError."""
        if self._file >= 0:
            return connect_opened(self._file, timeout_s)
        if self._tcp is None:
            raise OSError(errno.EBADF, "its address is closed")
        return socket.create_connection((self._tcp.host, self._tcp.port), timeout=timeout_s)

    def _make_error(self, error: OSError | UntrustedFileError) -> DialError:
        """Make the error for a connection that could not be opened; `is_gone` if it was refused, so
        that no process listens."""
        sentence = f"rank {self._rank} cannot connect to rank {self._peer} at {self._place}"
        if isinstance(error, UntrustedFileError):
            advice = "start all ranks as one user, and see who else can write to the run's store"
        else:
            advice = "see whether it still runs and whether a firewall lies between"
        is_gone = isinstance(error, ConnectionRefusedError)
        return DialError(f"{sentence} ({error}); {advice}", is_gone=is_gone)

    def _start_tls(
        self, connection: socket.socket, tunnels: Tunnels, timeout_s: float
    ) -> socket.socket:
        """Return the plain end of a TLS tunnel over a connection, which the tunnel then owns.
        Raises DialError."""
        assert self._tcp is not None
        assert self._tcp.fingerprint is not None
        try:
            return tunnels.dial(connection, self._tcp.fingerprint, timeout_s)
        except TlsError as error:
            raise DialError(
                f"rank {self._rank} has no TLS with rank {self._peer} at {self._tcp}:"
                f" {error}; see whether rank {self._peer} still runs, and who else can write to the"
                " run's store"
            ) from None


# Listening.

_HANDSHAKE_S = 10.0
_MAX_UNAUTHENTICATED = 64
_PAUSE_S = 0.02
"""Time before the next accept when file descriptors run out."""
_FAILURE_LOOK_S = 0.2
"""Interval at which a rank that waits for its sources checks whether one has failed."""


OnConnected = Callable[[int, socket.socket, int], None]
"""Called on a thread of the listener with a source, a socket that it then owns, and the number of
the source's attempt: 0 once for each source, and higher ones when a source connects again."""


class Listener:
    """Accepts the connections of this rank's sources, and drops all others."""

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
        """Listen at a Unix socket, at a TCP port, or both; `address` is the host name or address
        to listen at (default: `reachable_address()`). With `tunnels` the port requires TLS."""
        self._rank = rank
        self._sources = frozenset(sources)
        self._on_connected = on_connected
        self._unix, self._tcp, self._address = unix, tcp, address
        self._tunnels = tunnels
        self._condition = Condition()
        # Guarded by the condition.
        self._missing = set(sources)
        self._opening: set[int] = set()
        """Sources for which `on_connected` runs for the first time."""
        self._unauthenticated: dict[socket.socket, Thread] = {}
        """Connections without a finished handshake, oldest first, with their threads."""
        self._handshakes: list[Thread] = []
        self._is_closed = False
        self._directory: str | None = None
        self._tcp_address: TcpAddress | None = None
        self._sockets: list[tuple[socket.socket, bytes]] = []
        """Listening sockets with their secrets."""
        self._thread = Thread(target=self._accept, name="rrfp-listen", daemon=True)

    def open(self) -> None:
        """Listen at a Unix socket in a new directory, at a TCP port, or both, without accepting
        yet. Raises UsageError if this host does not have the address. Any error closes
        everything."""
        try:
            if self._unix:
                # Only its owner may enter a directory that mkdtemp makes.
                parent = os.environ.get(variables.DIRECTORY)
                self._directory = tempfile.mkdtemp(prefix="rrfp-", dir=parent)
                listening, secret = bind_private(self._directory)
                self._sockets.append((listening, secret))
                listening.listen(_BACKLOG)
            if self._tcp:
                self._open_tcp()
        except BaseException:
            self._release()
            raise

    def _open_tcp(self) -> None:
        """Listen at a TCP port, with a new secret, and a new certificate under TLS. Raises
        UsageError if this host cannot listen at the address."""
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
        fingerprint = None if self._tunnels is None else self._tunnels.make_certificate()
        self._tcp_address = TcpAddress(host, listening.getsockname()[1], secret, fingerprint)

    @property
    def address(self) -> ListenerAddress:
        """The address to publish; its `transport` is the default."""
        return ListenerAddress(self._directory, self._tcp_address)

    def accept(self) -> None:
        """Start the thread that accepts connections until `close`; without a socket do nothing."""
        if self._sockets:  # a rank without peers has none, and nothing would end the wait
            self._thread.start()

    def wait(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        raise_if_gone: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Wait until every source is connected, or until the rendezvous' deadline (`timeout_s` is
        for the message only). Raises PeerLostError naming those that are not, or the rank that has
        reported a failure. Every 0.2 s calls `raise_if_gone` for each missing source, which raises
        if that has ended."""
        while not self._is_complete(min(rendezvous.remaining_s, _FAILURE_LOOK_S)):
            rendezvous.raise_if_failed()
            with self._condition:
                missing = sorted(self._missing | self._opening)
            for source in missing:
                raise_if_gone(source)
            if missing:
                rendezvous.log_missing(missing)
            if rendezvous.remaining_s == 0:
                ranks = ", ".join(str(source) for source in missing)
                raise PeerLostError(
                    f"rank {self._rank} waited {timeout_s:g} s for a connection from rank"
                    f" {ranks}; see whether it has started and can reach this host"
                )

    def _is_complete(self, timeout_s: float) -> bool:
        """Wait until every source is connected, and return True; return False after the timeout."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._missing and not self._opening, timeout_s
            )

    def remove_files(self) -> None:
        """Remove the directory of the Unix socket and the secret, once all peers have opened them;
        the sockets keep listening."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Stop listening, drop unauthenticated connections, join every thread, and remove the
        files; a second call does nothing."""
        with self._condition:
            self._is_closed = True
            for connection in self._unauthenticated:
                shut_down(connection)
        for listening, _ in self._sockets:
            # This ends the thread's wait, and also closes copies in forked processes.
            shut_down(listening)
        if self._thread.ident is not None:
            self._thread.join()
        for handshake in self._handshakes:
            handshake.join()
        self._release()

    def _release(self) -> None:
        """Close the listening sockets and remove the files."""
        for listening, _ in self._sockets:
            listening.close()
        self.remove_files()

    def _accept(self) -> None:
        """Accept connections on the listener's thread until `close`, and start a handshake for
        each. If an accept fails, as without free file descriptors, pause for 20 ms and go on."""
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
                    # Out of file descriptors, or the peer has closed already: others may succeed.
                    time.sleep(_PAUSE_S)
                    continue
                self._begin_handshake(connection, secret)

    def _begin_handshake(self, connection: socket.socket, secret: bytes) -> None:
        """Start a thread that authenticates the peer; at 64 unauthenticated connections drop the
        oldest. Closes the connection if the listener is closed or no thread can be started."""
        handshake = Thread(
            target=self._authenticate,
            args=(connection, secret),
            name="rrfp-handshake",
            daemon=True,
        )
        with self._condition:
            if self._is_closed:
                connection.close()
                return
            evicted = None
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                evicted = self._unauthenticated.pop(oldest)
                shut_down(oldest)
            try:
                handshake.start()
            except RuntimeError:
                # There are no more threads for now; a rank dials again.
                connection.close()
                return
            self._unauthenticated[connection] = handshake
            self._handshakes.append(handshake)
        if evicted is not None:
            evicted.join(_PAUSE_S)  # so that no more threads are made than can end

    def _authenticate(self, connection: socket.socket, secret: bytes) -> None:
        """Authenticate one peer, and pass its connection to `on_connected`. Close it silently if
        that fails, the listener is closed, the source's first connection is still being passed on,
        or the attempt does not fit: 0 from a connected source, or a later one from another."""
        accepted, source, attempt = connection, -1, 0
        with suppress(TlsError, HandshakeError):
            if self._tunnels is not None and connection.family != socket.AF_UNIX:
                connection = self._tunnels.accept(accepted, _HANDSHAKE_S)
            source, attempt = accept_handshake(
                connection, secret, self._sources, self._rank, _HANDSHAKE_S
            )
        is_first = attempt == 0
        with self._condition:
            self._unauthenticated.pop(accepted, None)
            is_known = source in self._sources and source not in self._opening
            if not is_known or is_first != (source in self._missing) or self._is_closed:
                connection.close()
                return
            if is_first:
                self._missing.discard(source)
                self._opening.add(source)
        # Not within the lock: it may take long, and other sources dial meanwhile.
        try:
            _set_link_options(connection)
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


# Connecting again: a source dials, and a destination waits to be dialed. Each `attempt` runs on the
# link's own thread, within its timeout.

_LISTENING_CHECK_S = 0.25
"""Interval at which a waiting destination checks whether its source still listens."""
_DIAL_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 1.0


class SourceReconnector:
    """Dials again for a source. Implements `rrfp.runtime.link.driver.Reconnector`."""

    has_other = False

    def __init__(self, peer_address: PeerAddress) -> None:
        self._peer_address = peer_address
        self._num_attempts = 0

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        """Dial the peer once; from the second useless connection in a row on, only after a pause
        that grows with `num_useless`, to at most 1 s. Raises PeerGoneError if no process listens
        there, and NotYetError for any other failure."""
        if num_useless > 1:
            pause(min(timeout_s, _DIAL_AGAIN_S * 2**num_useless, _LONGEST_PAUSE_S))
        began_s = time.monotonic()
        self._num_attempts += 1
        try:
            return self._peer_address.dial(timeout_s, self._num_attempts)
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            # A refusal comes at once, and may repeat for some time.
            pause(max(0.0, began_s + _DIAL_AGAIN_S - time.monotonic()))
            raise NotYetError(str(error)) from None

    def close(self) -> None:
        """Do nothing: it keeps no connection."""


class DestinationReconnector:
    """Waits until a destination's source connects again. Implements
    `rrfp.runtime.link.driver.Reconnector`."""

    def __init__(self, peer_address: PeerAddress) -> None:
        self._peer_address = peer_address
        self._lock = Lock()
        # Guarded by the lock, except that `has_other` reads without it.
        self._other: socket.socket | None = None
        self._last_attempt = 0
        self._is_closed = False

    @property
    def has_other(self) -> bool:
        """True if the source has connected again, and that connection has not been used."""
        return self._other is not None

    def offer(self, connection: socket.socket, attempt: int) -> bool:
        """Store a further connection of the source in place of an unused earlier one, or close it
        unless `attempt` is the highest number so far. A thread of the listener calls it. Returns
        False if the link is over; the caller keeps the connection then."""
        with self._lock:
            if self._is_closed:
                return False
            dropped: socket.socket | None = connection
            if attempt > self._last_attempt:
                dropped, self._other = self._other, connection
                self._last_attempt = attempt
        if dropped is not None:
            dropped.close()
        return True

    def attempt(self, timeout_s: float, num_useless: int, pause: Pause) -> socket.socket:
        """Return the source's further connection, after a wait of up to 0.25 s for one. Raises
        PeerGoneError if the source no longer listens, and otherwise NotYetError."""
        if not self.has_other:
            pause(min(timeout_s, _LISTENING_CHECK_S))
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            return other
        try:
            self._peer_address.check_listening(min(timeout_s, _LISTENING_CHECK_S))
        except DialError as error:
            if error.is_gone:
                raise PeerGoneError from None
            raise NotYetError(str(error)) from None
        raise NotYetError("its source has not connected again")

    def close(self) -> None:
        """Refuse further connections, and close one that has not been used."""
        with self._lock:
            self._is_closed = True
            other, self._other = self._other, None
        if other is not None:
            with suppress(OSError):
                other.close()
