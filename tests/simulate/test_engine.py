"""Tests that the engine agrees with an independent one, and that no step is below the floor."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hints import Order, kinds_of, parse_order
from rrfp.schedule.named_hints import ORDERS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.simulate.engine import PipelineRun, StepConditions, TaskTimes, Transfer
from rrfp.simulate.step import new_recording, play, simulate_step
from rrfp.simulate.time_bounds import Floor, floor, paper_bound_ns
from rrfp.trace.records import RankRecords
from tests.analyze.simulated_runs import equal_times, random_times
from tests.properties.cases import SEEDS, Case, cases, examples, random_case
from tests.properties.virtual_time import Node, VirtualConditions
from tests.properties.virtual_time import play as play_otherwise

F, B, W = Kind.F, Kind.B, Kind.W


def even_times(shape: Shape, forward: int = 10, backward: int = 10, weight: int = 10) -> TaskTimes:
    return equal_times(shape, forward, backward, weight)


def shape_and_policy(
    name: str, shape: Shape, dispatch: Dispatch = Dispatch.FIXED
) -> tuple[Shape, Policy]:
    hint = hint_named(name).for_shape(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    return shape, Policy(hint, order_of(hint, shape), dispatch)


@examples(quick=150, thorough=3000)
@given(cases())
def test_a_step_equals_that_of_an_independent_engine(case: Case) -> None:
    """Every task and wait of every member has the same times. Messages and rounds of agreement take
    no time, but later members of a group receive later than the first."""
    shape, num_members = case.shape, case.num_members
    times = random_times(random.Random(case.seed), shape)
    of_kind = times.by_kind(split=shape.splits_backward)
    late_ns = case.seed % 50
    order = case.order if case.dispatch is Dispatch.FIXED else None
    policy = case.policy(order)
    conditions = StepConditions(
        times, num_members=num_members, lateness=lambda member, _: late_ns * member
    )
    recording = new_recording(shape, num_members, 1, {})
    step = simulate_step(shape, policy, [conditions], recording=recording)

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
    virtual_conditions = VirtualConditions(
        duration, latency, collectives=[[members]] * shape.num_stages
    )
    history = play_otherwise(shape, deciders, virtual_conditions)
    for records in recording.ranks:
        node = history.nodes[Node(records.info.pp_rank, records.info.tp_rank)]
        assert [task[:2] for task in records.tasks] == [each[:2] for each in node.ran]
        assert [key(task) for task in records.tasks] == node.tasks
        waits = [wait for wait in node.waits if wait.start_ns < wait.end_ns]
        assert [(wait.cause, *wait[:2]) for wait in records.waits] == waits
    assert step.makespan_ns == history.makespan_ns


def key(record: object) -> Task:
    return Task(record.stage, Kind(record.kind), record.microbatch)  # type: ignore[attr-defined]


def second_stage(num_microbatches: int, conditions: StepConditions) -> list[RankRecords]:
    """Return the records of the second stage's members in a forward-only step of two stages."""
    shape = Shape(2, num_microbatches, kinds=(F,))
    hint = hint_named("bf").for_shape(shape)
    recording = new_recording(shape, conditions.num_members, 1, {})
    simulate_step(shape, Policy(hint), [conditions], recording=recording)
    return recording.ranks[conditions.num_members :]


def test_a_link_carries_one_message_at_a_time() -> None:
    shape = Shape(2, 3, kinds=(F,))
    (records,) = second_stage(3, StepConditions(even_times(shape), transfer=lambda *_: 25))
    # They leave at 10, 20 and 30, and take 25 each.
    assert [receive[:2] for receive in records.receives] == [(10, 35), (35, 60), (60, 85)]
    assert [task.start_ns for task in records.tasks] == [35, 60, 85]


def test_the_time_of_a_message_may_depend_on_link_and_microbatch() -> None:
    seen = []

    def transfer(sender: int, receiver: int, task: Task) -> int:
        seen.append((sender, receiver, task))
        return 100 * task.microbatch

    shape = Shape(2, 2, kinds=(F,))
    (records,) = second_stage(2, StepConditions(even_times(shape), transfer=transfer))
    assert seen == [(0, 1, Task(1, F, 0)), (0, 1, Task(1, F, 1))]
    assert [task.start_ns for task in records.tasks] == [10, 120]


