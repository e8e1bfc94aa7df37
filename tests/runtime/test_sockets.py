"""The socket transport: order and bits kept, credits bound, deaths told, nothing left behind."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables
from rrfp.runtime.link.wire import Header, Purpose, encode_header
from rrfp.runtime.net.faults import LinkFault, list_links, order_fault, with_faults
from rrfp.runtime.net.transport import SocketTransport, check_device
from rrfp.runtime.pace import Delays
from rrfp.runtime.protocols import (
    Event,
    Inbox,
    InputReported,
    LinkFailed,
    Message,
    MessageArrived,
    PeerLeft,
    PeerLostError,
    TaskDecided,
    Transport,
)
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import ReceiveRecord, SendRecord
from tests.e2e.ranks import loopback_store, run_ranks
from tests.runtime.link_pairs import (
    PATIENCE_S,
    Pair,
    Way,
    bare_peer,
    failure,
    lone_rank,
    message_bytes,
    nothing_left,
    opened,
    pair,
    take,
    task,
    ways,
)
from tests.runtime.test_protocol import same_bits, tensors

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield


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
        assert isinstance(event, MessageArrived)
        assert (event.peer, event.message.step, event.message.task) == (0, 4, task(index))
        assert len(event.message.tensors) == len(sent)
        assert all(same_bits(*both) for both in zip(sent, event.message.tensors, strict=True))


@pytest.fixture(scope="module")
def links() -> Iterator[dict[bool, Pair]]:
    with pair(num_credits=3) as unix, pair(num_credits=3, allow_unix=False) as tcp:
        yield {True: unix, False: tcp}


@ways
def test_large_messages_cross_both_ways_at_once(way: Way) -> None:
    big = torch.arange(3 * 2**20, dtype=torch.int32)
    with pair(**way.options) as made:
        for index in range(3):
            for rank in (0, 1):
                made.transports[rank].send(1 - rank, Message(0, task(index), (big,)))
        for rank in (0, 1):
            for index, event in enumerate(take(made.inboxes[rank], 3)):
                assert isinstance(event, MessageArrived)
                assert event.message.task == task(index)
                assert same_bits(event.message.tensors[0], big)


def test_delays_come_before_messages_and_keep_their_order() -> None:
    longest_s, num_messages = 0.02, 30
    with pair(delays=Delays(7, 0, longest_s)) as made:
        began_s = time.monotonic()
        for index in range(num_messages):
            made.transports[0].send(1, Message(0, task(index), ()))
        early = made.inboxes[1].take()
        assert len(early) < num_messages, "the link's thread waits, and not this one"
        events = [*early, *take(made.inboxes[1], num_messages - len(early))]
        # A fifth of what is expected; a seed's draws are always the same.
        assert time.monotonic() - began_s > num_messages * longest_s / 2 / 5
    arrived = [event.message.task for event in events if isinstance(event, MessageArrived)]
    assert arrived == [task(index) for index in range(num_messages)]


def test_delays_follow_seed_rank_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def first_three(delays: Delays, name: str) -> list[float]:
        slept.clear()
        delay = delays.sleeper(name)
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
            assert isinstance(event, MessageArrived)
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
            InputReported(0, 5, task(7, Kind.B)),
            TaskDecided(0, 5, 12, task(8, Kind.W)),
        ]
        for index in (1, 2):
            made.transports[1].consumed(0, 0)
            assert take(made.inboxes[1], 1) == [MessageArrived(0, Message(0, task(index), ()))]


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
        # Fewer new credits than a batch wait: the link holds `bound` messages without them.
        held = most if most - first >= 1 + bound // 8 else first
        assert bound <= held
        assert len(take(made.inboxes[1], held - first)) == held - first
        # The link keeps its order: a message beyond the bound would stand before or after this.
        made.transports[0].report(1, 0, task(0))
        assert take(made.inboxes[1], 1) == [InputReported(0, 0, task(0))]
        arrived = held
        for consumed in range(1, 61):
            made.transports[1].consumed(0, 0)
            # Credits come back some at a time, and never so late that the link holds too little.
            least = min(60, consumed + bound)
            if arrived < least:
                arrived += len(take(made.inboxes[1], least - arrived))
            assert least <= arrived <= consumed + most
        assert arrived == 60


def most_held(num_credits: int) -> int:
    """Return the most messages that a link holds which must hold at least `num_credits`."""
    return num_credits + num_credits // 8


def test_many_senders_at_once_lose_and_reorder_nothing() -> None:
    """The sending thread writes as much as the socket takes, and the link's thread the rest."""
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
                    if isinstance(event, MessageArrived):
                        made.transports[1].consumed(0, 0)
            for each in sending:
                each.result()
    messages = [event.message for event in events if isinstance(event, MessageArrived)]
    assert [message.task for message in messages] == [task(index) for index in range(num_each)]
    for index, message in enumerate(messages):
        assert message.tensors[0] is not None
        assert bool((message.tensors[0] == index).all())
    reports = [event.task.microbatch for event in events if isinstance(event, InputReported)]
    decisions = [event.position for event in events if isinstance(event, TaskDecided)]
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
        assert send[2:9] == (6, "F", 1, index, 1, index, 4 * (10 + index))
        assert receive[2:9] == (6, "F", 1, index, 0, index, 4 * (10 + index))
        assert send.start_ns < receive.start_ns <= receive.end_ns
        assert send.start_ns < send.end_ns


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


