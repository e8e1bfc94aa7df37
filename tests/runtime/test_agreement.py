"""The star agreement: one sequence for a group, on what all of its members have."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp.errors import RrfpError
from rrfp.runtime.agreement import AheadThread, GroupAgreement
from rrfp.runtime.protocols import InputReported, Message, TaskDecided, monotonic
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import ComputeIdle, InputArrived, Kind, RunTask, StepDone, Task, TaskAgreed
from rrfp.trace.records import AgreementRecord, Record, StimulusRecord, TaskRecord
from tests.e2e.ranks import run_ranks
from tests.properties.cases import replayed
from tests.runtime.rank_rig import Place, RankRig, Work, open_rig, run_in_memory

F0, F1 = Task(1, Kind.F, 0), Task(1, Kind.F, 1)


class Links:
    """A transport of announcements only: what a rank sent, by link, until it is delivered."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[tuple[int, InputReported | TaskDecided]] = []

    def report(self, peer: int, step: int, task: Task) -> None:
        self.sent.append((peer, InputReported(self.rank, step, task)))

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        self.sent.append((peer, TaskDecided(self.rank, step, position, task)))

    def send(self, peer: int, message: Message) -> None:
        raise AssertionError("an agreement sends no message")

    def consumed(self, peer: int, step: int) -> None:
        raise AssertionError("an agreement consumes no message")

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        raise AssertionError("an agreement forecasts no message")


def agreement(
    rank: int, members: list[int], record: Callable[[Record], None] = lambda _: None
) -> tuple[GroupAgreement, Links]:
    links = Links(rank)
    ticks = iter(range(1000))
    return GroupAgreement(rank, members, links, record, lambda: next(ticks)), links


def test_alone_there_is_nothing_to_agree_on() -> None:
    records: list[Record] = []
    alone, links = agreement(3, [3], records.append)
    assert alone.group is None
    alone.start_step()
    alone.report(0, F0)
    assert alone.next() is None
    alone.note_dispatch(0, F0)
    assert alone.pending_messages(0b1) == {}
    assert not links.sent
    assert not records


def test_the_first_member_leads_and_sends_decisions_to_every_follower() -> None:
    records: list[Record] = []
    leader, links = agreement(2, [2, 5, 7], records.append)
    assert leader.group == Group(num_members=3, leads=True)
    leader.start_step()
    leader.report(4, F0)
    assert not links.sent
    assert leader.stimulus_of(InputReported(7, 4, F1)) == InputArrived(F1, member=2)
    leader.note_dispatch(4, F1)
    leader.note_dispatch(4, F0)
    assert links.sent == [
        (peer, TaskDecided(2, 4, position, task))
        for position, task in enumerate([F1, F0])
        for peer in (5, 7)
    ]
    assert records == [
        AgreementRecord(0, 1, 4, "F", 1, 1, 0),
        AgreementRecord(2, 3, 4, "F", 1, 0, 1),
    ]
    assert leader.next() is None


def test_a_leader_waits_only_for_the_members_that_lack_an_input() -> None:
    leader, _ = agreement(2, [2, 5, 7])
    assert leader.pending_messages(0b000) == leader.pending_messages(0b001) == {}
    assert leader.pending_messages(0b101) == {7: "reports of what has arrived there"}
    assert [*leader.pending_messages(0b110)] == [5, 7]


def test_a_follower_waits_for_its_leader() -> None:
    follower, _ = agreement(5, [2, 5, 7])
    assert follower.pending_messages(0b0) == {2: "the group's next decision"}


def test_a_follower_reports_to_the_leader_and_runs_its_sequence() -> None:
    follower, links = agreement(5, [2, 5])
    assert follower.group == Group(num_members=2, leads=False)
    for step in range(2):
        follower.start_step()
        follower.report(step, F0)
        assert follower.next() is None
        follower.add_decision(TaskDecided(2, step, 0, F1))
        follower.add_decision(TaskDecided(2, step, 1, F0))
        for task in (F1, F0):
            assert follower.next() == task
            follower.note_dispatch(step, task)
        assert follower.next() is None
    assert links.sent == [(2, InputReported(5, step, F0)) for step in range(2)]


def test_a_gap_in_the_sequence_is_an_error() -> None:
    follower, _ = agreement(5, [2, 5])
    follower.start_step()
    follower.add_decision(TaskDecided(2, 0, 1, F0))
    with pytest.raises(RrfpError, match="decision 1 of rank 2 came in place of 0"):
        follower.note_dispatch(0, F0)


