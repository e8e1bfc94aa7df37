"""Socket transports for tests: a pair of ranks in one process, and ranks with a bare peer."""

import ctypes
import multiprocessing.util
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import HELPER
from rrfp.runtime.link.driver import LinkDriver
from rrfp.runtime.link.receiver import Receiver
from rrfp.runtime.link.wire import Header, Purpose, encode_header
from rrfp.runtime.net import tls
from rrfp.runtime.net import transport as socket_transport
from rrfp.runtime.net.connecting import Listener, ListenerAddress, PeerAddress, TcpAddress
from rrfp.runtime.net.tls import Tunnels
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.planes import cuda_ipc as cuda_ipc_plane
from rrfp.runtime.planes import host_planes as shared_memory_plane
from rrfp.runtime.planes import registry
from rrfp.runtime.planes import selection as rank_planes
from rrfp.runtime.planes.host_planes import SharedMemoryPlane
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Attachment, Fetcher, MappedFetcher, Offer, Plane
from rrfp.runtime.planes.registry import HOW_TO_INSTALL, TransportName, is_installed
from rrfp.runtime.planes.selection import PlaneChoice, RankPlanes
from rrfp.runtime.protocols import Event, Inbox, LinkFailed, Message, MessageArrived
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Record
from tests.doubles import receiver_slots
from tests.doubles.simulated_device import POISON, SimulatedDevice

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
        """Keyword arguments for a socket transport."""
        return {"allow_unix": self is Way.UNIX, "tls": self is Way.TLS}


unix_and_tcp = pytest.mark.parametrize("allow_unix", [True, False], ids=["unix", "tcp"])
ways = pytest.mark.parametrize("way", [Way.UNIX, Way.TCP, pytest.param(Way.TLS, marks=needs_tls)])


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test leaves no thread behind, except `HELPER`, and no socket file."""
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
    """Return this many events, or fewer after the timeout."""
    events: list[Event] = []
    deadline_s = time.monotonic() + timeout_s
    while len(events) < num_events and (left_s := deadline_s - time.monotonic()) > 0:
        events.extend(inbox.take(left_s))
    return events


def failure(events: list[Event]) -> RrfpError:
    (event,) = events
    assert isinstance(event, LinkFailed)
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
        """Outboxes of each rank."""
        found = [each._planes._stagers for each in self.transports]
        return [[each for each in own if isinstance(each, Outbox)] for own in found]

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(SocketTransport.close, self.transports))


def plane_choices(transport: SocketTransport) -> dict[int, PlaneChoice]:
    """Return the plane of each link from a rank, by peer."""
    return {**transport._planes.accepted.links}


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
    """Open a rank whose peers publish addresses on another host, but never connect."""
    store = HashStore()
    where = ListenerAddress(None, TcpAddress("127.0.0.1", 1, bytes(32))).to_json()
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
    """Yield rank 0 with one link, whose other end is an authenticated but bare socket: the link's
    `source` or its `destination`."""
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
        rendezvous.publish("address/1", listener.address.to_json())
        if role == "destination":
            listener.accept()
            listener.wait(rendezvous, PATIENCE_S)
        else:
            where = rendezvous.wait_json("address/0", 0, ListenerAddress.decode)
            connected.append(dial(1, 0, where, unix=unix, tunnels=tunnels))
        transport = making.result(PATIENCE_S)
    # When its connection breaks, rank 0 finds that it has ended.
    listener.close()
    try:
        yield transport, inbox, connected[0]
    finally:
        connected[0].close()
        if tunnels is not None:
            tunnels.close(PATIENCE_S)
        transport.close()


def dial(
    rank: int, peer: int, where: ListenerAddress, *, unix: bool, tunnels: Tunnels | None = None
) -> socket.socket:
    """Return a connection on which both ranks have authenticated."""
    with closing(PeerAddress(rank, peer, where, unix=unix, tunnels=tunnels)) as peer_address:
        return peer_address.dial(PATIENCE_S)


def message_bytes(sequence: int) -> bytes:
    return encode_header(Header(Purpose.MESSAGE, 0, task(0), sequence))


# Two ranks of one process on simulated devices, with real sockets and real outboxes between them.
#
# Memory is poisoned whenever it is given back: a tensor's when the tensor is gone, a slot's when it
# is released, a slab's when it is freed. What arrives is checked on the compute stream, late, as a
# kernel would read it.


MOST_BYTES = 8 * 2**10
SMALL_OUTBOX_BYTES = 4 * MOST_BYTES
"""Small enough that messages wait for slots, which are reused at once."""
LONGEST_S = 5.0


@dataclass
class Findings:
    """Counts of messages, and of errors in them."""

    num_arrived: int = 0
    num_corrupt: int = 0
    num_freed_attached: int = 0
    """Slabs that were freed while a peer was attached to them."""
    attached: Counter[int] = field(default_factory=Counter)
    """How many peers are attached to a slab, by the identity of its file."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def are_clean(self) -> bool:
        return self.num_corrupt == 0 and self.num_freed_attached == 0

    def count(self, *, is_corrupt: bool) -> None:
        with self.lock:
            self.num_arrived += 1
            self.num_corrupt += is_corrupt


