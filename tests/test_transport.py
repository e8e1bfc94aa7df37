"""The socket transport: order and bits kept, credits bound, deaths told, nothing left behind."""

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.connecting import Listener, dial
from rrfp.runtime.delays import Delays
from rrfp.runtime.handshake import HandshakeError, accept_handshake, dial_handshake
from rrfp.runtime.private_socket import connect_private
from rrfp.runtime.protocols import (
    Arrived,
    Decided,
    Event,
    Failed,
    Inbox,
    Left,
    Message,
    PeerLostError,
    Reported,
    Transport,
)
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.runtime.socket_transport import SocketTransport
from rrfp.runtime.whereabouts import Where
from rrfp.runtime.wire import MAGIC, VERSION, Header, Purpose, encode_header
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, Record, SendRecord
from tests.ranks import loopback_store, run_ranks
from tests.test_wire import same_bits, tensors

PREFIX = "rrfp/transport"
PATIENCE_S = 20.0

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no thread more than before, and no socket file."""
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        left = set(threading.enumerate()) - before
        assert not {thread.name for thread in left}
        assert not list(Path(directory).iterdir())


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

    def __init__(self, **options: object) -> None:
        self.store = HashStore()
        self.inboxes = (Inbox(), Inbox())
        self.records: tuple[list[Record], list[Record]] = ([], [])

        def make(rank: int) -> SocketTransport:
            settings: dict[str, object] = {"num_credits": 100, "connect_s": PATIENCE_S, **options}
            return SocketTransport(
                rank,
                self.store,
                [1 - rank],
                [1 - rank],
                self.inboxes[rank],
                record=self.records[rank].append,
                **settings,  # type: ignore[arg-type]
            )

        with ThreadPoolExecutor(2) as pool:
            self.transports = tuple(pool.map(make, (0, 1)))

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(SocketTransport.close, self.transports))


@contextmanager
def pair(**options: object) -> Iterator[Pair]:
    made = Pair(**options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def allow_unix(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_it_is_a_transport() -> None:
    with pair() as made:
        transport: Transport = made.transports[0]
        assert transport is made.transports[0]


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
@given(messages=st.lists(st.lists(tensors(), max_size=3), max_size=8))
def test_messages_arrive_in_order_and_bit_for_bit(
    unix: bool, messages: list[list[torch.Tensor | None]], links: dict[bool, Pair]
) -> None:
    made = links[unix]
    for index, sent in enumerate(messages):
        made.transports[0].send(1, Message(4, task(index), tuple(sent)))
    events: list[Event] = []
    while len(events) < len(messages):
        arrived = take(made.inboxes[1], 1)
        assert arrived
        events.extend(arrived)
        for _ in arrived:
            made.transports[1].consumed(0, 4)
    for index, (sent, event) in enumerate(zip(messages, events, strict=True)):
        assert isinstance(event, Arrived)
        assert (event.peer, event.message.step, event.message.task) == (0, 4, task(index))
        assert len(event.message.tensors) == len(sent)
        assert all(same_bits(*both) for both in zip(sent, event.message.tensors, strict=True))


@pytest.fixture(scope="module")
def links() -> Iterator[dict[bool, Pair]]:
    with pair(num_credits=3) as unix, pair(num_credits=3, allow_unix=False) as tcp:
        yield {True: unix, False: tcp}


def test_large_messages_cross_both_ways_at_once(allow_unix: bool) -> None:
    big = torch.arange(3 * 2**20, dtype=torch.int32)
    with pair(allow_unix=allow_unix) as made:
        for index in range(3):
            for rank in (0, 1):
                made.transports[rank].send(1 - rank, Message(0, task(index), (big,)))
        for rank in (0, 1):
            for index, event in enumerate(take(made.inboxes[rank], 3)):
                assert isinstance(event, Arrived)
                assert event.message.task == task(index)
                assert same_bits(event.message.tensors[0], big)


def test_delays_come_before_messages_and_keep_their_order() -> None:
    longest_s, num_messages = 0.02, 30
    with pair(delays=Delays(7, 0, longest_s)) as made:
        began_s = time.monotonic()
        for index in range(num_messages):
            made.transports[0].send(1, Message(0, task(index), ()))
        assert time.monotonic() - began_s < longest_s, "the sending thread sleeps, not this one"
        events = take(made.inboxes[1], num_messages)
        # A fifth of what is expected; a seed's draws are always the same.
        assert time.monotonic() - began_s > num_messages * longest_s / 2 / 5
    arrived = [event.message.task for event in events if isinstance(event, Arrived)]
    assert arrived == [task(index) for index in range(num_messages)]


def test_delays_follow_seed_rank_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def first_three(delays: Delays, name: str) -> list[float]:
        slept.clear()
        delay = delays.stream(name)
        for _ in range(3):
            delay()
        return list(slept)

    drawn = [
        first_three(Delays(seed, rank, 0.5), name)
        for seed, rank, name in [(1, 0, "a"), (2, 0, "a"), (1, 1, "a"), (1, 0, "b")]
    ]
    assert len({tuple(delays) for delays in drawn}) == 4
    assert all(0 <= delay <= 0.5 for delays in drawn for delay in delays)
    assert first_three(Delays(1, 0, 0.5), "a") == drawn[0]


def test_what_travels_is_what_was_there_when_it_was_sent() -> None:
    with pair(num_credits=1) as made:
        for index in range(2):
            tensor = torch.full((4,), float(index), requires_grad=True)
            made.transports[0].send(1, Message(0, task(index), (tensor,)))
            tensor.data = torch.empty(1)
        for index in range(2):
            (event,) = take(made.inboxes[1], 1)
            assert isinstance(event, Arrived)
            (received,) = event.message.tensors
            assert received is not None
            assert received.tolist() == [index] * 4
            made.transports[1].consumed(0, 0)


def test_reports_and_decisions_need_no_credit_and_overtake_messages() -> None:
    with pair(num_credits=1) as made:
        for index in range(3):
            made.transports[0].send(1, Message(0, task(index), ()))
        assert len(take(made.inboxes[1], 1)) == 1
        made.transports[0].report(1, 5, task(7, Kind.B))
        made.transports[0].decide(1, 5, 12, task(8, Kind.W))
        assert take(made.inboxes[1], 2) == [
            Reported(0, 5, task(7, Kind.B)),
            Decided(0, 5, 12, task(8, Kind.W)),
        ]
        for index in (1, 2):
            made.transports[1].consumed(0, 0)
            assert take(made.inboxes[1], 1) == [Arrived(0, Message(0, task(index), ()))]


@settings(max_examples=15)
@given(num_credits=st.integers(1, 30), raised=st.integers(1, 40))
def test_credits_bound_what_is_in_flight_and_can_be_raised(num_credits: int, raised: int) -> None:
    with pair(num_credits=num_credits, close_s=0.05) as made:
        for index in range(60):
            made.transports[0].send(1, Message(0, task(index), ()))
        bound = max(num_credits, raised)
        first, most = most_held(num_credits), most_held(bound)
        assert len(take(made.inboxes[1], first)) == first
        made.transports[1].grant(raised)
        assert len(take(made.inboxes[1], most - first)) == most - first
        # The link keeps its order: a message beyond the bound would stand before or after this.
        made.transports[0].report(1, 0, task(0))
        assert take(made.inboxes[1], 1) == [Reported(0, 0, task(0))]
        arrived = most
        for consumed in range(1, 61):
            made.transports[1].consumed(0, 0)
            # Credits come back some at a time, and never so late that the link holds too little.
            least = min(60, consumed + bound)
            if arrived < least:
                arrived += len(take(made.inboxes[1], least - arrived))
            assert least <= arrived <= consumed + most
        assert arrived == 60


def most_held(num_credits: int) -> int:
    """What a link holds that must be able to hold so many messages."""
    return num_credits + num_credits // 8


def test_many_senders_at_once_lose_and_reorder_nothing() -> None:
    """Whoever sends writes by itself what the socket takes, and the link's thread the rest."""
    num_each = 200
    with pair(num_credits=9) as made:

        def send_messages() -> None:
            for index in range(num_each):
                size = 100_000 if index % 20 == 0 else 3
                tensors = (torch.full((size,), float(index)),)
                made.transports[0].send(1, Message(0, task(index), tensors))

        def announce(report: bool) -> None:
            for index in range(num_each):
                if report:
                    made.transports[0].report(1, 0, task(index))
                else:
                    made.transports[0].decide(1, 0, index, task(index, Kind.B))

        with ThreadPoolExecutor() as threads:
            sending = [
                threads.submit(send_messages),
                threads.submit(announce, True),
                threads.submit(announce, False),
            ]
            events: list[Event] = []
            while len(events) < 3 * num_each:
                for event in take(made.inboxes[1], 1):
                    events.append(event)
                    if isinstance(event, Arrived):
                        made.transports[1].consumed(0, 0)
            for each in sending:
                each.result()
    messages = [event.message for event in events if isinstance(event, Arrived)]
    assert [message.task for message in messages] == [task(index) for index in range(num_each)]
    for index, message in enumerate(messages):
        assert message.tensors[0] is not None
        assert bool((message.tensors[0] == index).all())
    reports = [event.task.microbatch for event in events if isinstance(event, Reported)]
    decisions = [event.position for event in events if isinstance(event, Decided)]
    assert reports == decisions == list(range(num_each))


