"""The transport in memory: a test decides when time passes, what is late, and what breaks."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
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
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task, parse_task
from rrfp.trace.records import (
    NS_PER_S,
    ReceiveRecord,
    Record,
    SendRecord,
    TaskRecord,
    evaluation_step,
)
from tests.doubles.memory_transport import CLOSE_NS, SILENCE_NS, MemoryNetwork, MemoryTransport
from tests.runtime.link_pairs import task
from tests.runtime.rank_rig import RankRig, Work, run_in_memory
from tests.runtime.test_protocol import same_bits, tensors

SOON_NS = NS_PER_S // 10


class Ranks:
    """Ranks of a network, each linked with all others, both ways."""

    def __init__(self, network: MemoryNetwork, num_ranks: int = 2, num_credits: int = 100) -> None:
        self.network = network
        self.inboxes = [Inbox() for _ in range(num_ranks)]
        self.records: list[list[Record]] = [[] for _ in range(num_ranks)]
        self.transports = []
        for rank, inbox in enumerate(self.inboxes):
            others = [peer for peer in range(num_ranks) if peer != rank]
            transport = MemoryTransport(
                network,
                rank,
                others,
                others,
                inbox,
                num_credits=num_credits,
                record=self.records[rank].append,
            )
            transport.open()
            self.transports.append(transport)

    def events_after(self, rank: int, after_ns: int = SOON_NS) -> Sequence[Event]:
        """Let time pass, and return the events of a rank."""
        self.network.run_for(after_ns)
        return self.inboxes[rank].take()

    def failures(self, rank: int, after_ns: int = SOON_NS) -> list[str]:
        events = self.events_after(rank, after_ns)
        assert all(isinstance(event, LinkFailed) for event in events)
        return [str(event.error) for event in events if isinstance(event, LinkFailed)]


def message(index: int) -> Message:
    return Message(0, task(index), ())


def test_it_is_a_transport() -> None:
    transport: Transport = Ranks(MemoryNetwork()).transports[0]
    with pytest.raises(UsageError, match="rank 0 does not send to rank 5"):
        transport.send(5, message(0))
    with pytest.raises(UsageError, match="rank 0 does not receive from rank 5"):
        transport.consumed(5, 0)


@given(seed=st.integers(0, 100), messages=st.lists(st.lists(tensors(), max_size=3), max_size=8))
def test_messages_arrive_in_order_and_bit_for_bit(
    seed: int, messages: list[list[torch.Tensor | None]]
) -> None:
    ranks = Ranks(MemoryNetwork(seed, longest_delay_ns=1000, pipe_bytes=100), num_credits=3)
    for index, sent in enumerate(messages):
        ranks.transports[0].send(1, Message(4, task(index), tuple(sent)))
    events: list[Event] = []
    while len(events) < len(messages):
        arrived = ranks.events_after(1)
        assert 0 < len(arrived) <= 3
        events += arrived
        for _ in arrived:
            ranks.transports[1].consumed(0, 4)
    for index, (sent, event) in enumerate(zip(messages, events, strict=True)):
        assert isinstance(event, MessageArrived)
        assert (event.peer, event.message.step, event.message.task) == (0, 4, task(index))
        assert all(same_bits(*both) for both in zip(sent, event.message.tensors, strict=True))
    sends, receives = ranks.records
    assert [type(record) for record in sends] == [SendRecord] * len(messages)
    assert [type(record) for record in receives] == [ReceiveRecord] * len(messages)


def test_nothing_moves_before_a_step() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.transports[0].report(1, 0, task(0))
    assert not ranks.inboxes[1].take()
    assert ranks.events_after(1, 0) == (InputReported(0, 0, task(0)),)
    assert ranks.network.now_ns == 0


def test_links_are_reordered_among_each_other_and_not_within() -> None:
    orders = set()
    for seed in range(20):
        ranks = Ranks(MemoryNetwork(seed, longest_delay_ns=1000), num_ranks=3)
        ranks.network.run_for(SOON_NS)
        for peer in (1, 2):
            for position in range(3):
                ranks.transports[peer].decide(0, 0, position, task(0))
        came = [
            (event.peer, event.position)
            for event in ranks.events_after(0)
            if isinstance(event, TaskDecided)
        ]
        for peer in (1, 2):
            assert [position for sender, position in came if sender == peer] == [0, 1, 2]
        orders.add(tuple(came))
    assert len(orders) > 5


def test_a_seed_decides_everything() -> None:
    def came(seed: int) -> list[tuple[int, Event]]:
        ranks = Ranks(MemoryNetwork(seed, longest_delay_ns=1000), num_ranks=3)
        for peer in (1, 2):
            for index in range(5):
                ranks.transports[peer].send(0, message(index))
        events: list[tuple[int, Event]] = []
        while ranks.network.step(SOON_NS):
            events += [(ranks.network.now_ns, event) for event in ranks.inboxes[0].take()]
        return events

    assert came(3) == came(3)
    assert came(3) != came(4)


def test_a_link_that_stalls_holds_its_messages_until_it_is_released() -> None:
    ranks = Ranks(MemoryNetwork())
    assert not ranks.events_after(1)
    ranks.network.stall(0, 1)
    ranks.transports[0].send(1, message(0))
    assert not ranks.events_after(1, NS_PER_S)
    ranks.network.release(0, 1)
    assert ranks.events_after(1) == (MessageArrived(0, message(0)),)


def test_a_link_that_stalls_for_too_long_loses_both_peers_of_it() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.network.run_for(SOON_NS)
    ranks.network.stall(0, 1)
    for rank in (0, 1):
        (told,) = ranks.failures(rank, SILENCE_NS + 2 * NS_PER_S)
        assert f"rank {1 - rank} was silent for 20 s (seen by rank {rank})" in told


def test_heartbeats_keep_idle_links_alive() -> None:
    ranks = Ranks(MemoryNetwork())
    for rank in (0, 1):
        assert not ranks.events_after(rank, 10 * SILENCE_NS)


def test_a_link_that_is_cut_is_reported_on_both_ranks_and_loses_messages_in_flight() -> None:
    ranks = Ranks(MemoryNetwork(longest_delay_ns=1000))
    ranks.network.run_for(SOON_NS)
    ranks.transports[0].send(1, message(0))
    ranks.network.cut(0, 1)
    for rank in (0, 1):
        (told,) = ranks.failures(rank)
        assert f"rank {1 - rank} closed its connection without a farewell" in told
    # The other way goes on.
    ranks.transports[1].send(0, message(1))
    assert ranks.events_after(0) == (MessageArrived(1, message(1)),)


def test_a_stopped_rank_is_lost_to_the_others_and_blames_nobody_before_it_has_read() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.network.run_for(SOON_NS)
    ranks.network.stop(1)
    told = ranks.failures(0, SILENCE_NS + 2 * NS_PER_S)
    assert ["rank 1 was silent" in sentence for sentence in told] == [True, True]
    ranks.network.resume(1)
    told = ranks.failures(1)
    assert ["closed its connection" in sentence for sentence in told] == [True, True]


def test_a_rank_that_was_stopped_shortly_is_not_lost() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.network.run_for(SOON_NS)
    ranks.network.stop(1)
    assert not ranks.events_after(0, SILENCE_NS - 2 * NS_PER_S)
    ranks.network.resume(1)
    for rank in (0, 1):
        assert not ranks.events_after(rank, SILENCE_NS)


def test_closing_delivers_what_is_queued_and_ends_every_link() -> None:
    ranks = Ranks(MemoryNetwork(longest_delay_ns=1000))
    for index in range(3):
        ranks.transports[0].send(1, message(index))
    ranks.transports[0].close()
    assert ranks.events_after(1) == (
        *(MessageArrived(0, message(index)) for index in range(3)),
        PeerLeft(0),
    )
    assert not ranks.events_after(0)
    assert all(transport.is_over for transport in ranks.transports)
    ranks.transports[1].send(0, message(3))
    assert "rank 0 has left" in ranks.failures(1)[0]


def test_a_rank_that_closes_waits_for_credit_until_its_deadline() -> None:
    ranks = Ranks(MemoryNetwork(), num_credits=1)
    for index in range(2):
        ranks.transports[0].send(1, message(index))
    ranks.transports[0].close()
    assert ranks.events_after(1, CLOSE_NS - SOON_NS) == (MessageArrived(0, message(0)),)
    were_over = [ranks.transports[0].is_over]
    ranks.network.run_for(2 * SOON_NS)
    were_over.append(ranks.transports[0].is_over)
    assert were_over == [False, True]
    assert "rank 0 closed its connection" in ranks.failures(1)[0]


def test_a_rank_that_fails_leaves_without_a_farewell() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.transports[1].close(farewell=False)
    told = ranks.failures(0)
    assert ["rank 1 closed its connection" in sentence for sentence in told] == [True, True]
    assert not ranks.events_after(1)


def test_a_grant_lets_more_messages_come() -> None:
    ranks = Ranks(MemoryNetwork(), num_credits=2)
    for index in range(6):
        ranks.transports[0].send(1, message(index))
    assert len(ranks.events_after(1)) == 2
    ranks.transports[1].grant(5)
    assert len(ranks.events_after(1)) == 3


def test_a_message_stays_on_its_link_for_its_latency_and_reports_overtake_it() -> None:
    ranks = Ranks(MemoryNetwork())
    ranks.network.run_for(SOON_NS)
    ranks.transports[0].send(1, Message(0, task(0), (), latency_ns=3 * SOON_NS))
    ranks.transports[0].report(1, 0, task(1, Kind.B))
    assert ranks.events_after(1, 3 * SOON_NS - 1) == (InputReported(0, 0, Task(1, Kind.B, 1)),)
    assert ranks.events_after(1, 1) == (MessageArrived(0, message(0)),)
    (record,) = ranks.records[0]
    assert isinstance(record, SendRecord)
    assert record.end_ns - record.start_ns == 3 * SOON_NS


# Whole pipelines in memory: workers, agreement and the links' protocol together.


@given(
    seed=st.integers(0, 2**32),
    num_pp_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 2),
    hint_name=st.sampled_from(["bf", "fb", "bfw", "bf-deep"]),
)
def test_a_pipeline_runs_every_task_of_every_step(
    seed: int, num_pp_ranks: int, num_chunks: int, hint_name: str
) -> None:
    """Tasks and messages take their time, and evaluations stand between the training steps."""
    draws = random.Random(seed)
    kinds = SPLIT_BACKWARD if hint_name == "bfw" else WHOLE_BACKWARD
    training = Shape(num_pp_ranks, 4, num_chunks, kinds=kinds)
    steps = {0: training, evaluation_step(0): replace(training, kinds=FORWARD_ONLY), 1: training}

    def run(rig: RankRig) -> list[TaskRecord]:
        work = Work(lambda _: rig.sleep(draws.uniform(0, 1e-3)))
        for step, shape in steps.items():
            rig.run_step(step, shape, work, hint_name)
        return [record for record in rig.records if isinstance(record, TaskRecord)]

    ranks = run_in_memory(run, num_pp_ranks, seed=seed, longest_delay_ns=1_000_000)
    for rank, records in enumerate(ranks):
        assert [*dict.fromkeys(record.step for record in records)] == [*steps]
        for step, shape in steps.items():
            ran = [(run.stage, run.kind, run.microbatch) for run in records if run.step == step]
            assert sorted(ran) == sorted((*task,) for task in shape.tasks_of(rank))


def test_the_same_seed_gives_the_same_records() -> None:
    def run(rig: RankRig) -> list[Record]:
        rig.run_step(0, Shape(3, 4), Work(lambda _: rig.sleep(1e-3)))
        return rig.records

    def records(seed: int) -> list[list[Record]]:
        return run_in_memory(run, 3, seed=seed, longest_delay_ns=1_000_000)

    assert records(1) == records(1)
    assert records(1) != records(2)


def test_a_link_that_is_cut_fails_both_of_its_ranks() -> None:
    network = MemoryNetwork()

    def run(rig: RankRig) -> str:
        def act(task: Task) -> None:
            rig.sleep(1e-3)
            if task == parse_task("1F2")[0]:
                network.cut(0, 1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(2, 4), Work(act))
        return str(lost.value)

    told = run_in_memory(run, 2, network=network)
    assert "rank 1 closed its connection without a farewell (seen by rank 0)" in told[0]
    assert "rank 0 closed its connection without a farewell (seen by rank 1)" in told[1]


def test_a_rank_whose_process_is_stopped_is_missed_and_does_not_blame_the_others() -> None:
    """The others lose it after 20 s; when it goes on, they have closed without a farewell."""
    network = MemoryNetwork()

    def run(rig: RankRig) -> tuple[str, float]:
        def act(task: Task) -> None:
            if task == parse_task("1F2")[0]:
                network.stop(1)
                rig.sleep(60)
                network.resume(1)

        with pytest.raises(PeerLostError) as lost:
            rig.run_step(0, Shape(3, 4), Work(act))
        told = str(lost.value), rig.clock() / NS_PER_S
        # As the drop-in does after a failure.
        rig.transport.close(farewell=False)
        return told

    (first, first_s), (stopped, stopped_s), (last, last_s) = run_in_memory(
        run, 3, network=network, stall_s=600.0
    )
    for told, at_s in ((first, first_s), (last, last_s)):
        assert "rank 1 was silent for 20 s" in told
        assert at_s == pytest.approx(20, abs=1.1)
    assert "closed its connection without a farewell" in stopped
    assert stopped_s == pytest.approx(60, abs=1.1)
