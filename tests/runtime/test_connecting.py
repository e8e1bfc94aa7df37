"""Authentication of connections to a rank's links, and the addresses in the store."""

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.link.wire import MAGIC, VERSION
from rrfp.runtime.net.connecting import (
    DialError,
    Listener,
    ListenerAddress,
    PeerAddress,
    listen_tcp,
)
from rrfp.runtime.net.handshake import (
    HandshakeError,
    accept_handshake,
    connect_opened,
    dial_handshake,
    open_private,
)
from rrfp.runtime.net.source_filter import accept_nobody, accept_only, filter_refusal
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Inbox, Message, MessageArrived, PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from tests.runtime.link_pairs import (
    PATIENCE_S,
    PREFIX,
    dial,
    lone_rank,
    message_bytes,
    nothing_left,
    opened,
    pair,
    take,
    task,
    unix_and_tcp,
)
from tests.security.sandbox import refusing

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # made before the test has a directory of its own for the rest
    with nothing_left(monkeypatch):
        yield


class RecordingStore(HashStore):
    """A store that keeps what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()
        super().set(key, value)


def test_a_closed_unix_address_is_not_dialed_by_tcp() -> None:
    listener = Listener(1, {0}, lambda *_: None, unix=True, tcp=True, address="127.0.0.1")
    with closing(listener):
        listener.open()
        near = PeerAddress(0, 1, listener.address, unix=True)
        near.check_listening(PATIENCE_S)
        near.close()
        with pytest.raises(DialError, match="its address is closed"):
            near.check_listening(PATIENCE_S)


def test_the_store_knows_no_secret_of_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    own = secrets.token_bytes

    def token_bytes(num_bytes: int) -> bytes:
        made.append(own(num_bytes))
        return made[-1]

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    monkeypatch.setattr("tests.runtime.link_pairs.HashStore", RecordingStore)
    with pair() as near:
        assert isinstance(near.store, RecordingStore)
        said = b"".join(near.store.kept.values())
        assert made
        assert not [secret for secret in made if secret in said or secret.hex().encode() in said]
        assert {key.rpartition("/")[0] for key in near.store.kept} == {
            f"{PREFIX}/place",
            f"{PREFIX}/address",
        }
    with pair(allow_unix=False, address="127.0.0.1") as far:
        assert isinstance(far.store, RecordingStore)
        said = b"".join(far.store.kept.values())
        # As docs/security.md says: who can read the store can connect from another host.
        assert sum(secret.hex().encode() in said for secret in made) == 2


def test_each_way_in_has_a_secret_of_its_own() -> None:
    listener = Listener(0, [1], lambda *_: None, unix=True, tcp=True, address="127.0.0.1")
    listener.open()
    try:
        where = listener.address
        assert where.directory is not None
        assert where.tcp is not None
        directory = Path(where.directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600
        assert (directory / "secret").read_bytes() != where.tcp.secret
        assert ListenerAddress.decode(json.loads(where.to_json())) == where
    finally:
        listener.close()


def test_a_source_that_settles_slowly_holds_no_other_up() -> None:
    both = threading.Barrier(3)

    def settle(_: int, connection: socket.socket, attempt: int) -> None:
        with connection:
            both.wait(PATIENCE_S)

    listener = Listener(0, [1, 2], settle, unix=True, tcp=False, address=None)
    listener.open()
    listener.accept()
    try:
        with (
            dial(1, 0, listener.address, unix=True),
            dial(2, 0, listener.address, unix=True),
        ):
            assert not listener._is_complete(0.05)  # neither is handed over yet
            both.wait(PATIENCE_S)
            assert listener._is_complete(PATIENCE_S)
    finally:
        listener.close()


def strange_directory(how: str, made: Path) -> Path:
    """A directory with a socket that somebody else may have put there, in one way or another."""
    (made / "secret").write_bytes(bytes(32))
    (made / "secret").chmod(0o600)
    made.chmod(0o700)
    if how == "others may enter":
        made.chmod(0o701)
    if how == "group may read":
        made.chmod(0o740)
    if how == "a link":
        (made.parent / "link").symlink_to(made)
        return made.parent / "link"
    if how == "others may read the secret":
        (made / "secret").chmod(0o604)
    if how == "the secret is a link":
        (made / "secret").rename(made / "elsewhere")
        (made / "secret").symlink_to(made / "elsewhere")
    if how == "the secret is short":
        (made / "secret").write_bytes(bytes(31))
    if how == "the secret is a pipe":
        (made / "secret").unlink()
        os.mkfifo(made / "secret", 0o600)
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to another user")
        os.chown(made, 12345, -1)
    return made


@pytest.mark.parametrize(
    "how",
    [
        "others may enter",
        "group may read",
        "a link",
        "others may read the secret",
        "the secret is a link",
        "the secret is short",
        "the secret is a pipe",
        "another user's",
    ],
)
def test_a_directory_that_is_not_this_users_alone_is_not_dialed(how: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(made / "socket"))
        listening.listen()
        listening.settimeout(0)
        where = ListenerAddress(str(strange_directory(how, made)), None)
        with pytest.raises(PeerLostError, match="rank 1 cannot connect to rank 0 at /") as refused:
            dial(1, 0, where, unix=True)
        assert "\n" not in str(refused.value)
        with pytest.raises(BlockingIOError):
            listening.accept()


def address_with(**changed: object) -> bytes:
    """Make the JSON that a rank publishes, with a part of its TCP address changed."""
    port = {"host": "h", "port": 7, "secret": "00" * 32, "fingerprint": "00" * 32}
    return json.dumps({"directory": None, "tcp": port | changed, "transport": "inline"}).encode()


def test_an_address_can_be_read_otherwise() -> None:
    assert ListenerAddress.decode(json.loads(address_with())).to_json().encode() == address_with()


@pytest.mark.parametrize(
    "planted",
    [
        b"\x80\x04.",
        b"{}",
        b"[]",
        b'{"directory": "s", "tcp": null}',
        b'{"directory": null, "tcp": {"host": "h", "port": 1}}',
        address_with(port=70000),
        address_with(secret="00"),
        address_with(secret="zz"),
        address_with(fingerprint="00"),
        address_with(fingerprint=7),
    ],
)
def test_an_address_that_cannot_be_read_is_an_error(planted: bytes) -> None:
    store = HashStore()
    store.set(f"{PREFIX}/place/1", files_identity())
    store.set(f"{PREFIX}/address/1", planted)  # type: ignore[arg-type]
    words = f"what rank 1 published as '{PREFIX}/address/1' cannot be read"
    with pytest.raises(RrfpError, match=words):
        opened(SocketTransport(0, store, [1], [], Inbox(), num_credits=1, connect_s=5))


@pytest.mark.parametrize(
    ("sends_to", "receives_from"), [([2], []), ([], [2])], ids=["source", "destination"]
)
def test_a_peer_that_fails_before_its_links_are_open_is_reported_at_once(
    sends_to: list[int], receives_from: list[int]
) -> None:
    store = HashStore()
    store.set(f"{PREFIX}/place/2", files_identity())
    with ThreadPoolExecutor(1) as pool:
        transport = SocketTransport(1, store, sends_to, receives_from, Inbox(), num_credits=1)
        making = pool.submit(transport.open)
        Rendezvous(store, PREFIX, 1, 20).wait("place/1", 1)
        Rendezvous(store, PREFIX, 2, 0).fail("no memory")
        with pytest.raises(PeerLostError, match=r"rank 2 failed while the ranks met: no memory"):
            making.result(timeout=20)


def test_a_peer_that_never_comes_is_named() -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 waited 0\.2 s for .*rank 2"):
        lone_rank(1, sends_to=[2], receives_from=[])


def test_a_source_that_has_died_is_named_at_once() -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 cannot connect to rank 2 .*refused"):
        lone_rank(1, sends_to=[], receives_from=[2], connect_s=3600.0)


def test_a_rank_without_peers_closes() -> None:
    transport = opened(SocketTransport(0, HashStore(), [], [], Inbox(), num_credits=1))
    closing = threading.Thread(target=transport.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_listener_goes_on_after_a_handshake_that_had_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Listener(*(1, [], lambda *_: None), unix=False, tcp=True, address="127.0.0.1")
    own.open()
    own.accept()
    assert own.address.tcp is not None
    address = own.address.tcp.host, own.address.tcp.port
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rrfp-handshake":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection(address, PATIENCE_S) as refused:
            assert refused.recv(1) == b""
    with socket.create_connection(address, PATIENCE_S) as taken:
        assert taken.recv(1) != b""
    own.close()


def test_several_ranks_connect_in_any_order() -> None:
    store = HashStore()
    inboxes = [Inbox() for _ in range(5)]

    def make(rank: int) -> SocketTransport:
        time.sleep(0.03 * (rank * 2 % 5))
        others = [peer for peer in range(5) if peer != rank]
        return opened(
            SocketTransport(
                rank,
                store,
                others,
                others[::-1],
                inboxes[rank],
                num_credits=2,
                connect_s=PATIENCE_S,
            )
        )

    with ThreadPoolExecutor(5) as pool:
        transports = list(pool.map(make, range(5)))
        for rank, transport in enumerate(transports):
            for peer in range(5):
                if peer != rank:
                    transport.send(peer, Message(rank, task(peer), ()))
        for rank, inbox in enumerate(inboxes):
            events = [event for event in take(inbox, 4) if isinstance(event, MessageArrived)]
            assert {(event.peer, event.message.step) for event in events} == {
                (peer, peer) for peer in range(5) if peer != rank
            }
            assert all(event.message.task == task(rank) for event in events)
        list(pool.map(SocketTransport.close, transports))


@unix_and_tcp
def test_strangers_are_dropped_and_disturb_nothing(allow_unix: bool) -> None:
    store, inbox = HashStore(), Inbox()
    place = files_identity() if allow_unix else "elsewhere"
    store.set(f"{PREFIX}/place/1", place)
    own = Listener(
        *(1, [], lambda *_: None), unix=allow_unix, tcp=not allow_unix, address="127.0.0.1"
    )
    own.open()
    store.set(f"{PREFIX}/address/1", own.address.to_json())

    def make() -> SocketTransport:
        return opened(
            SocketTransport(
                0, store, [], [1], inbox, num_credits=1, connect_s=PATIENCE_S, address="127.0.0.1"
            )
        )

    def connect() -> socket.socket:
        if allow_unix:
            assert where.directory is not None
            file, _ = open_private(where.directory)
            try:
                return connect_opened(file, PATIENCE_S)
            finally:
                os.close(file)
        assert where.tcp is not None
        return socket.create_connection((where.tcp.host, where.tcp.port), timeout=PATIENCE_S)

    def dial_as(rank: int) -> socket.socket:
        return dial(rank, 0, where, unix=allow_unix)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make)
        rendezvous = Rendezvous(store, PREFIX, 1, PATIENCE_S)
        where = rendezvous.wait_json("address/0", 0, ListenerAddress.decode)
        with connect() as garbage, connect() as silent:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            # The challenge, and then the end: nothing more is said to a stranger.
            assert len(garbage.recv(40, socket.MSG_WAITALL)) == 40
            with suppress(ConnectionResetError):
                assert not garbage.recv(1)
            with connect() as guessing, pytest.raises(HandshakeError):
                dial_handshake(guessing, bytes(32), 1, 0, PATIENCE_S)
            with pytest.raises(PeerLostError, match="could not prove itself to rank 0"):
                dial_as(2)
            with dial_as(1) as raw:
                transport = making.result(PATIENCE_S)
                if allow_unix:
                    # Rank 1 has found it, and nobody else will.
                    assert where.directory is not None
                    assert not Path(where.directory).exists()
                assert raw.recv(60, socket.MSG_WAITALL)
                raw.sendall(message_bytes(0))
                assert take(inbox, 1) == [MessageArrived(1, Message(0, task(0), ()))]
                transport.close(farewell=False)
                with suppress(ConnectionResetError):
                    silent.recv(100)
                    assert not silent.recv(1)
    own.close()
    assert not inbox.take()


def test_an_impostor_that_listens_is_found_out() -> None:
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(accept_handshake, there, b"other", [0], 1, PATIENCE_S)
        with pytest.raises(HandshakeError, match=r"closed the connection|did not answer"):
            dial_handshake(here, b"secret", 0, 1, 0.2)
        with pytest.raises(HandshakeError, match="does not know the secret"):
            accepting.result(PATIENCE_S)
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(dial_handshake, here, b"secret", 0, 1, PATIENCE_S)
        there.sendall(MAGIC + bytes([VERSION, 0, 0, 0]) + bytes(32))
        assert there.recv(200)
        there.sendall(bytes(32))
        with pytest.raises(HandshakeError, match="does not know the secret"):
            dialing.result(PATIENCE_S)


# Who may connect to a port, decided before there is a connection.


_DROPPED_S = 0.2

needs_filter = pytest.mark.skipif(
    bool(filter_refusal()), reason=f"this process may not filter ports: {filter_refusal()}"
)


def listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")


def connect(listening: socket.socket, source: str | None = None) -> socket.socket:
    """From a source, which a machine's loopback has many of. Raises TimeoutError if dropped."""
    return socket.create_connection(listening.getsockname()[:2], _DROPPED_S, source and (source, 0))


