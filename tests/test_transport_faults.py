"""Peers that leave, break the protocol, fall silent or die: told once, with their rank."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.context import SpawnProcess

import pytest
import torch
from torch.distributed import TCPStore

from rrfp.runtime.link.wire import Header, Purpose, encode_header
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Arrived, Failed, Inbox, Left, Message, PeerLostError
from tests.link_pairs import (
    PATIENCE_S,
    Pair,
    Way,
    bare_peer,
    failure,
    message_bytes,
    nothing_left,
    opened,
    pair,
    take,
    task,
    ways,
)
from tests.ranks import loopback_store, run_ranks
from tests.test_wire import same_bits

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield


@ways
def test_closing_delivers_what_is_queued_and_fails_nobody(way: Way) -> None:
    made = Pair(**way.options)
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
                assert isinstance(event, Failed)
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
def test_what_breaks_the_protocol_is_told_with_its_rank(
    role: str, data: bytes, complaint: str
) -> None:
    with bare_peer(role) as (_, inbox, raw):
        if role == "source":
            # Its one credit: from now on the message is within the bound.
            assert raw.recv(60, socket.MSG_WAITALL)
        raw.sendall(data)
        (error,) = [event.error for event in take(inbox, 1) if isinstance(event, Failed)] or [
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


@ways
def test_two_processes_exchange_messages(way: Way) -> None:
    assert run_ranks(2, exchange_with_other_rank, way, timeout_s=40) == [[], []]
