"""Links whose connections break: they reconnect, and nothing is lost or duplicated. A link that
cannot reconnect is reported with both its ends."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from rrfp.runtime.device.interface import CPU
from rrfp.runtime.link.channel import MAX_USELESS, State
from rrfp.runtime.link.wire import Purpose
from rrfp.runtime.net.connecting import PeerAddress
from rrfp.runtime.net.transport import SocketTransport, Wrap
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import (
    InputReported,
    LinkFailed,
    Message,
    MessageArrived,
    PeerLeft,
    PeerLostError,
)
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import ReceiveRecord, SendRecord
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, RankRun, train_variant
from tests.runtime.link_pairs import (
    PATIENCE_S,
    Pair,
    Way,
    failure,
    nothing_left,
    pair,
    take,
    task,
    ways,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield


class Wires:
    """The connected sockets of some transports, which can be cut at any time."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, socket.socket]] = []
        """Rank, peer and socket of each connection."""

    def wrap(self, connection: socket.socket, rank: int, peer: int) -> socket.socket:
        self.made.append((rank, peer, connection))
        return connection

    def cut(self, choose: Callable[[list[socket.socket]], list[socket.socket]] = list) -> int:
        """Shut some down, by default all, at any point of a frame; return their number."""
        alive = [made for _, _, made in self.made if made.fileno() >= 0]
        chosen = choose(alive)
        for each in chosen:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return len(chosen)


def exchanged(
    made: Pair,
    num_messages: int,
    disturb: Callable[[int], None],
    sizes: Sequence[int] = (0, 3, 1000, 200_000, 3_000_000),
) -> None:
    """Messages of many sizes and announcements go both ways, and all arrive once, in order."""
    draws = random.Random(5)
    tensors = [
        torch.full((draws.choice(sizes),), index % 251, dtype=torch.uint8)
        for index in range(num_messages)
    ]

    def send(rank: int) -> None:
        for index, tensor in enumerate(tensors):
            made.transports[rank].send(1 - rank, Message(3, task(index), (tensor,)))
            made.transports[rank].report(1 - rank, 3, task(index, Kind.B))
            if rank == 0:
                disturb(index)

    def receive(rank: int) -> tuple[list[MessageArrived], list[InputReported]]:
        messages: list[MessageArrived] = []
        reports: list[InputReported] = []
        while len(messages) < num_messages or len(reports) < num_messages:
            events = take(made.inboxes[rank], 1)
            assert events, "nothing came"
            for event in events:
                assert isinstance(event, MessageArrived | InputReported), event
                if isinstance(event, InputReported):
                    reports.append(event)
                    continue
                messages.append(event)
                made.transports[rank].consumed(1 - rank, 3)
        return messages, reports

    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send, rank) for rank in (0, 1)]
        receiving = [pool.submit(receive, rank) for rank in (0, 1)]
        for each in sending:
            each.result(60)
        for messages, reports in [each.result(60) for each in receiving]:
            assert [event.message.task for event in messages] == [
                task(index) for index in range(num_messages)
            ]
            assert [event.task for event in reports] == [
                task(index, Kind.B) for index in range(num_messages)
            ]
            for event, tensor in zip(messages, tensors, strict=True):
                (came,) = event.message.tensors
                assert came is not None
                assert torch.equal(came, tensor)


def check_nothing_else_came(made: Pair, num_messages: int) -> None:
    events = [event for inbox in made.inboxes for event in inbox.take()]
    assert not [event for event in events if not isinstance(event, PeerLeft)]
    for records in made.records:
        for kind in (SendRecord, ReceiveRecord):
            sequences = [record.sequence for record in records if isinstance(record, kind)]
            assert sequences == list(range(num_messages))


def cutting(wires: Wires, seed: int) -> Callable[[int], None]:
    """Cuts one connection or two now and then."""
    draws = random.Random(seed)

    def disturb(index: int) -> None:
        if index % 6 == 5:
            wires.cut(lambda alive: draws.sample(alive, min(2, len(alive))))
            time.sleep(0.05)

    return disturb


@ways
def test_nothing_is_lost_or_doubled_when_connections_are_cut(way: Way) -> None:
    wires = Wires()
    with pair(**way.options, wrap=wires.wrap, num_credits=5) as made:
        exchanged(made, 60, cutting(wires, 7))
        assert len(wires.made) > 8, "no connection was made again"
    check_nothing_else_came(made, 60)


