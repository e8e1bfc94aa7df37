"""Overhead of paced links: lateness of messages beyond the modelled times, and processor time of a
saturated link: `pytest benchmarks/bench_paced_links.py`."""

import time
from statistics import median

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from rrfp.runtime.protocols import Message
from rrfp.schedule.tasks import Kind, Task
from tests.runtime.link_pairs import pair, take

LATENCY_NS = 5_000_000
NUM_MESSAGES = 20


def message(microbatch: int, latency_ns: int, size: int = 4) -> Message:
    return Message(0, Task(1, Kind.F, microbatch), (torch.zeros(size),), latency_ns)


def test_lateness_of_a_message_of_5_ms(benchmark: BenchmarkFixture) -> None:
    late_s = []
    with pair() as made:

        def there() -> None:
            sent_ns = time.monotonic_ns()
            made.transports[0].send(1, message(0, LATENCY_NS))
            assert len(take(made.inboxes[1], 1)) == 1
            made.transports[1].consumed(0, 0)
            late_s.append((time.monotonic_ns() - sent_ns - LATENCY_NS) / 1e9)

        benchmark.pedantic(  # type: ignore[no-untyped-call]
            there, rounds=NUM_MESSAGES, iterations=1
        )
    benchmark.extra_info["median_lateness_s"] = median(late_s)
    print(f"median lateness {median(late_s) * 1e6:.0f} us")


def test_a_full_link_is_not_polled_without_end(benchmark: BenchmarkFixture) -> None:
    """A large message under way, and a held one behind it: the thread waits for the socket."""
    used_s = []

    def fill() -> None:
        with pair() as made:
            began_s = time.process_time()
            made.transports[0].send(1, message(0, 100_000, size=4_000_000))
            made.transports[0].send(1, message(1, 300_000_000))
            assert len(take(made.inboxes[1], 2)) == 2
            used_s.append(time.process_time() - began_s)

    benchmark.pedantic(fill, rounds=3, iterations=1)  # type: ignore[no-untyped-call]
    assert max(used_s) < 0.25, "the link's thread was busy while nothing could be sent"
    print(f"processor time {max(used_s) * 1e3:.0f} ms in 300 ms")