def test_two_transports_live_in_one_job() -> None:
    store = HashStore()

    def make(prefix: str, rank: int) -> tuple[SocketTransport, Inbox]:
        inbox = Inbox()
        links = ([1], []) if rank == 0 else ([], [0])
        return opened(
            SocketTransport(rank, store, *links, inbox, num_credits=1, prefix=prefix)
        ), inbox

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, ("a", "a", "b", "b"), (0, 1, 0, 1)))
        made[0][0].send(1, Message(1, task(0), ()))
        made[2][0].send(1, Message(2, task(0), ()))
        for index, step in ((1, 1), (3, 2)):
            assert take(made[index][1], 1) == [MessageArrived(0, Message(step, task(0), ()))]
        list(pool.map(SocketTransport.close, [transport for transport, _ in made]))


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


def test_messages_carry_tensors_of_some_devices() -> None:
    for device in ("cpu", "cuda"):
        check_device(torch.device(device))
    with pytest.raises(UsageError, match="on meta and messages carry CPU and CUDA tensors only"):
        check_device(torch.device("meta"))


def test_a_transport_that_is_not_open_has_started_nothing() -> None:
    threads = threading.enumerate()
    store = HashStore()
    transport = SocketTransport(0, store, [1], [1], Inbox(), num_credits=1)
    assert threading.enumerate() == threads
    assert store.num_keys() == HashStore().num_keys()
    transport.close()


# Peers that leave, break the protocol, fall silent or die: told once, with their rank.


@ways
def test_closing_delivers_what_is_queued_and_fails_nobody(way: Way) -> None:
    made = Pair(**way.options)
    big = torch.ones(2**20)
    for index in range(5):
        made.transports[0].send(1, Message(0, task(index), (big,)))
    made.transports[0].close()
    made.transports[0].close()
    events = take(made.inboxes[1], 6)
    assert [type(event) for event in events] == [MessageArrived] * 5 + [PeerLeft]
    made.transports[1].consumed(0, 0)
    made.transports[1].close()
    assert not made.inboxes[0].take()
    assert not made.inboxes[1].take()


def test_sending_to_a_rank_that_has_left_is_an_error() -> None:
    with pair() as made:
        made.transports[1].close()
        # It ended once rank 0's ends had answered its farewell.
        assert take(made.inboxes[0], 1) == [PeerLeft(1)]
        made.transports[0].send(1, Message(0, task(3), ()))
        assert "rank 1 has left" in str(failure(take(made.inboxes[0], 1)))