def test_the_members_of_a_group_wait_for_the_last_message_and_for_their_round() -> None:
    shape = Shape(2, 2, kinds=(F,))
    conditions = StepConditions(
        even_times(shape), num_members=3, lateness=lambda member, _: 4 * member, agreement_ns=3
    )
    leader, follower, last = second_stage(2, conditions)
    # Stage 0 starts its first task after a round of 3, so the leader's message arrives at 13, and
    # that of the last member at 21. The task starts at 24. The next message arrives at 31.
    for records in (leader, follower, last):
        assert [task[:2] for task in records.tasks] == [(24, 34), (34, 44)]
    assert (21, 24, 0, Cause.COORDINATION) in leader.waits


def test_every_member_waits_for_a_round_that_finds_it_idle() -> None:
    shape = Shape(2, 2, kinds=(F,))
    conditions = StepConditions(
        even_times(shape), transfer=lambda *_: 50, num_members=2, agreement_ns=7
    )
    for records in second_stage(2, conditions):
        # Messages arrive at 67 and 117. Each time both members are ready and agree on the task.
        assert [task.start_ns for task in records.tasks] == [74, 124]
        assert (117, 124, 0, Cause.COORDINATION) in records.waits


def test_a_rank_waits_for_a_round_that_outlasts_the_running_task() -> None:
    shape = Shape(1, 3, kinds=(F,))
    hint = hint_named("bf").for_shape(shape)
    conditions = StepConditions(even_times(shape), num_members=2, agreement_ns=30)
    run = play(shape, Policy(hint), conditions)
    # One round precedes the first task. Each other round starts with a task and outlasts it.
    assert run.makespan_ns == 30 + 30 + 30 + 10


def blocking(order: Order, times: TaskTimes, transfer_ns: int) -> PipelineRun:
    conditions = StepConditions(times, transfer=lambda *_: transfer_ns, blocking=True)
    return play(order.shape, Policy(order, order, Dispatch.FIXED), conditions)


def test_a_blocking_sender_waits_for_its_receiver() -> None:
    """Stage 0 runs two forwards; its second send waits until stage 1 receives it."""
    shape = Shape(2, 2, kinds=WHOLE_BACKWARD)
    order = parse_order("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", shape, "two")
    run = blocking(order, even_times(shape, 10, 10, 0), 5)
    # 0F0 0..10, its message 10..15; 0F1 15..25; 1F0 15..25, 1B0 25..35; then the messages of 0F1
    # and 1B0, both 35..40; 1F1 40..50, 1B1 50..60, its message 60..65, 0B1 65..75.
    assert run.ends_ns == (75, 60)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_with_free_links_blocking_1f1b_takes_as_long_as_asynchronous(
    num_ranks: int,
) -> None:
    shape, policy = shape_and_policy("1f1b", Shape(num_ranks, 12))
    conditions = StepConditions(even_times(shape, 10, 15, 5))
    free = play(shape, policy, conditions).makespan_ns
    assert (
        play(shape, policy, replace(conditions, blocking=True)).makespan_ns
        == free
        == (num_ranks + 11) * 30
    )


@examples(quick=60, thorough=1000)
@given(cases())
def test_blocking_is_never_faster(case: Case) -> None:
    shape, policy = shape_and_policy(
        "1f1b", Shape(case.shape.num_ranks, case.shape.num_microbatches)
    )
    conditions = StepConditions(
        random_times(random.Random(case.seed), shape), transfer=lambda *_: case.seed % 7
    )
    blocked = play(shape, policy, replace(conditions, blocking=True))
    assert blocked.makespan_ns >= play(shape, policy, conditions).makespan_ns
    assert blocked.busy_ns == play(shape, policy, conditions).busy_ns


def test_blocking_is_never_faster_if_members_receive_at_different_times() -> None:
    shape, policy = shape_and_policy("1f1b", Shape(4, 12))
    conditions = StepConditions(
        even_times(shape), num_members=2, lateness=lambda member, _: 9 * member
    )
    blocked = play(shape, policy, replace(conditions, blocking=True)).makespan_ns
    assert blocked >= play(shape, policy, conditions).makespan_ns > 15 * 30


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_blocking_interleaving_runs_to_its_end(num_ranks: int, num_chunks: int) -> None:
    shape, policy = shape_and_policy("interleaved", Shape(num_ranks, 3 * num_ranks, num_chunks))
    conditions = StepConditions(
        random_times(random.Random(num_chunks), shape), transfer=lambda *_: 3
    )
    blocked = play(shape, policy, replace(conditions, blocking=True)).makespan_ns
    assert blocked > play(shape, policy, conditions).makespan_ns