@pytest.mark.parametrize("plane", [TransportName.SHM, TransportName.BOUNCE])
def test_no_slot_is_pulled_or_released_twice(plane: TransportName) -> None:
    wires = Wires()

    def make_planes() -> RankPlanes:
        return RankPlanes(CPU, plane, 48 * 2**20)

    with pair(make_planes=make_planes, wrap=wires.wrap, num_credits=5) as made:
        exchanged(made, 40, cutting(wires, 3), sizes=(4 * 2**20, 5 * 2**20))
        assert len(wires.made) > 8, "no connection was made again"
        # Slots are free once all that was received is gone.
        deadline_s = time.monotonic() + PATIENCE_S
        while any(outbox.used_bytes for own in made.outboxes for outbox in own):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    check_nothing_else_came(made, 40)


def test_a_rank_that_closes_drains_its_links_over_a_cut() -> None:
    for seed in range(12):
        wires = Wires()
        made = Pair(wrap=wires.wrap, allow_unix=seed % 2 == 0)
        for index in range(3):
            made.transports[0].send(1, Message(0, task(index), (torch.ones(2**18),)))
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(made.transports[0].close)
            time.sleep(random.Random(seed).random() * 0.004)
            wires.cut()
            events = take(made.inboxes[1], 3)
            made.transports[1].close()
            closing.result(PATIENCE_S)
        arrived = [event.message.task for event in events if isinstance(event, MessageArrived)]
        assert arrived == [task(index) for index in range(3)]
        assert not [
            event for event in [*events, *made.inboxes[1].take()] if isinstance(event, LinkFailed)
        ]


def test_a_cut_while_both_ends_close_fails_nobody() -> None:
    for seed in range(12):
        wires = Wires()
        made = Pair(wrap=wires.wrap, allow_unix=seed % 2 == 0)
        sender, receiver = made.transports
        sender.send(1, Message(0, task(0), (torch.ones(2**18),)))
        with ThreadPoolExecutor(2) as pool:
            closing = [pool.submit(sender.close)]
            # A receiver that leaves while the sender still works would rightly fail it.
            while sender._outgoing[1].driver._endpoint.channel.state is State.OPEN:
                time.sleep(0.0001)
            closing.append(pool.submit(receiver.close))
            time.sleep(random.Random(seed).random() * 0.004)
            wires.cut()
            for each in closing:
                each.result(PATIENCE_S)
        for inbox in made.inboxes:
            assert not [event for event in inbox.take() if isinstance(event, LinkFailed)]


# What is garbled.


class Garbling:
    """A socket that flips a bit of the bytes for which `is_to_flip` returns True."""

    def __init__(self, connection: socket.socket, is_to_flip: Callable[[bytes], bool]) -> None:
        self._connection = connection
        self._is_to_flip = is_to_flip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendmsg(self, buffers: list[memoryview]) -> int:
        data = b"".join(buffers)
        if self._is_to_flip(data):
            data = data[:20] + bytes([data[20] ^ 4]) + data[21:]
        return self._connection.send(data)


def garbling(is_to_flip: Callable[[bytes], bool]) -> Wrap:
    def wrap(connection: socket.socket, rank: int, peer: int) -> socket.socket:
        return Garbling(connection, is_to_flip)  # type: ignore[return-value]

    return wrap


def is_message(data: bytes) -> bool:
    return data[5:6] == bytes([Purpose.MESSAGE])


@ways
def test_what_was_garbled_is_sent_again(way: Way) -> None:
    counts = {"sent": 0, "garbled": 0}

    def is_to_flip(data: bytes) -> bool:
        counts["sent"] += is_message(data)
        flips = is_message(data) and counts["sent"] % 7 == 3
        counts["garbled"] += flips
        return flips

    with pair(**way.options, wrap=garbling(is_to_flip), num_credits=5) as made:
        exchanged(made, 30, lambda _: None)
        assert counts["garbled"] > 3
    check_nothing_else_came(made, 30)


def test_a_link_that_garbles_everything_is_reported_with_both_its_ends() -> None:
    with pair(allow_unix=False, address="127.0.0.1", wrap=garbling(is_message)) as made:
        made.transports[0].send(1, Message(0, task(0), ()))
        told = str(failure(take(made.inboxes[1], 1)))
    assert told.startswith(
        f"the link from rank 0 (127.0.0.1) to rank 1 (127.0.0.1) broke {MAX_USELESS} times in a"
        " row and carried nothing between (the last time rank 0 sent what came garbled (the header"
    )


# What cannot be made again.


def test_a_link_that_stays_down_is_reported_with_both_its_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wires = Wires()
    options = {"silence_s": 1.0, "heartbeat_s": 0.1, "address": "127.0.0.1"}
    with pair(allow_unix=False, wrap=wires.wrap, **options) as made:

        def nobody_answers(*_: object) -> socket.socket:
            time.sleep(0.05)
            raise TimeoutError("timed out")

        monkeypatch.setattr(PeerAddress, "_connect", nobody_answers)
        wires.cut()
        told = [str(event.error) for event in failures(made, 4)]
    links = {
        f"the link from rank {rank} (127.0.0.1) to rank {1 - rank} (127.0.0.1) has been down for"
        for rank in (0, 1)
    }
    assert [sum(each.startswith(link) for each in told) for link in links] == [2, 2]
    assert all("whether 127.0.0.1 can be reached" in each for each in told)
    assert any("timed out" in each for each in told)