def test_a_farewell_with_messages_outstanding_is_an_error() -> None:
    with pair(num_credits=1) as made:
        for index in range(3):
            made.transports[0].send(1, Message(0, task(index), ()))
        assert len(take(made.inboxes[1], 1)) == 1
        made.transports[1].close()
        # The farewells of the two links come in either order.
        events = [event for event in take(made.inboxes[0], 2) if event != PeerLeft(1)]
        assert "rank 1 said farewell while 2 frames" in str(failure(events))


def test_a_rank_that_fails_leaves_without_a_farewell() -> None:
    with pair() as made:
        made.transports[1].close(farewell=False)
        errors = [
            event.error for event in take(made.inboxes[0], 2) if isinstance(event, LinkFailed)
        ]
        assert len(errors) == 2
        assert all(isinstance(error, PeerLostError) for error in errors)
        assert all("rank 1 closed its connection" in str(error) for error in errors)


@ways
def test_a_forked_process_does_not_keep_a_failed_rank_alive(way: Way) -> None:
    """A data loader's worker has the links of its parent open."""
    with pair(**way.options, silence_s=3600.0) as made:
        reader, writer = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        try:
            made.transports[0].close(farewell=False)
            for event in take(made.inboxes[1], 2):
                assert isinstance(event, LinkFailed)
                assert "rank 0 closed its connection" in str(event.error)
        finally:
            os.close(writer)
            os.close(reader)
            os.waitpid(worker, 0)


# Peers that break the protocol, and strangers.


@ways
def test_close_wakes_a_sender_without_credit(way: Way) -> None:
    with bare_peer("destination", way, close_s=0.1) as (transport, inbox, _):
        transport.send(1, Message(0, task(0), ()))
        transport.close()
        assert not inbox.take()


@ways
def test_close_wakes_a_sender_with_a_full_socket(way: Way) -> None:
    with bare_peer("destination", way, close_s=0.1) as (transport, inbox, raw):
        raw.sendall(encode_header(Header(Purpose.CREDIT, number=1)))
        transport.send(1, Message(0, task(0), (torch.ones(2**24),)))
        assert raw.recv(4) == b"RRFP"
        transport.close()
        assert not inbox.take()


@pytest.mark.parametrize(
    ("role", "data", "complaint"),
    [
        ("source", message_bytes(1), "message 1 came where 0 was due"),
        ("source", message_bytes(0) + message_bytes(1), "beyond 1 credits"),
        ("source", encode_header(Header(Purpose.CREDIT, number=1)), "a source sent a credit"),
        ("destination", message_bytes(0), "a destination sent a message"),
    ],
)
def test_a_violation_of_the_protocol_is_reported_with_its_rank(
    role: str, data: bytes, complaint: str
) -> None:
    with bare_peer(role) as (_, inbox, raw):
        if role == "source":
            # Its one credit: from now on the message is within the bound.
            assert raw.recv(60, socket.MSG_WAITALL)
        raw.sendall(data)
        (error,) = [event.error for event in take(inbox, 1) if isinstance(event, LinkFailed)] or [
            failure(take(inbox, 1))
        ]
        assert "what rank 1 sent to rank 0 cannot be read" in str(error)
        assert complaint in str(error)


@pytest.mark.parametrize("role", ["source", "destination"])
def test_what_is_garbled_breaks_the_connection(role: str) -> None:
    with bare_peer(role) as (_, inbox, raw):
        raw.sendall(b"x" * 60)
        error = failure(take(inbox, 1))
        # It could not be made again.
        assert isinstance(error, PeerLostError)
        assert "rank 1 sent what came garbled (the header of a frame has checksum" in str(error)


@pytest.mark.parametrize("role", ["source", "destination"])
@ways
def test_an_end_of_file_in_mid_frame_is_a_loss(role: str, way: Way) -> None:
    with bare_peer(role, way) as (_, inbox, raw):
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