def test_a_weight_gradient_runs_during_a_blocking_transfer() -> None:
    shape, policy = shape_and_policy("zb-h1", Shape(2, 4))
    conditions = StepConditions(even_times(shape), transfer=lambda *_: 9, blocking=True)
    recording = new_recording(shape, 1, 1, {})
    simulate_step(shape, policy, [conditions], recording=recording)
    passing = [receive[:2] for records in recording.ranks for receive in records.receives]
    weights = [task[:2] for records in recording.ranks for task in records.tasks if task.kind == W]
    assert any(
        start < end_of_message and begin < end
        for begin, end_of_message in passing
        for start, end in weights
    )


def test_blocking_links_need_a_binding_order() -> None:
    shape, policy = shape_and_policy("1f1b", Shape(2, 2), Dispatch.READY)
    with pytest.raises(UsageError, match="blocking links need a binding order; add --dispatch"):
        play(shape, policy, StepConditions(even_times(shape), blocking=True))


def test_a_deadlock_error_names_the_next_task_of_each_rank() -> None:
    shape = Shape(2, 2)
    order = parse_order("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", shape, "crossed")
    policy = Policy(order, order, Dispatch.FIXED)
    with pytest.raises(RrfpError, match=r"7 tasks left, rank 0 at 0F1, rank 1 at 1F0: its order"):
        play(shape, policy, StepConditions(even_times(shape)))


def test_a_stretch_sees_each_task_once_in_sequence() -> None:
    seen: list[tuple[int, Task]] = []

    def stretch(rank: int, start_ns: int, task: Task, time_ns: int) -> int:
        seen.append((start_ns, task))
        return 2 * time_ns

    shape, policy = shape_and_policy("bf", Shape(2, 3), Dispatch.READY)
    run = play(shape, policy, StepConditions(even_times(shape), stretch=stretch))
    assert sorted(task for _, task in seen) == sorted(
        task for rank in range(2) for task in shape.tasks_of(rank)
    )
    assert [start for start, _ in seen] == sorted(start for start, _ in seen)
    assert run.busy_ns == (180, 180)


def test_replicas_synchronize_at_the_end() -> None:
    shape, policy = shape_and_policy("1f1b", Shape(2, 4))
    conditions_by_replica = [
        StepConditions(random_times(random.Random(seed), shape)) for seed in (1, 2)
    ]
    recording = new_recording(shape, 1, 2, {})
    step = simulate_step(
        shape, policy, conditions_by_replica, gradient_sync_ns=70, recording=recording
    )
    runs = [play(shape, policy, conditions) for conditions in conditions_by_replica]
    last_ns = max(run.makespan_ns for run in runs)
    assert step.makespan_ns == last_ns + 70
    assert step.busy_ns == tuple(run.busy_ns for run in runs)
    divided = bubbles(frames_of(recording))
    assert divided.window_ns == step.makespan_ns
    assert divided.bubble_fraction == pytest.approx(step.bubble_fraction)
    assert min(rank.causes_ns[Cause.GRADIENT_SYNC] for rank in divided.ranks) >= 70


# The floor: no schedule is faster, and the best schedules of small cases often reach it.


# The floor by hand.

TWO_RANKS = Shape(2, 2)
TIMES = TaskTimes(
    forward=[[1, 2], [3, 1]], input_gradient=[[2, 2], [1, 4]], weight_gradient=[[1, 1], [1, 1]]
)


def up_and_down(sender: int, receiver: int, task: Task) -> int:
    return 10 if task.kind is Kind.F else 20


@pytest.mark.parametrize(
    ("kinds", "transfer", "expected"),
    [
        # Rank 1: 1 until its first forward arrives, its load of 4 + 7, then a backward of 3 on
        # rank 0.
        (
            WHOLE_BACKWARD,
            None,
            Floor(load_ns=11, way_ns=1 + 11 + 3, critical_path_ns=2 + 1 + 5 + 3),
        ),
        # Rank 1: its F and B take 4 + 5, then its W of 2 run while rank 0 runs its B and W.
        (SPLIT_BACKWARD, None, Floor(11, 1 + 9 + 3, 2 + 1 + 4 + 2 + 1)),
        (SPLIT_BACKWARD, up_and_down, Floor(11, 11 + 9 + 23, 2 + 10 + 1 + 4 + 20 + 2 + 1)),
        # Rank 1: 1 until its first forward arrives, and both of its forwards.
        (FORWARD_ONLY, None, Floor(4, 1 + 4, 1 + 3)),
        (FORWARD_ONLY, up_and_down, Floor(4, 11 + 4, 1 + 10 + 3)),
    ],
)
def test_the_floor_of_two_ranks(
    kinds: tuple[Kind, ...], transfer: Transfer | None, expected: Floor
) -> None:
    assert floor(replace(TWO_RANKS, kinds=kinds), TIMES, transfer) == expected
    assert expected.ns == expected.way_ns