def failures(made: Pair, num_failures: int) -> list[LinkFailed]:
    events = [event for inbox in made.inboxes for event in take(inbox, num_failures // 2)]
    failed = [event for event in events if isinstance(event, LinkFailed)]
    assert len(failed) == num_failures
    assert all(isinstance(event.error, PeerLostError) for event in failed)
    return failed


def test_a_wire_that_carries_nothing_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end is notified that a connection between hosts is dead: its source dials again."""
    wires = Wires()

    class Mute(Garbling):
        def sendmsg(self, buffers: list[memoryview]) -> int:
            return sum(map(len, buffers)) if mute.is_set() else self._connection.sendmsg(buffers)

    mute = threading.Event()

    def wrap(connection: socket.socket, rank: int, peer: int) -> socket.socket:
        wires.wrap(connection, rank, peer)
        first = len(wires.made) <= 4
        return Mute(connection, is_message) if first else connection  # type: ignore[return-value]

    with pair(allow_unix=False, wrap=wrap, silence_s=2.0, heartbeat_s=0.1) as made:
        made.transports[0].send(1, Message(0, task(0), ()))
        assert take(made.inboxes[1], 1) == [MessageArrived(0, Message(0, task(0), ()))]
        mute.set()
        made.transports[0].send(1, Message(0, task(1), ()))
        assert take(made.inboxes[1], 1) == [MessageArrived(0, Message(0, task(1), ()))]


def test_strangers_do_not_keep_a_link_from_being_made_again() -> None:
    wires = Wires()
    with pair(allow_unix=False, address="127.0.0.1", wrap=wires.wrap) as made:
        listener = made.transports[1]._listener
        assert listener is not None
        port = listener.address.tcp
        assert port is not None
        threads, strangers = threading.active_count(), []
        try:
            for index in range(300):
                strangers.append(socket.create_connection((port.host, port.port), PATIENCE_S))
                if index % 3 == 0:
                    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert threading.active_count() < threads + 100
            wires.cut()
            made.transports[0].send(1, Message(0, task(0), ()))
            assert take(made.inboxes[1], 1) == [MessageArrived(0, Message(0, task(0), ()))]
        finally:
            for stranger in strangers:
                stranger.close()


# Training.


MOST_CUTS = 20
"""Most cuts of a rank's links, so that a training on a slow machine ends."""


def train_beside_cuts(
    settings: dict[str, Any], variants: list[dict[str, Any]], allow_unix: bool
) -> tuple[list[RankRun], list[RankRun], int]:
    """Train on this rank as it is, and once more while some of its connections are cut; with how
    many were made in all."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron.pipeline import Pipeline
    from rrfp.train.launch.process_groups import parallel_groups

    wires, is_over = Wires(), threading.Event()
    draws = random.Random(int(os.environ["RANK"]))

    def cut() -> None:
        num_cuts = 0
        while num_cuts < MOST_CUTS and not is_over.wait(0.03 + 0.07 * draws.random()):
            num_cuts += wires.cut(lambda alive: [draws.choice(alive)] if alive else [])

    cutting = threading.Thread(target=cut)
    chosen = [TrainSettings(**{**settings, **variant}) for variant in variants]
    with parallel_groups(chosen[0]) as layout:
        calm = [train_variant(variant, layout) for variant in chosen]
        make = partial(SocketTransport, wrap=wires.wrap, allow_unix=allow_unix)
        Pipeline.transport = make
        cutting.start()
        try:
            return calm, [train_variant(variant, layout) for variant in chosen], len(wires.made)
        finally:
            is_over.set()
            cutting.join()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("pp", "allow_unix"),
    [
        (2, True),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_a_training_whose_connections_are_cut_is_the_same(pp: int, allow_unix: bool) -> None:
    dispatches = ["ready", "fixed"] if pp == 4 else ["ready"]
    settings = {**SMALL, "pp": pp, "steps": 6}
    variants = [{"dispatch": each} for each in dispatches]
    ranks = run_ranks(pp, train_beside_cuts, settings, variants, allow_unix, timeout_s=300)
    num_ends = 4 * (pp - 1) * len(variants)
    assert sum(num_made for *_, num_made in ranks) > num_ends + 4, "no connection was made again"
    for calm, cut, _ in ranks:
        for before, after in zip(calm, cut, strict=True):
            assert before.losses == after.losses
            assert before.grad_norms == after.grad_norms
            assert before.parameters_sha256 == after.parameters_sha256