class Member:
    """One rank of a group on the middle stage of three, stepped by hand."""

    def __init__(self, rank: int, members: list[int], shape: Shape, limit: int | None) -> None:
        self.rank = rank
        self.agreement, self.links = agreement(rank, members)
        self.agreement.start_step()
        self.dispatcher = Dispatcher(
            shape, 1, Policy(HINTS["bf"], limit=limit), group=self.agreement.group
        )
        self.run: list[Task] = []
        self.is_done = False

    def arrives(self, task: Task) -> None:
        self.agreement.report(0, task)
        self.dispatcher.handle(0, InputArrived(task))

    def hears(self, event: InputReported | TaskDecided) -> None:
        if isinstance(event, InputReported):
            self.dispatcher.handle(0, self.agreement.stimulus_of(event))
        else:
            self.agreement.add_decision(event)

    def goes_on(self) -> None:
        agreed = self.agreement.next()
        stimulus = ComputeIdle() if agreed is None else TaskAgreed(agreed)
        for instruction in self.dispatcher.handle(0, stimulus):
            if isinstance(instruction, RunTask):
                self.agreement.note_dispatch(0, instruction.task)
                self.run.append(instruction.task)
            self.is_done = isinstance(instruction, StepDone)


@given(
    num_members=st.integers(2, 4),
    num_microbatches=st.integers(1, 6),
    limit=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_a_group_runs_one_sequence_whatever_arrives_when(
    num_members: int, num_microbatches: int, limit: int | None, data: st.DataObject
) -> None:
    """Inputs arrive at each member in an order of its own, announcements at any time."""
    shape = Shape(3, num_microbatches)
    ranks = list(range(10, 10 + num_members))
    members = {rank: Member(rank, ranks, shape, limit) for rank in ranks}
    inputs = {rank: deque[Task]() for rank in ranks}
    for rank in ranks:
        inputs[rank].extend(data.draw(st.permutations(list(shape.tasks_of(1))), str(rank)))
    on_the_way: dict[tuple[int, int], deque[InputReported | TaskDecided]] = {}
    while not all(member.is_done for member in members.values()):
        actions: list[Callable[[], None]] = []
        for rank, member in members.items():
            for peer, event in member.links.sent:
                on_the_way.setdefault((rank, peer), deque()).append(event)
            member.links.sent.clear()
            if inputs[rank]:
                actions.append(lambda rank=rank: members[rank].arrives(inputs[rank].popleft()))  # type: ignore[misc]
            if not member.is_done:
                actions.append(member.goes_on)
        actions += [
            lambda peer=peer, events=events: members[peer].hears(events.popleft())  # type: ignore[misc]
            for (_, peer), events in on_the_way.items()
            if events
        ]
        # Everything that can move does, in turn, from a place of hypothesis' choice.
        first = data.draw(st.integers(0, len(actions) - 1))
        for action in actions[first:] + actions[:first]:
            action()
    sequences = [member.run for member in members.values()]
    assert all(sequence == sequences[0] for sequence in sequences)
    assert sorted(sequences[0]) == sorted(shape.tasks_of(1))


# On whole ranks, which run steps.

SHAPE = Shape(2, 6)
NUM_STEPS = 3

Ran = tuple[list[TaskRecord], list[StimulusRecord]]


def run_steps(rig: RankRig, work: Work) -> Ran:
    for step in range(NUM_STEPS):
        rig.run_step(step, SHAPE, work)
    return (
        [record for record in rig.records if isinstance(record, TaskRecord)],
        [record for record in rig.records if isinstance(record, StimulusRecord)],
    )


def check_that_members_ran_one_sequence(ranks: list[Ran], num_members: int) -> None:
    """Each rank's sequence is that of its group, and what its dispatcher says to its stimuli."""
    sequences = [
        [
            [Task(run.stage, Kind(run.kind), run.microbatch) for run in tasks if run.step == step]
            for step in range(NUM_STEPS)
        ]
        for tasks, _ in ranks
    ]
    for rank, (_, stimuli) in enumerate(ranks):
        place = Place(rank, 2, num_members)
        assert sequences[rank] == sequences[place.members[0]]
        group = Group(num_members, leads=place.member == 0)
        for step in range(NUM_STEPS):
            dispatcher = Dispatcher(SHAPE, place.pp_rank, Policy(HINTS["bf"]), group=group)
            of_step = [stimulus for stimulus in stimuli if stimulus.step == step]
            assert replayed(of_step, dispatcher) == sequences[rank][step]


@given(seed=st.integers(0, 2**32), num_members=st.integers(2, 4))
@settings(max_examples=25)
def test_members_run_one_sequence_however_their_links_lag(seed: int, num_members: int) -> None:
    draws = random.Random(seed)

    def run(rig: RankRig) -> Ran:
        return run_steps(rig, Work(lambda _: rig.sleep(draws.uniform(0, 1e-3))))

    ranks = run_in_memory(run, 2, num_members, seed=seed, longest_delay_ns=2_000_000)
    check_that_members_ran_one_sequence(ranks, num_members)


def run_steps_with_delays() -> Ran:
    with open_rig(2, 2, delays_s=0.004) as rig:
        return run_steps(rig, Work())


def test_members_that_decide_ahead_run_one_sequence_on_real_ranks() -> None:
    """With the leader's own thread, random delays, and sockets between processes."""
    ranks = run_ranks(4, run_steps_with_delays, timeout_s=110)
    check_that_members_ran_one_sequence(ranks, 2)
    for rank, (_, stimuli) in enumerate(ranks):
        is_leader = Place(rank, 2, 2).member == 0
        assert any(stimulus.name == "DecideAhead" for stimulus in stimuli) is is_leader


# Deciding ahead: once, shortly before a task's expected end, and never outside of a task.


PATIENCE_S = 10.0
F, B = Kind.F, Kind.B


class Decisions:
    """Counts the calls, and lets a task wait for the next one."""

    def __init__(self, decide: Callable[[], None] = lambda: None) -> None:
        self._decide = decide
        self.came = threading.Event()
        self.came_ns = 0
        self.num = 0

    def __call__(self) -> None:
        self.num += 1
        self.came_ns = monotonic()
        self.came.set()
        self._decide()


@contextmanager
def ahead_thread(decide: Callable[[], None]) -> Iterator[AheadThread]:
    before = set(threading.enumerate())
    ahead = AheadThread(decide, monotonic)
    ahead.start()
    try:
        yield ahead
    finally:
        ahead.close()
        assert set(threading.enumerate()) <= before


def run(ahead: AheadThread, seconds: float, kind: Kind = F, chunk: int = 0) -> None:
    with ahead.while_running(kind, chunk):
        time.sleep(seconds)


def test_it_decides_before_the_expected_end_and_once_a_task() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.1)
        assert decisions.num == 0, "there was no estimate yet"
        for num_decided in (1, 2):
            decisions.came.clear()
            with ahead.while_running(F, 0):
                start_ns = monotonic()
                assert decisions.came.wait(PATIENCE_S)
                # The lead is 1 ms; a busy machine may add to it, but not all of the task.
                assert decisions.came_ns - start_ns > 50_000_000, "too early"
                time.sleep(0.05)
            assert decisions.num == num_decided