def test_a_single_rank_takes_its_load_with_any_chunks() -> None:
    shape = Shape(1, 3, 4, kinds=SPLIT_BACKWARD)
    times = TaskTimes([[1, 2, 3]] * 4, [[4, 5, 6]] * 4, [[7, 8, 9]] * 4)
    assert floor(shape, times, up_and_down).ns == floor(shape, times).load_ns == 4 * 45


def test_long_weight_gradients_count_in_full_at_the_end() -> None:
    # Rank 1's W of 100 each outlast the last B and W of rank 0, 2 + 1.
    times = replace(TIMES, weight_gradient=[[1, 1], [100, 100]])
    assert floor(replace(TWO_RANKS, kinds=SPLIT_BACKWARD), times).way_ns == 1 + 9 + 200


def test_a_v_sends_nothing_at_its_turn() -> None:
    # Stages 0 to 3 are on ranks 0, 1, 1, 0, so stages 1 and 2 exchange no messages.
    shape = Shape(2, 1, 2, Placement.V)
    times = TaskTimes([[1]] * 4, [[2]] * 4, [[0]] * 4)
    assert floor(shape, times, up_and_down).critical_path_ns == 4 * 3 + 2 * 10 + 2 * 20
    # The only microbatch is on each rank twice, so the critical path is the floor.
    assert floor(shape, times) == Floor(load_ns=6, way_ns=1 + 6 + 2, critical_path_ns=12)
    assert floor(shape, times).ns == 12
    # In a loop, on ranks 0, 1, 0, 1, they do.
    loop = replace(shape, placement=Placement.LOOP)
    assert floor(loop, times, up_and_down).critical_path_ns == 4 * 3 + 3 * 10 + 3 * 20


# The floor against all schedules.


def best_makespan(shape: Shape, times: TaskTimes, message: int) -> int:
    """Return the least makespan over all schedules, with links that are never busy.

    Dynamic programming over the sets of tasks that may have run: each set has the states that no
    other state of the set dominates.
    """
    tasks = [task for rank in range(shape.num_ranks) for task in shape.tasks_of(rank)]
    time_of = times.by_kind(split=shape.splits_backward)

    def awaited(ran: frozenset[Task]) -> list[Task]:
        """Return the tasks that have run and whose output another rank still needs."""
        return sorted(task for task in ran if is_sent(task) and shape.receiver(task) not in ran)

    def is_sent(task: Task) -> bool:
        receiver = shape.receiver(task)
        return receiver is not None and shape.rank_of(receiver.stage) != shape.rank_of(task.stage)

    # A state: the time at which each rank is free, and the end of each task that is still needed.
    ways: dict[frozenset[Task], set[tuple[int, ...]]] = {frozenset(): {(0,) * shape.num_ranks}}
    for _ in tasks:
        longer: defaultdict[frozenset[Task], set[tuple[int, ...]]] = defaultdict(set)
        for ran, of_ran in ways.items():
            came = awaited(ran)
            for task in tasks:
                if task in ran or not ran.issuperset(shape.prerequisites(task)):
                    continue
                then = ran | {task}
                still = awaited(then)
                rank, sender = shape.rank_of(task.stage), shape.sender(task)
                time = time_of[task.kind][task.stage][task.microbatch]
                for way in of_ran:
                    free, ends = list(way), dict(zip(came, way[shape.num_ranks :], strict=True))
                    arrival = ends[sender] + message if sender in ends else 0  # pyright: ignore[reportArgumentType]
                    free[rank] = ends[task] = max(free[rank], arrival) + time
                    longer[then].add((*free[: shape.num_ranks], *(ends[each] for each in still)))
        ways = {ran: set(_undominated(of_ran)) for ran, of_ran in longer.items()}
    (of_all,) = ways.values()
    return min(max(way) for way in of_all)