def test_sends_and_receives_are_recorded() -> None:
    with pair() as made:
        for index in range(3):
            sent = (torch.zeros(10 + index), None, torch.zeros(0, 3))
            made.transports[0].send(1, Message(6, task(index), sent))
        made.transports[0].report(1, 6, task(0))
        assert len(take(made.inboxes[1], 4)) == 4
    sends, receives = made.records
    assert len(sends) == len(receives) == 3
    for index, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        assert isinstance(send, SendRecord)
        assert isinstance(receive, ReceiveRecord)
        assert send[2:] == (6, "F", 1, index, 1, index, 4 * (10 + index))
        assert receive[2:] == (6, "F", 1, index, 0, index, 4 * (10 + index))
        assert send.start_ns < receive.start_ns <= receive.end_ns
        assert send.start_ns < send.end_ns


def test_closing_delivers_what_is_queued_and_fails_nobody(allow_unix: bool) -> None:
    made = Pair(allow_unix=allow_unix)
    big = torch.ones(2**20)
    for index in range(5):
        made.transports[0].send(1, Message(0, task(index), (big,)))
    made.transports[0].close()
    made.transports[0].close()
    events = take(made.inboxes[1], 6)
    assert [type(event) for event in events] == [Arrived] * 5 + [Left]
    made.transports[1].consumed(0, 0)
    made.transports[1].close()
    assert not made.inboxes[0].take()
    assert not made.inboxes[1].take()