def test_estimates_are_of_a_kind_and_a_chunk() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.0)
        run(ahead, 0.05, B)
        run(ahead, 0.05, F, 1)
        assert decisions.num == 0


def test_the_estimate_follows_slowly() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.2)
        for _ in range(10):
            run(ahead, 0.0)
        with ahead.while_running(F, 0):
            start_ns = monotonic()
            assert decisions.came.wait(PATIENCE_S)
            # 0.9 ** 10 of 0.2 s.
            assert decisions.came_ns - start_ns > 50_000_000


def test_a_task_that_ends_early_is_not_decided_for() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.1)
        run(ahead, 0.0)
        time.sleep(0.15)
        assert decisions.num == 0


def test_a_task_does_not_end_while_it_is_decided_for() -> None:
    is_deciding = threading.Event()

    def decide_slowly() -> None:
        is_deciding.set()
        time.sleep(0.1)
        is_deciding.clear()

    decisions = Decisions(decide_slowly)
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.01)
        with ahead.while_running(F, 0):
            assert is_deciding.wait(PATIENCE_S)
        assert not is_deciding.is_set()


def test_a_failure_comes_out_at_the_end_of_the_task() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    decisions = Decisions(fail)
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.01)
        with pytest.raises(ZeroDivisionError):
            run(ahead, 0.1)
    assert decisions.num == 1


def test_a_task_that_fails_notes_the_failure_to_decide() -> None:
    def fail() -> None:
        raise ZeroDivisionError("by nothing")

    def fail_after_the_decision() -> None:
        with ahead.while_running(F, 0):
            assert decisions.came.wait(PATIENCE_S)
            raise ArithmeticError

    decisions = Decisions(fail)
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.01)
        with pytest.raises(ArithmeticError) as failed:
            fail_after_the_decision()
    assert type(failed.value) is ArithmeticError
    assert failed.value.__notes__ == ["Deciding ahead failed, too: ZeroDivisionError: by nothing"]


def test_what_the_task_raises_comes_first() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        with pytest.raises(KeyError), ahead.while_running(F, 0):
            raise KeyError
        run(ahead, 0.01)
        assert decisions.num == 0, "a task that failed is no estimate"