def is_let_in(listening: socket.socket, source: str | None = None) -> bool:
    """Whether a megabyte comes through."""
    try:
        dialed = connect(listening, source)
    except TimeoutError:
        return False
    accepted, _ = listening.accept()
    data = bytes(range(256)) * 4096
    with dialed, accepted:
        return echoes(dialed, accepted, data)


def echoes(one: socket.socket, other: socket.socket, data: bytes) -> bool:
    for each in (one, other):
        each.setblocking(False)
    sent = 0
    found = b""
    while len(found) < len(data):
        if sent < len(data):
            with suppress(BlockingIOError):
                sent += one.send(data[sent:])
        with suppress(BlockingIOError):
            found += other.recv(2**16)
    return found == data


@needs_filter
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nobody_then_anybody(address: str) -> None:
    with listen(address) as listening:
        accept_only(listening, None)
        assert is_let_in(listening)
        accept_nobody(listening)
        assert not is_let_in(listening)
        accept_only(listening, None)
        assert is_let_in(listening)


@needs_filter
def test_who_was_let_in_stays() -> None:
    with listen("127.0.0.1") as listening:
        accept_only(listening, ["127.0.0.1"])
        dialed = connect(listening)
        accepted, _ = listening.accept()
        with dialed, accepted:
            accept_nobody(listening)
            assert echoes(dialed, accepted, b"a" * 10**6)
            assert echoes(accepted, dialed, b"b" * 10**6)