def test_sending_to_a_rank_that_has_left_is_told() -> None:
    with pair() as made:
        made.transports[1].close()
        # It ended once rank 0's ends had answered its farewell.
        assert take(made.inboxes[0], 1) == [Left(1)]
        made.transports[0].send(1, Message(0, task(3), ()))
        assert "rank 1 has left" in str(failure(take(made.inboxes[0], 1)))


def test_a_farewell_with_messages_outstanding_is_told() -> None:
    with pair(num_credits=1) as made:
        for index in range(3):
            made.transports[0].send(1, Message(0, task(index), ()))
        assert len(take(made.inboxes[1], 1)) == 1
        made.transports[1].close()
        # The farewells of the two links come in either order.
        events = [event for event in take(made.inboxes[0], 2) if event != Left(1)]
        assert "rank 1 said farewell while 2 frames" in str(failure(events))


def test_a_rank_that_fails_leaves_without_a_farewell() -> None:
    with pair() as made:
        made.transports[1].close(farewell=False)
        errors = [event.error for event in take(made.inboxes[0], 2) if isinstance(event, Failed)]
        assert len(errors) == 2
        assert all(isinstance(error, PeerLostError) for error in errors)
        assert all("rank 1 closed its connection" in str(error) for error in errors)


def test_a_forked_process_does_not_keep_a_failed_rank_alive(allow_unix: bool) -> None:
    """A data loader's worker has the links of its parent open."""
    with pair(allow_unix=allow_unix, silence_s=3600.0) as made:
        reader, writer = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        try:
            made.transports[0].close(farewell=False)
            for event in take(made.inboxes[1], 2):
                assert isinstance(event, Failed)
                assert "rank 0 closed its connection" in str(event.error)
        finally:
            os.close(writer)
            os.close(reader)
            os.waitpid(worker, 0)