def _undominated(ways: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for way in sorted(ways):
        if not any(all(a <= b for a, b in zip(each, way, strict=True)) for each in found):
            found.append(way)
            yield way


ONE_CHUNK = [Shape(2, 2), Shape(2, 3), Shape(3, 2)]
CHUNKS = [Shape(1, 2, 2), Shape(2, 2, 2), Shape(2, 2, 2, Placement.V)]
"""These shapes have few enough tasks to try every schedule."""


def best_and_floor(shape: Shape, seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    rows = [
        [
            [rng.randint(1, 9) for _ in range(shape.num_microbatches)]
            for _ in range(shape.num_stages)
        ]
        for _ in Kind
    ]
    times, message = TaskTimes(*rows), rng.choice([0, 3])
    return best_makespan(shape, times, message), floor(shape, times, lambda *_: message).ns


@pytest.mark.parametrize("kinds", [FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD])
@pytest.mark.parametrize("shape", [*ONE_CHUNK, *CHUNKS])
def test_the_best_of_all_schedules_is_not_below_the_floor(
    shape: Shape, kinds: tuple[Kind, ...]
) -> None:
    for seed in range(3):
        best, least = best_and_floor(replace(shape, kinds=kinds), seed)
        assert least <= best


@pytest.mark.parametrize("kinds", [FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD])
@pytest.mark.parametrize("shape", ONE_CHUNK)
def test_with_one_chunk_the_best_schedule_often_reaches_the_floor(
    shape: Shape, kinds: tuple[Kind, ...]
) -> None:
    found = [best_and_floor(replace(shape, kinds=kinds), seed) for seed in range(10)]
    assert sum(best == least for best, least in found) >= 2


# The floor against simulated steps.


def makespan_and_floor(case: Case) -> tuple[int, Floor]:
    """Simulate a step with any hint, bound, group, links and delays; return its time and floor."""
    rng = random.Random(case.seed)
    message = rng.choice([0, 10, 200])
    latest = rng.choice([0, 50])
    times = random_times(rng, case.shape)

    def transfer(sender: int, receiver: int, task: Task) -> int:
        return message * (1 + sender) + task.microbatch

    conditions = StepConditions(
        times,
        transfer if message else None,
        lambda _rank, _start, _task, time: time + rng.choice([0, 0, 100]),
        num_members=case.num_members,
        lateness=lambda _member, _task: rng.randint(0, latest),
        agreement_ns=rng.choice([0, 20]) if case.num_members > 1 else 0,
    )
    policy = case.policy(case.order)
    run = play(case.shape, policy, conditions)
    return run.makespan_ns, floor(case.shape, times, conditions.transfer)


@examples(quick=100, thorough=2000)
@given(SEEDS)
def test_no_simulated_step_is_below_its_floor(seed: int) -> None:
    makespan_ns, least = makespan_and_floor(random_case(seed))
    assert 0 < least.load_ns <= least.way_ns <= least.ns <= makespan_ns


@examples(quick=50, thorough=500)
@given(SEEDS)
def test_no_simulated_step_over_blocking_links_is_below_its_floor(seed: int) -> None:
    rng = random.Random(seed)
    order = ORDERS[rng.choice(["1f1b", "zb-h1"])].for_shape(
        Shape(rng.randint(1, 6), rng.randint(1, 12))
    )
    times, message = random_times(rng, order.shape), rng.choice([0, 10, 200])
    conditions = StepConditions(times, lambda *_: message, blocking=True)
    run = play(order.shape, Policy(order, order, Dispatch.FIXED), conditions)
    assert floor(order.shape, times, conditions.transfer).ns <= run.makespan_ns


# The paper's bound (tests/properties/test_steps.py compares steps with it).


def test_the_paper_s_bound_is_refused_for_chunks() -> None:
    with pytest.raises(UsageError) as refusal:
        paper_bound_ns(Shape(2, 2, 2), TIMES)
    assert str(refusal.value) == (
        "the paper's bound is for one chunk per rank, not 2; "
        "compare with the floor, or use --chunks 1"
    )


def test_the_paper_s_bound_by_hand() -> None:
    # The forwards end at 1 and 3 on rank 0, and at 4 and 5 on rank 1. The backwards end at 2 and 7
    # on rank 1, and at 5 and 10 on rank 0. Microbatch 1's forward and microbatch 0's backward take
    # 1 more on rank 0 than on the last rank.
    assert paper_bound_ns(TWO_RANKS, TIMES) == 5 + 10 + 1 + 1
    # With swapped ranks: 3 and 4, 4 and 6; 3 and 6, 5 and 11. Only the first forward and the last
    # backward take longer on the first rank, and these two do not count.
    swapped = TaskTimes(TIMES.forward[::-1], TIMES.input_gradient[::-1], TIMES.weight_gradient)
    assert paper_bound_ns(TWO_RANKS, swapped) == 6 + 11