# Two processes.


def make_in_process(rank: int, inbox: Inbox, port: int, **options: float) -> SocketTransport:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return opened(
        SocketTransport(
            rank,
            store,
            [1 - rank],
            [1 - rank],
            inbox,
            num_credits=2,
            **options,  # type: ignore[arg-type]
        )
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
    return [str(event.error) for event in events if isinstance(event, LinkFailed)]


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


def exchange_with_other_rank(way: Way) -> list[str]:
    """Send random messages to the other rank and compare what it sends, which is the same."""
    rank, inbox = int(os.environ["RANK"]), Inbox()
    transport = make_in_process(rank, inbox, int(os.environ["MASTER_PORT"]), **way.options)
    generator = torch.Generator().manual_seed(1)
    sent = [torch.randn(index * 1000, 3, generator=generator) for index in range(40)]
    for index, tensor in enumerate(sent):
        transport.send(1 - rank, Message(0, task(index), (tensor, None)))
    wrong: list[str] = []
    num_received = 0
    while num_received < len(sent):
        for event in take(inbox, 1):
            if isinstance(event, PeerLeft):
                continue  # The other rank has all it needs, and may close before this one.
            if not isinstance(event, MessageArrived):
                return [repr(event)]
            (tensor_received, nothing) = event.message.tensors
            right = same_bits(tensor_received, sent[num_received]) and nothing is None
            if event.message.task != task(num_received) or not right:
                wrong.append(f"message {num_received}")
            num_received += 1
            transport.consumed(1 - rank, 0)
    transport.close()
    wrong += [repr(event) for event in inbox.take() if not isinstance(event, PeerLeft)]
    return wrong


@ways
def test_two_processes_exchange_messages(way: Way) -> None:
    assert run_ranks(2, exchange_with_other_rank, way, timeout_s=40) == [[], []]


# Links obey what `rrfp chaos` orders them, and outlive it.


def test_without_the_variable_a_socket_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.FAULTS, raising=False)
    one, other = socket.socketpair()
    with one, other:
        assert with_faults(one, 0, 1) is one