def test_settings_that_cannot_work_are_refused() -> None:
    for complaint, links, options in (
        ("a link to itself", [0], {"num_credits": 1}),
        ("num_credits is 0", [1], {"num_credits": 0}),
        ("heartbeat_s is 3", [1], {"num_credits": 1, "heartbeat_s": 3, "silence_s": 2}),
    ):
        with pytest.raises(UsageError, match=complaint):
            SocketTransport(0, HashStore(), links, [], Inbox(), **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot listen at"):
        lone_rank(0, sends_to=[], receives_from=[1], address="no-such-host.invalid")
    with pair() as made:
        with pytest.raises(UsageError, match="rank 0 does not send to rank 5"):
            made.transports[0].send(5, Message(0, task(0), ()))
        with pytest.raises(UsageError, match="rank 0 does not receive from rank 5"):
            made.transports[0].consumed(5, 0)
        with pytest.raises(UsageError, match="complex64"):
            made.transports[0].send(1, Message(0, task(0), (torch.zeros(1).to(torch.complex64),)))


def lone_rank(
    rank: int, *, sends_to: list[int], receives_from: list[int], address: str | None = None
) -> None:
    """A rank whose peers say that they are on another host, and nothing else."""
    store = HashStore()
    for peer in {*sends_to, *receives_from} - {rank}:
        store.set(f"{PREFIX}/place/{peer}", "elsewhere")
    SocketTransport(
        rank,
        store,
        sends_to,
        receives_from,
        Inbox(),
        num_credits=1,
        connect_s=0.2,
        address=address,
    )


@pytest.mark.parametrize(
    ("sends_to", "receives_from"), [([2], []), ([], [2])], ids=["source", "destination"]
)
def test_a_peer_that_never_comes_is_named(sends_to: list[int], receives_from: list[int]) -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 waited 0\.2 s for .*rank 2"):
        lone_rank(1, sends_to=sends_to, receives_from=receives_from)


def test_several_ranks_connect_in_any_order() -> None:
    store = HashStore()
    inboxes = [Inbox() for _ in range(5)]

    def make(rank: int) -> SocketTransport:
        time.sleep(0.03 * (rank * 2 % 5))
        others = [peer for peer in range(5) if peer != rank]
        return SocketTransport(
            rank, store, others, others[::-1], inboxes[rank], num_credits=2, connect_s=PATIENCE_S
        )

    with ThreadPoolExecutor(5) as pool:
        transports = list(pool.map(make, range(5)))
        for rank, transport in enumerate(transports):
            for peer in range(5):
                if peer != rank:
                    transport.send(peer, Message(rank, task(peer), ()))
        for rank, inbox in enumerate(inboxes):
            events = [event for event in take(inbox, 4) if isinstance(event, Arrived)]
            assert {(event.peer, event.message.step) for event in events} == {
                (peer, peer) for peer in range(5) if peer != rank
            }
            assert all(event.message.task == task(rank) for event in events)
        list(pool.map(SocketTransport.close, transports))


def test_two_transports_live_in_one_job() -> None:
    store = HashStore()

    def make(prefix: str, rank: int) -> tuple[SocketTransport, Inbox]:
        inbox = Inbox()
        links = ([1], []) if rank == 0 else ([], [0])
        return SocketTransport(rank, store, *links, inbox, num_credits=1, prefix=prefix), inbox

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, ("a", "a", "b", "b"), (0, 1, 0, 1)))
        made[0][0].send(1, Message(1, task(0), ()))
        made[2][0].send(1, Message(2, task(0), ()))
        for index, step in ((1, 1), (3, 2)):
            assert take(made[index][1], 1) == [Arrived(0, Message(step, task(0), ()))]
        list(pool.map(SocketTransport.close, [transport for transport, _ in made]))


# Peers that break the protocol, and strangers.


@contextmanager
def bare_peer(
    role: str, *, unix: bool = True, **options: float
) -> Iterator[tuple[SocketTransport, Inbox, socket.socket]]:
    """Rank 0 with one link, whose other end is a proven but bare socket: the link's `source` or
    its `destination`."""
    store, inbox = HashStore(), Inbox()
    rendezvous = Rendezvous(store, PREFIX, 1, PATIENCE_S)
    rendezvous.publish("place/1", files_identity() if unix else "elsewhere")
    sends_to, receives_from = ([1], []) if role == "destination" else ([], [1])

    def make() -> SocketTransport:
        return SocketTransport(
            0,
            store,
            sends_to,
            receives_from,
            inbox,
            num_credits=1,
            **options,  # type: ignore[arg-type]
        )

    connected: list[socket.socket] = []
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make)
        if role == "destination":
            listener = Listener(
                1,
                [0],
                lambda _, connection: connected.append(connection),
                unix=unix,
                tcp=not unix,
                address="127.0.0.1",
            )
            rendezvous.publish("address/1", listener.where.to_json())
            listener.wait(rendezvous, PATIENCE_S)
            listener.close()
        else:
            where = rendezvous.wait_json("address/0", 0, Where.decode)
            connected.append(dial(1, 0, where, unix=unix, timeout_s=PATIENCE_S))
        transport = making.result(PATIENCE_S)
    try:
        yield transport, inbox, connected[0]
    finally:
        connected[0].close()
        transport.close()


