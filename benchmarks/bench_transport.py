"""How fast the transport is between processes, by sockets and data planes:
`pytest benchmarks/bench_transport.py`.

Each round is there and back, so that one clock measures it; halve a round for the one-way latency.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed import Store, TCPStore

from rrfp.runtime.net.transport import SocketTransport, make_planes
from rrfp.runtime.planes.registry import DEFAULT_OUTBOX_MB, TransportName
from rrfp.runtime.protocols import (
    Event,
    Inbox,
    InputReported,
    LinkFailed,
    Message,
    MessageArrived,
    TaskDecided,
)
from rrfp.schedule.tasks import Kind, Task
from tests.runtime.link_pairs import needs_nixl, needs_tls

TASK = Task(1, Kind.F, 0)
NUM_STREAMED = 16


def make(rank: int, num_ranks: int, store: Store, inbox: Inbox, way: str) -> SocketTransport:
    """A star around rank 0. `way` is a data plane, tcp, or tls."""
    peers = [peer for peer in range(num_ranks) if peer != rank] if rank == 0 else [0]
    is_far = way in ("tcp", "tls")
    plane = TransportName.INLINE if is_far else TransportName(way)
    transport = SocketTransport(
        rank,
        store,
        peers,
        peers,
        inbox,
        num_credits=NUM_STREAMED,
        allow_unix=not is_far,
        planes=make_planes(torch.device("cpu"), plane, DEFAULT_OUTBOX_MB),
        tls=way == "tls",
    )
    transport.open()
    return transport


def wait_for(inbox: Inbox, num_events: int) -> list[Event]:
    events: list[Event] = []
    while len(events) < num_events:
        arrived = inbox.take(10.0)
        assert arrived, "nothing arrived for 10 s"
        for event in arrived:
            if isinstance(event, LinkFailed):
                raise event.error
        events.extend(arrived)
    return events


def serve(rank: int, num_ranks: int, port: int, way: str) -> None:
    """Send every microbatch 0 back, answer the last of a stream, report after each decision."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    inbox = Inbox()
    transport = make(rank, num_ranks, store, inbox, way)
    while True:
        for event in inbox.take(30.0):
            match event:
                case MessageArrived(_, message):
                    transport.consumed(0, message.step)
                    if message.task.microbatch == 0:
                        transport.send(0, message)
                    elif message.task.microbatch == NUM_STREAMED:
                        transport.send(0, Message(message.step, TASK, ()))
                case TaskDecided(step=step, task=task):
                    transport.report(0, step, task)
                case LinkFailed():
                    return


@contextmanager
def star(num_ranks: int, way: str = "inline") -> Iterator[tuple[SocketTransport, Inbox]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    others: list[SpawnProcess] = [
        context.Process(target=serve, args=(rank, num_ranks, server.port, way), daemon=True)
        for rank in range(1, num_ranks)
    ]
    for other in others:
        other.start()
    inbox = Inbox()
    try:
        transport = make(0, num_ranks, server, inbox, way)
        yield transport, inbox
        transport.close(farewell=False)
    finally:
        for other in others:
            other.join(10.0)
            other.kill()
            other.join()


def measure(benchmark: BenchmarkFixture, function: Callable[[], None], *, num_rounds: int) -> None:
    # pytest-benchmark annotates only a part of itself.
    benchmark.pedantic(function, rounds=num_rounds, warmup_rounds=5)  # type: ignore[no-untyped-call]


@pytest.fixture(
    scope="module",
    params=[
        *("inline", "tcp", "shm"),
        pytest.param("tls", marks=needs_tls),
        pytest.param("nixl", marks=needs_nixl),
    ],
)
def link(request: pytest.FixtureRequest) -> Iterator[tuple[SocketTransport, Inbox]]:
    with star(2, request.param) as made:
        yield made


@pytest.mark.parametrize("num_bytes", [0, 64 * 1024, 2**20, 16_000_000])
def test_there_and_back(
    benchmark: BenchmarkFixture, link: tuple[SocketTransport, Inbox], num_bytes: int
) -> None:
    transport, inbox = link
    message = Message(0, TASK, (torch.ones(num_bytes // 2, dtype=torch.bfloat16),))

    def there_and_back() -> None:
        transport.send(1, message)
        wait_for(inbox, 1)
        transport.consumed(1, 0)

    measure(benchmark, there_and_back, num_rounds=1000 if num_bytes < 2**20 else 200)


@pytest.mark.parametrize("num_tensors", [1, NUM_STREAMED])
def test_stream_of_16_messages_of_16_mb(
    benchmark: BenchmarkFixture, link: tuple[SocketTransport, Inbox], num_tensors: int
) -> None:
    """With one tensor, caches serve a part of the reads; different tensors come from memory."""
    transport, inbox = link
    tensors = [torch.ones(16_000_000, dtype=torch.uint8) for _ in range(num_tensors)]

    def stream() -> None:
        for microbatch in range(1, NUM_STREAMED + 1):
            big = tensors[microbatch % num_tensors]
            transport.send(1, Message(0, TASK._replace(microbatch=microbatch), (big,)))
        wait_for(inbox, 1)
        transport.consumed(1, 0)

    measure(benchmark, stream, num_rounds=40)
    assert benchmark.stats is not None
    num_bytes = NUM_STREAMED * tensors[0].nbytes
    benchmark.extra_info["gb_per_s"] = num_bytes / benchmark.stats["median"] / 1e9


def test_decide_and_report_of_4_ranks(benchmark: BenchmarkFixture) -> None:
    with star(4) as (transport, inbox):

        def agree() -> None:
            for peer in (1, 2, 3):
                transport.decide(peer, 0, 0, TASK)
            assert all(isinstance(event, InputReported) for event in wait_for(inbox, 3))

        measure(benchmark, agree, num_rounds=1000)
