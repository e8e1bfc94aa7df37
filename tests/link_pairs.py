"""Socket transports for tests: a pair of ranks in one process, and ranks with a bare peer."""

import multiprocessing.util
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.runtime.device.host_memory import HELPER
from rrfp.runtime.link.wire import Header, Purpose, encode_header
from rrfp.runtime.net import tls
from rrfp.runtime.net.connecting import Door, Listener, Port, Where
from rrfp.runtime.net.tls import Tunnels
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.registry import HOW_TO_INSTALL, is_installed
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Event, Failed, Inbox
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Record

PREFIX = "rrfp/transport"
PATIENCE_S = 20.0

needs_nixl = pytest.mark.skipif(not is_installed(), reason=f"needs NIXL: {HOW_TO_INSTALL}")
needs_tls = pytest.mark.skipif(
    not tls.is_installed(), reason=f"needs cryptography: {tls.HOW_TO_INSTALL}"
)


class Way(StrEnum):
    """How two ranks connect."""

    UNIX = "unix"
    TCP = "tcp"
    TLS = "tls"

    @property
    def options(self) -> dict[str, Any]:
        """Of a socket transport."""
        return {"allow_unix": self is Way.UNIX, "tls": self is Way.TLS}


unix_and_tcp = pytest.mark.parametrize("allow_unix", [True, False], ids=["unix", "tcp"])
ways = pytest.mark.parametrize("way", [Way.UNIX, Way.TCP, pytest.param(Way.TLS, marks=needs_tls)])


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Around a test: no thread more than before, but the one that lasts; and no socket file."""
    before = set(threading.enumerate())
    # Made once, for as long as this process lives.
    multiprocessing.util.get_temp_dir()
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        left = set(threading.enumerate()) - before
        assert not {thread.name for thread in left} - {HELPER}
        assert not list(Path(directory).iterdir())


def opened(transport: SocketTransport) -> SocketTransport:
    transport.open()
    return transport


def task(microbatch: int, kind: Kind = Kind.F) -> Task:
    return Task(1, kind, microbatch)


def take(inbox: Inbox, num_events: int, timeout_s: float = PATIENCE_S) -> list[Event]:
    """So many events, or fewer when the time is up."""
    events: list[Event] = []
    deadline_s = time.monotonic() + timeout_s
    while len(events) < num_events and (left_s := deadline_s - time.monotonic()) > 0:
        events.extend(inbox.take(left_s))
    return events


def failure(events: list[Event]) -> RrfpError:
    (event,) = events
    assert isinstance(event, Failed)
    return event.error


class Pair:
    """Ranks 0 and 1 in one process, a link each way."""

    def __init__(
        self, make_planes: Callable[[], RankPlanes] | None = None, **options: object
    ) -> None:
        self.store = HashStore()
        self.inboxes = (Inbox(), Inbox())
        self.records: tuple[list[Record], list[Record]] = ([], [])

        def make(rank: int) -> SocketTransport:
            settings: dict[str, object] = {"num_credits": 100, "connect_s": PATIENCE_S, **options}
            if make_planes is not None:
                settings["planes"] = make_planes()
            return opened(
                SocketTransport(
                    rank,
                    self.store,
                    [1 - rank],
                    [1 - rank],
                    self.inboxes[rank],
                    record=self.records[rank].append,
                    **settings,  # type: ignore[arg-type]
                )
            )

        with ThreadPoolExecutor(2) as pool:
            self.transports = tuple(pool.map(make, (0, 1)))

    @property
    def outboxes(self) -> list[list[Outbox]]:
        """Of each rank."""
        return [[*each._planes._outboxes.values()] for each in self.transports]

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(SocketTransport.close, self.transports))


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    made = Pair(**options)
    try:
        yield made
    finally:
        made.close()


def lone_rank(
    rank: int,
    *,
    sends_to: list[int],
    receives_from: list[int],
    address: str | None = None,
    connect_s: float = 0.2,
) -> None:
    """A rank whose peers say that they are on another host, and where, but do not come."""
    store = HashStore()
    where = Where(None, Port("127.0.0.1", 1, bytes(32))).to_json()
    for peer in {*sends_to, *receives_from} - {rank}:
        store.set(f"{PREFIX}/place/{peer}", "elsewhere")
        if peer in receives_from:
            store.set(f"{PREFIX}/address/{peer}", where)
    opened(
        SocketTransport(
            rank,
            store,
            sends_to,
            receives_from,
            Inbox(),
            num_credits=1,
            connect_s=connect_s,
            address=address,
        )
    )


@contextmanager
def bare_peer(
    role: str, way: Way = Way.UNIX, **options: float
) -> Iterator[tuple[SocketTransport, Inbox, socket.socket]]:
    """Rank 0 with one link, whose other end is a proven but bare socket: the link's `source` or
    its `destination`."""
    store, inbox, unix = HashStore(), Inbox(), way is Way.UNIX
    tunnels = Tunnels() if way is Way.TLS else None
    rendezvous = Rendezvous(store, PREFIX, 1, PATIENCE_S)
    rendezvous.publish("place/1", files_identity() if unix else "elsewhere")
    sends_to, receives_from = ([1], []) if role == "destination" else ([], [1])

    def make() -> SocketTransport:
        return opened(
            SocketTransport(
                0,
                store,
                sends_to,
                receives_from,
                inbox,
                num_credits=1,
                tls=tunnels is not None,
                **options,  # type: ignore[arg-type]
            )
        )

    connected: list[socket.socket] = []
    listener = Listener(
        *(1, sends_to and [0], lambda _, connection, attempt: connected.append(connection)),
        unix=unix,
        tcp=not unix,
        address="127.0.0.1",
        tunnels=tunnels,
    )
    listener.open()
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make)
        rendezvous.publish("address/1", listener.where.to_json())
        if role == "destination":
            listener.accept()
            listener.wait(rendezvous, PATIENCE_S)
        else:
            where = rendezvous.wait_json("address/0", 0, Where.decode)
            connected.append(dial(1, 0, where, unix=unix, tunnels=tunnels))
        transport = making.result(PATIENCE_S)
    # It will be found gone when its connection breaks.
    listener.close()
    try:
        yield transport, inbox, connected[0]
    finally:
        connected[0].close()
        if tunnels is not None:
            tunnels.close(PATIENCE_S)
        transport.close()


def dial(
    rank: int, peer: int, where: Where, *, unix: bool, tunnels: Tunnels | None = None
) -> socket.socket:
    """A connection to a rank that has proved itself, and this one, too."""
    with closing(Door(rank, peer, where, unix=unix, tunnels=tunnels)) as door:
        return door.dial(PATIENCE_S)


def message_bytes(sequence: int) -> bytes:
    return encode_header(Header(Purpose.MESSAGE, 0, task(0), sequence))