def test_close_wakes_a_sender_without_credit(allow_unix: bool) -> None:
    with bare_peer("destination", unix=allow_unix, close_s=0.1) as (transport, inbox, _):
        transport.send(1, Message(0, task(0), ()))
        transport.close()
        assert not inbox.take()


def test_close_wakes_a_sender_with_a_full_socket(allow_unix: bool) -> None:
    with bare_peer("destination", unix=allow_unix, close_s=0.1) as (transport, inbox, raw):
        raw.sendall(encode_header(Header(Purpose.CREDIT, number=1)))
        transport.send(1, Message(0, task(0), (torch.ones(2**24),)))
        assert raw.recv(4) == b"RRFP"
        transport.close()
        assert not inbox.take()


def message_bytes(sequence: int) -> bytes:
    return encode_header(Header(Purpose.MESSAGE, 0, task(0), sequence))


@pytest.mark.parametrize(
    ("role", "data", "complaint"),
    [
        ("source", b"x" * 48, "begins with b'xxxx'"),
        ("source", message_bytes(1), "message 1 came where 0 was due"),
        ("source", message_bytes(0) + message_bytes(1), "beyond 1 credits"),
        ("source", encode_header(Header(Purpose.CREDIT, number=1)), "a source sent a credit"),
        ("destination", message_bytes(0), "a destination sent a message"),
        ("destination", b"\0" * 48, "begins with"),
    ],
)
def test_what_breaks_the_protocol_is_told_with_its_rank(
    role: str, data: bytes, complaint: str
) -> None:
    with bare_peer(role) as (_, inbox, raw):
        if role == "source":
            # Its one credit: from now on the message is within the bound.
            assert raw.recv(48, socket.MSG_WAITALL)
        raw.sendall(data)
        (error,) = [event.error for event in take(inbox, 1) if isinstance(event, Failed)] or [
            failure(take(inbox, 1))
        ]
        assert "what rank 1 sent to rank 0 cannot be read" in str(error)
        assert complaint in str(error)


@pytest.mark.parametrize("role", ["source", "destination"])
def test_an_end_of_file_in_mid_frame_is_a_loss(role: str, allow_unix: bool) -> None:
    with bare_peer(role, unix=allow_unix) as (_, inbox, raw):
        raw.sendall(message_bytes(0)[:20])
        raw.close()
        error = failure(take(inbox, 1))
        assert isinstance(error, PeerLostError)
        assert "rank 1 closed its connection without a farewell" in str(error)


@pytest.mark.parametrize("role", ["source", "destination"])
def test_a_silent_peer_is_lost_and_one_with_heartbeats_is_not(role: str) -> None:
    with bare_peer(role, heartbeat_s=0.05, silence_s=0.4) as (_, inbox, raw):
        for _ in range(10):
            raw.sendall(encode_header(Header(Purpose.HEARTBEAT)))
            assert not inbox.take(0.1)
        error = failure(take(inbox, 1))
        assert isinstance(error, PeerLostError)
        assert "rank 1 was silent for 0.4 s" in str(error)


def test_strangers_are_dropped_and_disturb_nothing(allow_unix: bool) -> None:
    store, inbox = HashStore(), Inbox()
    place = files_identity() if allow_unix else "elsewhere"
    store.set(f"{PREFIX}/place/1", place)

    def make() -> SocketTransport:
        return SocketTransport(
            0, store, [], [1], inbox, num_credits=1, connect_s=PATIENCE_S, address="127.0.0.1"
        )

    def connect() -> socket.socket:
        if allow_unix:
            assert where.directory is not None
            stranger, _ = connect_private(where.directory)
            stranger.settimeout(PATIENCE_S)
            return stranger
        assert where.tcp is not None
        return socket.create_connection((where.tcp.host, where.tcp.port), timeout=PATIENCE_S)

    def dial_as(rank: int) -> socket.socket:
        return dial(rank, 0, where, unix=allow_unix, timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make)
        rendezvous = Rendezvous(store, PREFIX, 1, PATIENCE_S)
        where = rendezvous.wait_json("address/0", 0, Where.decode)
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
                with suppress(ConnectionResetError):
                    silent.recv(100)
                    assert not silent.recv(1)
                assert raw.recv(48, socket.MSG_WAITALL)
                raw.sendall(message_bytes(0))
                assert take(inbox, 1) == [Arrived(1, Message(0, task(0), ()))]
                transport.close(farewell=False)
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
        dialling = pool.submit(dial_handshake, here, b"secret", 0, 1, PATIENCE_S)
        there.sendall(MAGIC + bytes([VERSION, 0, 0, 0]) + bytes(32))
        assert there.recv(200)
        there.sendall(bytes(32))
        with pytest.raises(HandshakeError, match="does not know the secret"):
            dialling.result(PATIENCE_S)


