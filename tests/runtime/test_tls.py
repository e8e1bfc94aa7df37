"""TLS on the connections between hosts: whom a rank trusts, what the wire shows, and that whatever
happens to one end of a tunnel happens to the other."""

import errno
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from rrfp.errors import UsageError
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.link.wire import MAGIC
from rrfp.runtime.net.connecting import Listener
from rrfp.runtime.net.tls import TlsError, Tunnels
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Inbox, LinkFailed, PeerLostError
from tests.runtime.link_pairs import (
    PATIENCE_S,
    Way,
    dial,
    needs_tls,
    nothing_left,
    opened,
    pair,
    take,
)

pytestmark = [pytest.mark.timeout(60), needs_tls]

MOST_HELD_BYTES = 64 * 2**20
"""More than sockets of the system and a tunnel's two ends hold."""


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of one over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialed = socket.create_connection(listening.getsockname(), timeout=PATIENCE_S)
        accepted, _ = listening.accept()
        with dialed, accepted:
            yield dialed, accepted


@contextmanager
def tunnel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The plain ends of one."""
    dialing, accepting = Tunnels(), Tunnels()
    fingerprint = accepting.make_certificate()
    with connection() as (dialed, accepted), ThreadPoolExecutor(1) as pool:
        accepts = pool.submit(accepting.accept, accepted, PATIENCE_S)
        here = dialing.dial(dialed, fingerprint, PATIENCE_S)
        there = accepts.result(PATIENCE_S)
        with here, there:
            for end in (here, there):
                end.settimeout(PATIENCE_S)
            yield here, there
        for each in (dialing, accepting):
            each.close(PATIENCE_S)


def everything(end: socket.socket) -> bytes:
    """Until its end."""
    pieces = []
    while piece := end.recv(2**16):
        pieces.append(piece)
    return b"".join(pieces)


def send_in_pieces(end: socket.socket, data: bytes, seed: int) -> None:
    draws, view = random.Random(seed), memoryview(data)
    while view:
        size = draws.choice([1, 100, 2**14, 2**18 + 1])
        end.sendall(view[:size])
        view = view[size:]
    end.shutdown(socket.SHUT_WR)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(st.integers(0, 3 * 2**20), st.integers(0, 2**17)), st.integers(0, 2**32))
def test_what_goes_in_comes_out_both_ways_to_its_end(sizes: tuple[int, int], seed: int) -> None:
    data = [random.Random(seed + way).randbytes(size) for way, size in enumerate(sizes)]
    with tunnel() as ends, ThreadPoolExecutor(4) as pool:
        sends = [
            pool.submit(send_in_pieces, end, sent, seed)
            for end, sent in zip(ends, data, strict=True)
        ]
        came = [*pool.map(everything, ends)]
        for each in sends:
            each.result()
    assert came == data[::-1]


@pytest.mark.usefixtures("nothing_is_left")
def test_one_direction_ends_and_the_other_goes_on() -> None:
    with tunnel() as (here, there):
        here.shutdown(socket.SHUT_WR)
        assert there.recv(1) == b""
        there.sendall(b"still here")
        assert here.recv(100) == b"still here"


@pytest.mark.usefixtures("nothing_is_left")
def test_a_closed_end_closes_the_other() -> None:
    with tunnel() as (here, there):
        here.sendall(b"last words")
        here.close()
        assert everything(there) == b"last words"
        with pytest.raises(BrokenPipeError):
            there.sendall(bytes(MOST_HELD_BYTES))


@pytest.mark.usefixtures("nothing_is_left")
def test_an_end_that_does_not_read_fills_the_tunnel() -> None:
    with tunnel() as (here, there):
        here.setblocking(False)
        num_bytes, full_s = 0, time.monotonic()
        while time.monotonic() < full_s + 0.5:
            with suppress(BlockingIOError):
                num_bytes += here.send(bytes(2**16))
                full_s = time.monotonic()
            assert num_bytes < MOST_HELD_BYTES
        here.setblocking(True)
        here.shutdown(socket.SHUT_WR)
        assert len(everything(there)) == num_bytes


def test_a_tunnel_that_waits_takes_no_time() -> None:
    with tunnel() as (here, there):
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        there.shutdown(socket.SHUT_WR)
        used_s = time.process_time()
        time.sleep(1)
        assert time.process_time() - used_s < 0.1


@pytest.mark.usefixtures("nothing_is_left")
def test_a_connection_that_is_reset_is_the_end() -> None:
    accepting, dialing = Tunnels(), Tunnels()
    fingerprint = accepting.make_certificate()
    context = accepting._accepting
    assert context is not None
    with connection() as (dialed, accepted), ThreadPoolExecutor(1) as pool:
        # Python's own TLS on the other side.
        accepts = pool.submit(context.wrap_socket, accepted, server_side=True)
        with dialing.dial(dialed, fingerprint, PATIENCE_S) as here:
            here.settimeout(PATIENCE_S)
            with accepts.result(PATIENCE_S) as there:
                there.sendall(b"last words")
                assert here.recv(100) == b"last words"
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with pytest.raises(ConnectionResetError):
                here.recv_into(bytearray(100))
    dialing.close(PATIENCE_S)


class Proxy:
    """Carries one connection to a port, notes what the two say, and may change what is dialed."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = bytes) -> None:
        self.said: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._change = change
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port: int) -> None:
        dialed, _ = self._listening.accept()
        with dialed, socket.create_connection(("127.0.0.1", port)) as target:
            back = threading.Thread(target=self._copy, args=(target, dialed, 1))
            back.start()
            self._copy(dialed, target, 0)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, way: int) -> None:
        with suppress(OSError):
            while piece := source.recv(2**16):
                self.said[way].extend(piece)
                target.sendall(self._change(piece) if way == 0 else piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        self._listening.close()


@contextmanager
def proved(
    way: Way, change: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[socket.socket, socket.socket, Proxy]]:
    """Yield the socket that rank 0 has dialed, the one that rank 1 has accepted, and the proxy
    between."""
    connected: SimpleQueue[socket.socket] = SimpleQueue()
    owns = [Tunnels() if way is Way.TLS else None for _ in range(2)]
    listener = Listener(
        *(1, [0], lambda _, made, attempt: connected.put(made)),
        unix=False,
        tcp=True,
        address="127.0.0.1",
        tunnels=owns[1],
    )
    listener.open()
    listener.accept()
    port = listener.address.tcp
    assert port is not None
    proxy = Proxy(port.port, change)
    where = replace(listener.address, tcp=replace(port, port=proxy.port))
    try:
        dialed = dial(0, 1, where, unix=False, tunnels=owns[0])
        with dialed, connected.get(timeout=PATIENCE_S) as accepted:
            for each in (dialed, accepted):
                each.settimeout(PATIENCE_S)
            yield dialed, accepted, proxy
    finally:
        listener.close()
        for own in owns:
            if own is not None:
                own.close(PATIENCE_S)
        proxy.close()


def are_records(said: bytes) -> bool:
    """Whether it is records of TLS from end to end (RFC 8446, 5.1)."""
    while said:
        kind, version, num_bytes = struct.unpack_from(">BHH", said)
        if kind not in (20, 22, 23) or version not in (0x301, 0x303):
            return False
        said = said[5 + num_bytes :]
    return True


@pytest.mark.parametrize("way", [Way.TCP, Way.TLS])
def test_the_wire_shows_what_it_should(way: Way) -> None:
    with proved(way) as (dialed, accepted, proxy):
        for here, there in ((dialed, accepted), (accepted, dialed)):
            here.sendall(b"activations" * 10_000)
            here.shutdown(socket.SHUT_WR)
            assert everything(there) == b"activations" * 10_000
    for said in map(bytes, proxy.said):
        is_plain = way is Way.TCP
        assert (MAGIC in said, b"activations" in said) == (is_plain, is_plain)
        assert are_records(said) == (not is_plain)


def test_bytes_that_were_changed_are_not_read() -> None:
    changes = threading.Event()

    def change(piece: bytes) -> bytes:
        return piece[:-1] + bytes([piece[-1] ^ 1]) if changes.is_set() else piece

    with proved(Way.TLS, change) as (dialed, accepted, _):
        changes.set()
        dialed.sendall(b"activations")
        with pytest.raises(ssl.SSLError):
            accepted.recv_into(bytearray(100))


# Whom a rank trusts.


def test_another_certificate_is_not_trusted() -> None:
    listener = Listener(
        1, [0], lambda *_: None, unix=False, tcp=True, address="127.0.0.1", tunnels=Tunnels()
    )
    listener.open()
    listener.accept()
    try:
        port = listener.address.tcp
        assert port is not None
        where = replace(listener.address, tcp=replace(port, fingerprint=bytes(32)))
        told = rf"rank 0 has no TLS with rank 1 at {port}: its certificate is not the one"
        with pytest.raises(PeerLostError, match=told):
            dial(0, 1, where, unix=False, tunnels=Tunnels())
    finally:
        listener.close()


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_listener_without_tls_is_an_error(says: bytes) -> None:
    with connection() as (dialed, accepted):
        accepted.sendall(says)
        accepted.shutdown(socket.SHUT_WR)
        with pytest.raises(TlsError, match=r"closed the connection|HTTP_REQUEST"):
            Tunnels().dial(dialed, bytes(32), PATIENCE_S)
        assert dialed.fileno() == -1


def test_a_listener_that_says_nothing_is_not_waited_for() -> None:
    with connection() as (dialed, _), pytest.raises(TlsError, match="timed out"):
        Tunnels().dial(dialed, bytes(32), 0.2)


@pytest.mark.usefixtures("nothing_is_left")
def test_strangers_disturb_no_rank_under_tls() -> None:
    connected: SimpleQueue[socket.socket] = SimpleQueue()
    owns = Tunnels(), Tunnels()
    listener = Listener(
        *(1, [0], lambda _, made, attempt: connected.put(made)),
        unix=False,
        tcp=True,
        address="127.0.0.1",
        tunnels=owns[1],
    )
    listener.open()
    listener.accept()
    where = listener.address
    assert where.tcp is not None
    address = where.tcp.host, where.tcp.port
    with (
        socket.create_connection(address, timeout=PATIENCE_S) as garbage,
        socket.create_connection(address, timeout=PATIENCE_S),
        socket.create_connection(address, timeout=PATIENCE_S) as under_tls,
    ):
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        stranger = owns[0].dial(under_tls, where.tcp.fingerprint or b"", PATIENCE_S)
        with stranger:
            stranger.sendall(bytes(500))
            dial(0, 1, where, unix=False, tunnels=owns[0]).close()
            connected.get(timeout=PATIENCE_S).close()
            listener.close()
    for each in owns:
        each.close(PATIENCE_S)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_stranger_that_ends_tls_ends_his_tunnel() -> None:
    own = Tunnels()
    own.make_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connection() as (dialed, accepted), ThreadPoolExecutor(1) as pool:
        accepts = pool.submit(own.accept, accepted, PATIENCE_S)
        with context.wrap_socket(dialed) as stranger, accepts.result(PATIENCE_S) as end:
            end.settimeout(PATIENCE_S)
            with suppress(OSError):
                stranger.unwrap()
            assert end.recv(1) == b""
    own.close(PATIENCE_S)


# Ranks.


@pytest.mark.usefixtures("nothing_is_left")
def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    store = HashStore()

    def made(rank: int) -> str:
        with pytest.raises((UsageError, PeerLostError)) as refused:
            opened(
                SocketTransport(
                    *(rank, store, [1 - rank], [1 - rank], Inbox()),
                    num_credits=1,
                    connect_s=2.0,
                    tls=rank == 0,
                    allow_unix=False,
                    address="127.0.0.1",
                )
            )
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        told = [*pool.map(made, (0, 1))]
    assert "rank 0 has tls on and rank 1 off; give all ranks the same" in told[0]
    assert "rank 1 has tls off and rank 0 on; give all ranks the same" in told[1]


def test_nixl_between_hosts_is_refused() -> None:
    planes = RankPlanes(CPU, TransportName.NIXL, 2**20)
    with pytest.raises(UsageError, match="transport nixl does not encrypt what goes to other"):
        planes.open(has_same_host=True, has_other_host=True, encrypts=True)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_rank_that_is_lost_is_named() -> None:
    with pair(**Way.TLS.options) as made:
        made.transports[0].close(farewell=False)
        events = take(made.inboxes[1], 2)
        assert [
            "rank 0" in str(event.error) for event in events if isinstance(event, LinkFailed)
        ] == [
            True,
            True,
        ]


@pytest.mark.parametrize("refuses", [False, True])
def test_certificates_are_each_listeners_own(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a container refuses files without a name."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if refuses:
        monkeypatch.setattr(os, "memfd_create", refuse)
    own = Tunnels()
    assert own.make_certificate() != own.make_certificate()
