"""The socket transport: order and bits kept, credits bound, deaths told, nothing left behind."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from rrfp.errors import UsageError
from rrfp.runtime.net.transport import SocketTransport, transport_maker
from rrfp.runtime.pace import Delays
from rrfp.runtime.protocols import (
    Arrived,
    Decided,
    Event,
    Inbox,
    Message,
    PeerLostError,
    Reported,
    Transport,
)
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import ReceiveRecord, SendRecord
from tests.link_pairs import (
    Pair,
    Way,
    lone_rank,
    nothing_left,
    opened,
    pair,
    take,
    task,
    ways,
)
from tests.test_wire import same_bits, tensors

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
        assert isinstance(event, Arrived)
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
                assert isinstance(event, Arrived)
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
            assert take(made[index][1], 1) == [Arrived(0, Message(step, task(0), ()))]
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


def test_the_device_chooses_the_transport() -> None:
    for device in ("cpu", "cuda"):
        assert transport_maker(torch.device(device)) is SocketTransport
    with pytest.raises(UsageError, match="on meta and messages carry CPU and CUDA tensors only"):
        transport_maker(torch.device("meta"))


def test_a_transport_that_is_not_open_has_started_nothing() -> None:
    threads = threading.enumerate()
    store = HashStore()
    transport = SocketTransport(0, store, [1], [1], Inbox(), num_credits=1)
    assert threading.enumerate() == threads
    assert store.num_keys() == HashStore().num_keys()
    transport.close()