# Two processes.


def make_in_process(rank: int, inbox: Inbox, port: int, **options: float) -> SocketTransport:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return SocketTransport(
        rank,
        store,
        [1 - rank],
        [1 - rank],
        inbox,
        num_credits=2,
        **options,  # type: ignore[arg-type]
    )


def run_rank_1(port: int, options: dict[str, float]) -> None:
    transport = make_in_process(1, Inbox(), port, **options)
    time.sleep(PATIENCE_S)
    transport.close()


@contextmanager
def peer_process(**options: float) -> Iterator[tuple[SocketTransport, Inbox, SpawnProcess]]:
    server = loopback_store()
    inbox = Inbox()
    process = multiprocessing.get_context("spawn").Process(
        target=run_rank_1, args=(server.port, options), daemon=True
    )
    process.start()
    try:
        with closing(make_in_process(0, inbox, server.port, **options)) as transport:
            yield transport, inbox, process
    finally:
        process.kill()
        process.join()
        process.close()


def losses(inbox: Inbox, timeout_s: float) -> list[str]:
    events = take(inbox, 2, timeout_s)
    return [str(event.error) for event in events if isinstance(event, Failed)]


def test_a_killed_peer_is_named_at_once() -> None:
    with peer_process() as (_, inbox, process):
        process.kill()
        first, second = losses(inbox, 2.0)
        assert "rank 1 closed its connection without a farewell" in first
        assert "rank 1 closed its connection without a farewell" in second


def test_a_stopped_peer_is_named_even_while_its_socket_is_full() -> None:
    with peer_process(heartbeat_s=0.1, silence_s=1.0, close_s=1.0) as (transport, inbox, process):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        transport.send(1, Message(0, task(0), (torch.ones(2**24),)))
        first, second = losses(inbox, PATIENCE_S)
        assert "rank 1 was silent for 1 s" in first
        assert "rank 1 was silent for 1 s" in second


def exchange_with_other_rank(allow_unix: bool) -> list[str]:
    """Send random messages to the other rank and compare what it sends, which is the same."""
    rank, inbox = int(os.environ["RANK"]), Inbox()
    options = {"allow_unix": allow_unix}
    transport = make_in_process(rank, inbox, int(os.environ["MASTER_PORT"]), **options)
    generator = torch.Generator().manual_seed(1)
    sent = [torch.randn(index * 1000, 3, generator=generator) for index in range(40)]
    for index, tensor in enumerate(sent):
        transport.send(1 - rank, Message(0, task(index), (tensor, None)))
    wrong: list[str] = []
    num_received = 0
    while num_received < len(sent):
        for event in take(inbox, 1):
            if isinstance(event, Left):
                continue  # The other rank has all it needs, and may close before this one.
            if not isinstance(event, Arrived):
                return [repr(event)]
            (tensor_received, nothing) = event.message.tensors
            right = same_bits(tensor_received, sent[num_received]) and nothing is None
            if event.message.task != task(num_received) or not right:
                wrong.append(f"message {num_received}")
            num_received += 1
            transport.consumed(1 - rank, 0)
    transport.close()
    wrong += [repr(event) for event in inbox.take() if not isinstance(event, Left)]
    return wrong


def test_two_processes_exchange_messages(allow_unix: bool) -> None:
    assert run_ranks(2, exchange_with_other_rank, allow_unix, timeout_s=40) == [[], []]


def test_no_file_descriptor_is_left() -> None:
    with pair():
        pass
    descriptors = Path("/proc/self/fd")
    num_before = len(list(descriptors.iterdir()))
    for _ in range(3):
        with pair() as made:
            made.transports[0].send(1, Message(0, task(0), ()))
        with pair(allow_unix=False):
            pass
        with pytest.raises(PeerLostError):
            lone_rank(1, sends_to=[], receives_from=[2])
    assert len(list(descriptors.iterdir())) == num_before
