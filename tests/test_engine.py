"""The simulator's engine: the same steps as an independent one, and what links and rounds cost."""

import random
from dataclasses import replace

import pytest
from hypothesis import given

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.order import Order, parse_order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.simulate.engine import PipelineRun
from rrfp.simulate.recording import new_recording
from rrfp.simulate.step import play, simulate_step
from rrfp.simulate.world import TaskTimes, World
from rrfp.trace.records import RankRecords
from tests.cases import Case, cases
from tests.effort import examples
from tests.step_times import equal_times, random_times
from tests.virtual_time import Node
from tests.virtual_time import World as OtherWorld
from tests.virtual_time import play as play_otherwise

F, B, W = Kind.F, Kind.B, Kind.W


def even_times(shape: Shape, forward: int = 10, backward: int = 10, weight: int = 10) -> TaskTimes:
    return equal_times(shape, forward, backward, weight)


def of_hint(name: str, shape: Shape, dispatch: Dispatch = Dispatch.FIXED) -> tuple[Shape, Policy]:
    hint = hint_named(name).on(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    return shape, Policy(hint, order_of(hint, shape), dispatch)


@examples(quick=150, thorough=3000)
@given(cases())
def test_a_step_is_what_an_independent_engine_makes_of_it(case: Case) -> None:
    """Every task of every member at the same instant, and every wait, where messages take no time
    but for what a member gets later than the first, and rounds take none."""
    shape, num_members = case.shape, case.num_members
    times = random_times(random.Random(case.seed), shape)
    of_kind = times.by_kind(split=shape.splits_backward)
    late_ns = case.seed % 50
    order = case.order if case.dispatch is Dispatch.FIXED else None
    policy = case.policy(order)
    world = World(times, num_members=num_members, lateness=lambda member, _: late_ns * member)
    recording = new_recording(shape, num_members, 1, {})
    step = simulate_step(shape, policy, [world], recording=recording)

    def duration(_node: Node, task: Task) -> int:
        return of_kind[task.kind][task.stage][task.microbatch]

    def latency(sender: Node, receiver: Node) -> int:
        return late_ns * receiver.member if sender.rank != receiver.rank else 0

    members = range(num_members)
    groups = [Group(num_members, each == 0) if num_members > 1 else None for each in members]
    deciders = [
        [Dispatcher(shape, rank, policy, group) for group in groups]
        for rank in range(shape.num_ranks)
    ]
    other_world = OtherWorld(duration, latency, collectives=[[members]] * shape.num_stages)
    history = play_otherwise(shape, deciders, other_world)
    for records in recording.ranks:
        node = history.nodes[Node(records.info.pp_rank, records.info.tp_rank)]
        assert [task[:2] for task in records.tasks] == [each[:2] for each in node.ran]
        assert [key(task) for task in records.tasks] == node.tasks
        waits = [wait for wait in node.waits if wait.start_ns < wait.end_ns]
        assert [(wait.cause, *wait[:2]) for wait in records.waits] == waits
    assert step.makespan_ns == history.makespan_ns


def key(record: object) -> Task:
    return Task(record.stage, Kind(record.kind), record.microbatch)  # type: ignore[attr-defined]


def second_stage(num_microbatches: int, world: World) -> list[RankRecords]:
    """What the members of the second of two stages do in a forward-only step."""
    shape = Shape(2, num_microbatches, kinds=(F,))
    hint = hint_named("bf").on(shape)
    recording = new_recording(shape, world.num_members, 1, {})
    simulate_step(shape, Policy(hint), [world], recording=recording)
    return recording.ranks[world.num_members :]


def test_a_link_carries_one_message_at_a_time() -> None:
    shape = Shape(2, 3, kinds=(F,))
    (records,) = second_stage(3, World(even_times(shape), transfer=lambda *_: 25))
    # They leave at 10, 20 and 30, and take 25 each.
    assert [receive[:2] for receive in records.receives] == [(10, 35), (35, 60), (60, 85)]
    assert [task.start_ns for task in records.tasks] == [35, 60, 85]


def test_a_message_s_time_may_depend_on_the_link_and_the_microbatch() -> None:
    seen = []

    def transfer(sender: int, receiver: int, task: Task) -> int:
        seen.append((sender, receiver, task))
        return 100 * task.microbatch

    shape = Shape(2, 2, kinds=(F,))
    (records,) = second_stage(2, World(even_times(shape), transfer=transfer))
    assert seen == [(0, 1, Task(1, F, 0)), (0, 1, Task(1, F, 1))]
    assert [task.start_ns for task in records.tasks] == [10, 120]


def test_the_members_of_a_group_wait_for_the_last_message_and_for_their_round() -> None:
    shape = Shape(2, 2, kinds=(F,))
    world = World(
        even_times(shape), num_members=3, lateness=lambda member, _: 4 * member, agreement_ns=3
    )
    leader, follower, last = second_stage(2, world)
    # The leader's own message came at 13, as stage 0 began its first task after a round of 3; the
    # last member's at 21. A task runs from 24 on; meanwhile the next message came, at 31.
    for records in (leader, follower, last):
        assert [task[:2] for task in records.tasks] == [(24, 34), (34, 44)]
    assert (21, 24, 0, Cause.COORDINATION) in leader.waits


def test_every_member_waits_for_a_round_that_finds_it_idle() -> None:
    shape = Shape(2, 2, kinds=(F,))
    world = World(even_times(shape), transfer=lambda *_: 50, num_members=2, agreement_ns=7)
    for records in second_stage(2, world):
        # Messages come at 67 and 117; each time both have the task, and agree on it.
        assert [task.start_ns for task in records.tasks] == [74, 124]
        assert (117, 124, 0, Cause.COORDINATION) in records.waits


def test_a_round_that_outlasts_the_task_beside_it_is_waited_for() -> None:
    shape = Shape(1, 3, kinds=(F,))
    hint = hint_named("bf").on(shape)
    world = World(even_times(shape), num_members=2, agreement_ns=30)
    run = play(shape, Policy(hint), world)
    # A round before the first task; the others begin with the task before them and outlast it.
    assert run.makespan_ns == 30 + 30 + 30 + 10


def blocking(order: Order, times: TaskTimes, transfer_ns: int) -> PipelineRun:
    world = World(times, transfer=lambda *_: transfer_ns, blocking=True)
    return play(order.shape, Policy(order, order, Dispatch.FIXED), world)


def test_who_sends_waits_for_who_receives() -> None:
    """Two forwards on stage 0, the first of which stage 1 takes up only when it is there."""
    shape = Shape(2, 2, kinds=WHOLE_BACKWARD)
    order = parse_order("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", shape, "two")
    run = blocking(order, even_times(shape, 10, 10, 0), 5)
    # 0F0 0..10, its message 10..15; 0F1 15..25; 1F0 15..25, 1B0 25..35; then both messages, that of
    # 0F1 and that of 1B0, from 35 to 40; 1F1 40..50, 1B1 50..60, its message 60..65, 0B1 65..75.
    assert run.ends_ns == (75, 60)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_blocking_1f1b_takes_what_asynchronous_takes_where_messages_take_none(
    num_ranks: int,
) -> None:
    shape, policy = of_hint("1f1b", Shape(num_ranks, 12))
    world = World(even_times(shape, 10, 15, 5))
    free = play(shape, policy, world).makespan_ns
    assert (
        play(shape, policy, replace(world, blocking=True)).makespan_ns
        == free
        == (num_ranks + 11) * 30
    )


@examples(quick=60, thorough=1000)
@given(cases())
def test_blocking_never_gains(case: Case) -> None:
    shape, policy = of_hint("1f1b", Shape(case.shape.num_ranks, case.shape.num_microbatches))
    world = World(random_times(random.Random(case.seed), shape), transfer=lambda *_: case.seed % 7)
    blocked = play(shape, policy, replace(world, blocking=True))
    assert blocked.makespan_ns >= play(shape, policy, world).makespan_ns
    assert blocked.busy_ns == play(shape, policy, world).busy_ns


def test_blocking_never_gains_by_a_group_whose_messages_come_apart() -> None:
    shape, policy = of_hint("1f1b", Shape(4, 12))
    world = World(even_times(shape), num_members=2, lateness=lambda member, _: 9 * member)
    blocked = play(shape, policy, replace(world, blocking=True)).makespan_ns
    assert blocked >= play(shape, policy, world).makespan_ns > 15 * 30


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_blocking_interleaving_runs_to_its_end(num_ranks: int, num_chunks: int) -> None:
    shape, policy = of_hint("interleaved", Shape(num_ranks, 3 * num_ranks, num_chunks))
    world = World(random_times(random.Random(num_chunks), shape), transfer=lambda *_: 3)
    blocked = play(shape, policy, replace(world, blocking=True)).makespan_ns
    assert blocked > play(shape, policy, world).makespan_ns


def test_a_weight_gradient_runs_while_messages_pass() -> None:
    shape, policy = of_hint("zb-h1", Shape(2, 4))
    world = World(even_times(shape), transfer=lambda *_: 9, blocking=True)
    recording = new_recording(shape, 1, 1, {})
    simulate_step(shape, policy, [world], recording=recording)
    passing = [receive[:2] for records in recording.ranks for receive in records.receives]
    weights = [task[:2] for records in recording.ranks for task in records.tasks if task.kind == W]
    assert any(
        start < end_of_message and begin < end
        for begin, end_of_message in passing
        for start, end in weights
    )


def test_blocking_links_take_an_order_that_binds() -> None:
    shape, policy = of_hint("1f1b", Shape(2, 2), Dispatch.READY)
    with pytest.raises(UsageError, match="blocking links need a binding order; add --dispatch"):
        play(shape, policy, World(even_times(shape), blocking=True))


def test_an_order_that_deadlocks_is_told_with_where_each_rank_stands() -> None:
    shape = Shape(2, 2)
    order = parse_order("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", shape, "crossed")
    policy = Policy(order, order, Dispatch.FIXED)
    with pytest.raises(RrfpError, match=r"7 tasks left, rank 0 at 0F1, rank 1 at 1F0: its order"):
        play(shape, policy, World(even_times(shape)))


def test_a_stretch_sees_each_task_once_in_sequence() -> None:
    seen: list[tuple[int, Task]] = []

    def stretch(rank: int, start_ns: int, task: Task, time_ns: int) -> int:
        seen.append((start_ns, task))
        return 2 * time_ns

    shape, policy = of_hint("bf", Shape(2, 3), Dispatch.READY)
    run = play(shape, policy, World(even_times(shape), stretch=stretch))
    assert sorted(task for _, task in seen) == sorted(
        task for rank in range(2) for task in shape.tasks_of(rank)
    )
    assert [start for start, _ in seen] == sorted(start for start, _ in seen)
    assert run.busy_ns == (180, 180)


def test_replicas_meet_at_the_end() -> None:
    shape, policy = of_hint("1f1b", Shape(2, 4))
    worlds = [World(random_times(random.Random(seed), shape)) for seed in (1, 2)]
    recording = new_recording(shape, 1, 2, {})
    step = simulate_step(shape, policy, worlds, gradient_sync_ns=70, recording=recording)
    runs = [play(shape, policy, world) for world in worlds]
    last_ns = max(run.makespan_ns for run in runs)
    assert step.makespan_ns == last_ns + 70
    assert step.busy_ns == tuple(run.busy_ns for run in runs)
    divided = bubbles(frames_of(recording))
    assert divided.window_ns == step.makespan_ns
    assert divided.bubble_fraction == pytest.approx(step.bubble_fraction)
    assert min(rank.causes_ns[Cause.GRADIENT_SYNC] for rank in divided.ranks) >= 70