def sent(made: Pair, index: int) -> torch.Tensor:
    """Send a message, and return the tensor that arrives."""
    made.transports[0].send(1, Message(0, task(index), (torch.full((1000,), float(index)),)))
    (event,) = take(made.inboxes[1], 1)
    assert isinstance(event, MessageArrived)
    made.transports[1].consumed(0, 0)
    (tensor,) = event.message.tensors
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("link", ["0-1", "1-0"], ids=["sender", "receiver"])
@pytest.mark.parametrize(
    ("fault", "number"), [(LinkFault.DROP, 0), (LinkFault.DELAY, 0.5), (LinkFault.CORRUPT, 77)]
)
def test_a_link_obeys_and_goes_on(
    fault: LinkFault, number: float, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(variables.FAULTS, str(orders))
    with pair(heartbeat_s=0.1) as made:
        assert list_links(orders) == ["0-1", "1-0"]
        assert sent(made, 1).eq(1).all()
        pending = order_fault(orders, link, fault, number)
        deadline_s = time.monotonic() + PATIENCE_S
        # A heartbeat is enough.
        while pending.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for index in range(2, 6):
            assert sent(made, index).eq(index).all()
        assert not [*made.inboxes[0].take(), *made.inboxes[1].take()]


def test_a_delayed_link_takes_nothing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(variables.FAULTS, str(orders))
    with pair(heartbeat_s=0.1) as made:
        # Two links lead from the receiver to the sender's rank, and each order is obeyed by one.
        begun_s = time.monotonic()
        for _ in range(2):
            pending = order_fault(orders, "1-0", LinkFault.DELAY, 1.0)
            while pending.exists():
                time.sleep(0.01)
        assert sent(made, 1).eq(1).all()
        assert time.monotonic() - begun_s >= 1.0


# Messages of a paced run: each stays on its link for its modeled time, and nothing else does.


MS = 1_000_000


def message(microbatch: int, latency_ms: float, size: int = 4) -> Message:
    tensors = (torch.full((size,), float(microbatch)),)
    return Message(0, Task(1, Kind.F, microbatch), tensors, int(latency_ms * MS))


def test_messages_take_their_time_one_after_the_other() -> None:
    latencies_ms = [30.0, 0.4, 12.7, 0.0, 25.0]
    came_ns: list[int] = []
    with pair() as made:
        made.inboxes[1].watch(lambda _: came_ns.append(time.monotonic_ns()))
        sent_ns = time.monotonic_ns()
        for microbatch, latency_ms in enumerate(latencies_ms):
            made.transports[0].send(1, message(microbatch, latency_ms))
        events = take(made.inboxes[1], len(latencies_ms))
        due_ms = 0.0
        for microbatch, (event, latency_ms) in enumerate(zip(events, latencies_ms, strict=True)):
            assert isinstance(event, MessageArrived)
            assert event.message.task.microbatch == microbatch
            assert event.message.tensors[0] is not None
            assert event.message.tensors[0].tolist() == [microbatch] * 4
            due_ms += latency_ms
            assert (came_ns[microbatch] - sent_ns) / MS >= due_ms
    sends = [record for record in made.records[0] if isinstance(record, SendRecord)]
    assert len(sends) == len(latencies_ms)
    for send, latency_ms in zip(sends, latencies_ms, strict=True):
        assert send.end_ns - send.start_ns >= latency_ms * MS
    for send, following in pairwise(sends):
        assert send.end_ns <= following.start_ns


def test_time_passes_on_a_link_while_nothing_is_asked_of_it() -> None:
    """A message that is queued on a free link counts from then, not from the one before."""
    with pair() as made:
        made.transports[0].send(1, message(0, 1))
        take(made.inboxes[1], 1)
        time.sleep(0.05)
        sent_ns = time.monotonic_ns()
        made.transports[0].send(1, message(1, 40))
        take(made.inboxes[1], 1)
        assert time.monotonic_ns() - sent_ns >= 40 * MS


def test_reports_overtake_what_is_held_back() -> None:
    with pair() as made:
        made.transports[0].send(1, message(0, 600))
        time.sleep(0.02)
        made.transports[0].report(1, 0, Task(1, Kind.B, 3))
        (event,) = take(made.inboxes[1], 1)
        assert isinstance(event, InputReported)
        (event,) = take(made.inboxes[1], 1)
        assert isinstance(event, MessageArrived)


def test_reports_that_the_links_thread_writes_overtake_what_is_held_back() -> None:
    with pair() as made:
        made.transports[0].send(1, message(0, 900))
        with made.transports[0]._outgoing[1].driver._write_lock:
            for microbatch in range(3):
                made.transports[0].report(1, 0, Task(1, Kind.B, microbatch))
        events = take(made.inboxes[1], 3)
        assert all(isinstance(event, InputReported) for event in events)
        take(made.inboxes[1], 1)


def test_a_link_that_holds_a_message_back_is_not_silent() -> None:
    """Heartbeats go on, so that the peer does not take this rank for lost."""
    with pair(heartbeat_s=0.05, silence_s=0.6) as made:
        made.transports[0].send(1, message(0, 900))
        (event,) = take(made.inboxes[1], 1)
        assert isinstance(event, MessageArrived)


def test_closing_sends_what_is_held_back() -> None:
    with pair() as made:
        made.transports[0].send(1, message(0, 60, size=100_000))
        with ThreadPoolExecutor(2) as pool:
            closing = pool.submit(made.transports[0].close)
            event = take(made.inboxes[1], 1)[0]
            assert isinstance(event, MessageArrived)
            made.transports[1].close()
            closing.result()
