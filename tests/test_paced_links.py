"""Messages of a paced run: each stays on its link for its modelled time, and nothing else does."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from rrfp.runtime.protocols import Arrived, Message, Reported
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import SendRecord
from tests.link_pairs import pair, take

MS = 1_000_000

pytestmark = pytest.mark.timeout(60)


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
            assert isinstance(event, Arrived)
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
        assert isinstance(event, Reported)
        (event,) = take(made.inboxes[1], 1)
        assert isinstance(event, Arrived)


def test_reports_that_the_links_thread_writes_overtake_what_is_held_back() -> None:
    with pair() as made:
        made.transports[0].send(1, message(0, 900))
        with made.transports[0]._destinations[1]._write_lock:
            for microbatch in range(3):
                made.transports[0].report(1, 0, Task(1, Kind.B, microbatch))
        events = take(made.inboxes[1], 3)
        assert all(isinstance(event, Reported) for event in events)
        take(made.inboxes[1], 1)


def test_a_link_that_holds_a_message_back_is_not_silent() -> None:
    """Heartbeats go on, so that the peer does not take this rank for lost."""
    with pair(heartbeat_s=0.05, silence_s=0.6) as made:
        made.transports[0].send(1, message(0, 900))
        (event,) = take(made.inboxes[1], 1)
        assert isinstance(event, Arrived)


def test_closing_sends_what_is_held_back() -> None:
    with pair() as made:
        made.transports[0].send(1, message(0, 60, size=100_000))
        with ThreadPoolExecutor(2) as pool:
            closing = pool.submit(made.transports[0].close)
            event = take(made.inboxes[1], 1)[0]
            assert isinstance(event, Arrived)
            made.transports[1].close()
            closing.result()