class PoisoningOutbox(Outbox):
    """Fills a slot with poison when it is released."""

    def release(self, offset: int) -> None:
        size = self._slots._sizes[offset]  # nothing is lent to a device
        assert self._slab is not None
        self._slab[offset : offset + size].fill_(POISON)
        super().release(offset)


class WatchedPlane(SharedMemoryPlane):
    """Counts peers that are attached to its slab when it frees it."""

    def __init__(self, device: SimulatedDevice, slab_bytes: int, findings: Findings) -> None:
        super().__init__(device, slab_bytes)
        self._findings = findings

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        attached = super().attach(offer, peer, timeout_s)
        slab = os.fstat(offer.descriptors[0]).st_ino
        self._findings.attached[slab] += 1
        fetcher = WatchedFetcher(attached.fetcher, lambda: self._detached(slab))
        return attached._replace(fetcher=fetcher)

    def _detached(self, slab: int) -> None:
        self._findings.attached[slab] -= 1

    def close(self, *, are_detached: bool) -> None:
        self._findings.num_freed_attached += bool(
            self._findings.attached[os.fstat(self._descriptor).st_ino]
        )
        self.slab.fill_(POISON)
        super().close(are_detached=are_detached)


class WatchedFetcher:
    """Calls `detached` once, when it detaches."""

    def __init__(self, fetcher: Fetcher, detached: Callable[[], None]) -> None:
        self.fetch = fetcher.fetch
        self._fetcher = fetcher
        self._detached: Callable[[], None] | None = detached

    def detach(self, *, waits: bool = True) -> None:
        self._fetcher.detach(waits=waits)
        detached, self._detached = self._detached, None
        if detached is not None:
            detached()


@dataclass(frozen=True)
class Mistake:
    """A violation of one rule of the protocol: classes that replace the correct ones."""

    outbox: type[Outbox] = PoisoningOutbox
    fetcher: type[MappedFetcher] = MappedFetcher
    receiver: type[Receiver] = Receiver
    driver: type[LinkDriver[Any]] = LinkDriver
    device: type[SimulatedDevice] = SimulatedDevice
    outbox_bytes: int = SMALL_OUTBOX_BYTES
    delay_s: float = 50e-6
    compute_delay_s: float | None = None


def content(rank: int, microbatch: int) -> bytes:
    """Return the content of the message for a microbatch to this rank."""
    draws = random.Random(f"{rank}/{microbatch}")
    return draws.randbytes(draws.randint(1, MOST_BYTES))


PlaneMaker = Callable[[SimulatedDevice, int, Findings], Plane]