FAR = [f"10.0.{number // 256}.{number % 256}" for number in range(0, 2000, 2)]
FAR_6 = [f"fd00::{number:x}" for number in range(0, 2000, 2)]


@needs_filter
@pytest.mark.parametrize(
    ("address", "sources", "let"),
    [
        ("127.0.0.1", ["127.0.0.1"], {"127.0.0.1"}),
        ("127.0.0.1", ["127.0.0.2", "::1", "10.0.0.1"], {"127.0.0.2"}),
        ("127.0.0.1", ["127.0.0.2", "127.0.0.3"], {"127.0.0.2", "127.0.0.3"}),
        ("127.0.0.1", [], set()),
        ("127.0.0.1", ["::1", "::7f00:1"], set()),
        ("127.0.0.1", [*FAR[:60], "127.0.0.2"], {"127.0.0.2"}),
        # More hosts than a filter holds: their neighbors are let in as well.
        ("127.0.0.1", [*FAR, *FAR_6, "127.0.0.3"], {"127.0.0.2", "127.0.0.3"}),
        ("::1", ["::1"], {"::1"}),
        ("::1", ["fe80::1%lo", "127.0.0.1", "::1"], {"::1"}),
        ("::1", ["::2", "127.0.0.1"], set()),
        ("::1", [*FAR_6, "127.0.0.1"], set()),
    ],
)
def test_sources(address: str, sources: Collection[str], let: set[str]) -> None:
    others = ["::1"] if address == "::1" else ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    with listen(address) as listening:
        accept_only(listening, sources)
        assert {source for source in others if is_let_in(listening, source)} == let


@pytest.mark.parametrize("sources", ["", "here", "127.0.0.1,"])
def test_invalid_addresses_of_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, sources: str
) -> None:
    monkeypatch.setenv("RRFP_SOURCES", sources)
    with pytest.raises(UsageError, match=f"RRFP_SOURCES is '{sources}', and rrfp sets it to"):
        listen_tcp("127.0.0.1")


def test_where_no_filter_is_permitted_a_link_listens_all_the_same() -> None:
    """Peers that connect still have to authenticate."""
    code = (
        "from rrfp.runtime.net.source_filter import filter_refusal, accept_nobody\n"
        "from rrfp.runtime.net.connecting import listen_tcp\n"
        "from tests.runtime.test_connecting import is_let_in\n"
        "with listen_tcp('127.0.0.1') as listening:\n"
        "    accept_nobody(listening)\n"
        "    assert is_let_in(listening)\n"
        "print(filter_refusal())"
    )
    done = subprocess.run(
        [*refusing("setsockopt"), sys.executable, "-c", code],
        env={**os.environ, "RRFP_SOURCES": "192.0.2.1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "setsockopt(SO_ATTACH_FILTER): Operation not permitted\n", done.stderr