def exchange(
    seed: int,
    num_messages: int,
    mistake: Mistake,
    *,
    until_found: bool = False,
    make_plane: PlaneMaker = WatchedPlane,
    plane: TransportName = TransportName.SHM,
) -> Findings:
    """Send messages in a random order, half of them each way, and check them all; with
    `until_found` stop at the first that is corrupt."""
    findings = Findings()
    with ExitStack() as stack:
        for where, name, stand_in in (
            (shared_memory_plane, "Outbox", mistake.outbox),
            (cuda_ipc_plane, "Outbox", mistake.outbox),
            (receiver_slots, "Outbox", mistake.outbox),
            (shared_memory_plane, "MappedFetcher", mistake.fetcher),
            (receiver_slots, "MappedFetcher", mistake.fetcher),
            (socket_transport, "Receiver", mistake.receiver),
            (socket_transport, "LinkDriver", mistake.driver),
        ):
            stack.enter_context(patch.object(where, name, stand_in))

        def load_plane(_: TransportName) -> Callable[[Any, int], Plane]:
            return lambda device, size: make_plane(device, size, findings)

        stack.enter_context(patch.object(rank_planes, "load_plane", load_plane))
        stack.enter_context(patch.object(registry, "CHOICES", {"cpu": {plane: ((plane,), ())}}))
        store = HashStore()
        ranks = [_Rank(rank, seed, store, mistake, findings, plane) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            try:
                list(pool.map(_Rank.open, ranks))
                each = num_messages // 2
                list(pool.map(lambda rank: rank.work(each, until_found=until_found), ranks))
            finally:
                list(pool.map(_Rank.close, ranks))
    return findings


class _Rank:
    """One rank: its messages out and in, on its own simulated device."""

    def __init__(
        self,
        rank: int,
        seed: int,
        store: HashStore,
        mistake: Mistake,
        findings: Findings,
        plane: TransportName,
    ) -> None:
        self._rank = rank
        self._findings = findings
        self._draws = random.Random(f"{seed}/{rank}")
        self._device = mistake.device(
            2 * seed + rank, mean_delay_s=mistake.delay_s, compute_delay_s=mistake.compute_delay_s
        )
        self._inbox = Inbox()
        self._is_done = False
        self._transport = SocketTransport(
            rank,
            store,
            [1 - rank],
            [1 - rank],
            self._inbox,
            num_credits=16,
            planes=RankPlanes(self._device, plane, mistake.outbox_bytes),
        )

    def open(self) -> None:
        self._transport.open()

    def work(self, num_messages: int, *, until_found: bool) -> None:
        unsent = self._draws.sample(range(num_messages), num_messages)
        num_missing = num_messages
        deadline_s = time.monotonic() + LONGEST_S
        while unsent or num_missing:
            assert time.monotonic() < deadline_s, f"{num_missing} messages did not arrive in time"
            if until_found and not self._findings.are_clean:
                return
            for _ in range(min(len(unsent), self._draws.randint(0, 4))):
                self._send(unsent.pop())
            for event in self._inbox.take(0.0 if unsent else 0.05):
                if not isinstance(event, MessageArrived):
                    assert until_found, event
                    return
                self._check(event)
                num_missing -= 1
        self._is_done = True

    def _send(self, microbatch: int) -> None:
        """Make a message on the compute stream, send it, and drop all references."""
        device, data = self._device, content(1 - self._rank, microbatch)
        stream = device.compute_stream()
        tensor = device.empty([len(data)], torch.uint8, stream)
        address = tensor.data_ptr()
        device.launch(lambda: _write(address, data), stream)
        self._transport.send(1 - self._rank, Message(0, Task(1, Kind.F, microbatch), (tensor,)))

    def _check(self, event: MessageArrived) -> None:
        """Read what has arrived on the compute stream, and drop all references."""
        device, message = self._device, event.message
        self._transport.consumed(event.peer, message.step)
        (tensor,) = message.tensors
        assert tensor is not None
        expected = content(self._rank, message.task.microbatch)
        assert tensor.numel() == len(expected)
        device.use_on_compute_stream(message.tensors)
        address = tensor.data_ptr()

        def check() -> None:
            found = ctypes.string_at(address, len(expected))
            self._findings.count(is_corrupt=found != expected)

        device.launch(check, device.compute_stream())

    def close(self) -> None:
        # After a mistake was found, messages in flight are not consumed.
        self._transport.close(farewell=self._is_done)
        self._device.close()


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
