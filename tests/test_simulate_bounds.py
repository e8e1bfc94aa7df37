"""The floor: no schedule is faster, and small ones come down to it."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from rrfp.errors import UsageError
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.step import play
from rrfp.simulate.time_bounds import Floor, floor, paper_bound_ns
from rrfp.simulate.world import TaskTimes, Transfer, World
from tests.cases import SEEDS, Case, random_case
from tests.effort import examples
from tests.step_times import random_times

# By hand.

TWO_RANKS = Shape(2, 2)
TIMES = TaskTimes(
    forward=[[1, 2], [3, 1]], input_gradient=[[2, 2], [1, 4]], weight_gradient=[[1, 1], [1, 1]]
)


def up_and_down(sender: int, receiver: int, task: Task) -> int:
    return 10 if task.kind is Kind.F else 20


@pytest.mark.parametrize(
    ("kinds", "transfer", "expected"),
    [
        # Rank 1: 1 for a forward to come, its load of 4 + 7, then a backward of 3 on rank 0.
        (
            WHOLE_BACKWARD,
            None,
            Floor(load_ns=11, way_ns=1 + 11 + 3, critical_path_ns=2 + 1 + 5 + 3),
        ),
        # Rank 1: its F and B take 4 + 5, and then its W of 2 run beside the B and W of rank 0.
        (SPLIT_BACKWARD, None, Floor(11, 1 + 9 + 3, 2 + 1 + 4 + 2 + 1)),
        (SPLIT_BACKWARD, up_and_down, Floor(11, 11 + 9 + 23, 2 + 10 + 1 + 4 + 20 + 2 + 1)),
        # Rank 1: 1 for a forward to come, and both of its own.
        (FORWARD_ONLY, None, Floor(4, 1 + 4, 1 + 3)),
        (FORWARD_ONLY, up_and_down, Floor(4, 11 + 4, 1 + 10 + 3)),
    ],
)
def test_two_ranks(kinds: tuple[Kind, ...], transfer: Transfer | None, expected: Floor) -> None:
    assert floor(replace(TWO_RANKS, kinds=kinds), TIMES, transfer) == expected
    assert expected.ns == expected.way_ns


def test_a_rank_alone_takes_its_load_whatever_its_chunks() -> None:
    shape = Shape(1, 3, 4, kinds=SPLIT_BACKWARD)
    times = TaskTimes([[1, 2, 3]] * 4, [[4, 5, 6]] * 4, [[7, 8, 9]] * 4)
    assert floor(shape, times, up_and_down).ns == floor(shape, times).load_ns == 4 * 45


def test_own_weight_gradients_wait_for_the_end_and_then_count_whole() -> None:
    # Rank 1's W of 100 each outlast the way out of 2 + 1.
    times = replace(TIMES, weight_gradient=[[1, 1], [100, 100]])
    assert floor(replace(TWO_RANKS, kinds=SPLIT_BACKWARD), times).way_ns == 1 + 9 + 200


def test_a_v_sends_nothing_at_its_turn() -> None:
    # Stages 0 to 3 on ranks 0, 1, 1, 0: between 1 and 2 nothing is sent, there and back.
    shape = Shape(2, 1, 2, Placement.V)
    times = TaskTimes([[1]] * 4, [[2]] * 4, [[0]] * 4)
    assert floor(shape, times, up_and_down).critical_path_ns == 4 * 3 + 2 * 10 + 2 * 20
    # The microbatch is on each rank twice, and alone: the critical path is the floor.
    assert floor(shape, times) == Floor(load_ns=6, way_ns=1 + 6 + 2, critical_path_ns=12)
    assert floor(shape, times).ns == 12
    # In a loop, on ranks 0, 1, 0, 1, something is.
    loop = replace(shape, placement=Placement.LOOP)
    assert floor(loop, times, up_and_down).critical_path_ns == 4 * 3 + 3 * 10 + 3 * 20


# Against every schedule there is.


def best_makespan(shape: Shape, times: TaskTimes, message: int) -> int:
    """The least makespan over all schedules, links never busy: every set of tasks that can have
    run, with the ways to have run it of which none is better in every respect."""
    tasks = [task for rank in range(shape.num_ranks) for task in shape.tasks_of(rank)]
    time_of = times.by_kind(split=shape.splits_backward)

    def awaited(ran: frozenset[Task]) -> list[Task]:
        """What has run and another rank still waits for."""
        return sorted(task for task in ran if is_sent(task) and shape.receiver(task) not in ran)

    def is_sent(task: Task) -> bool:
        receiver = shape.receiver(task)
        return receiver is not None and shape.rank_of(receiver.stage) != shape.rank_of(task.stage)

    # A way to have run some tasks: when each rank is free, and when each awaited task ended.
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
                    arrival = ends[sender] + message if sender in ends else 0
                    free[rank] = ends[task] = max(free[rank], arrival) + time
                    longer[then].add((*free[: shape.num_ranks], *(ends[each] for each in still)))
        ways = {ran: set(_undominated(of_ran)) for ran, of_ran in longer.items()}
    (of_all,) = ways.values()
    return min(max(way) for way in of_all)


def _undominated(ways: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for way in sorted(ways):
        if not any(all(a <= b for a, b in zip(each, way, strict=True)) for each in kept):
            kept.append(way)
            yield way


ONE_CHUNK = [Shape(2, 2), Shape(2, 3), Shape(3, 2)]
CHUNKS = [Shape(1, 2, 2), Shape(2, 2, 2), Shape(2, 2, 2, Placement.V)]
"""Few enough tasks to try every schedule."""


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
def test_with_one_chunk_it_often_is_the_floor(shape: Shape, kinds: tuple[Kind, ...]) -> None:
    found = [best_and_floor(replace(shape, kinds=kinds), seed) for seed in range(10)]
    assert sum(best == least for best, least in found) >= 2


# Against the simulator, in large.


def makespan_and_floor(case: Case) -> tuple[int, Floor]:
    """Of a step under any hint, bound and group, over any links, with delays."""
    rng = random.Random(case.seed)
    message = rng.choice([0, 10, 200])
    latest = rng.choice([0, 50])
    times = random_times(rng, case.shape)

    def transfer(sender: int, receiver: int, task: Task) -> int:
        return message * (1 + sender) + task.microbatch

    world = World(
        times,
        transfer if message else None,
        lambda _rank, _start, _task, time: time + rng.choice([0, 0, 100]),
        num_members=case.num_members,
        lateness=lambda _member, _task: rng.randint(0, latest),
        agreement_ns=rng.choice([0, 20]) if case.num_members > 1 else 0,
    )
    policy = case.policy(case.order)
    run = play(case.shape, policy, world)
    return run.makespan_ns, floor(case.shape, times, world.transfer)


@examples(quick=100, thorough=2000)
@given(SEEDS)
def test_no_simulated_step_is_below_its_floor(seed: int) -> None:
    makespan_ns, least = makespan_and_floor(random_case(seed))
    assert 0 < least.load_ns <= least.way_ns <= least.ns <= makespan_ns


@examples(quick=50, thorough=500)
@given(SEEDS)
def test_nor_is_one_over_blocking_links(seed: int) -> None:
    rng = random.Random(seed)
    order = ORDERS[rng.choice(["1f1b", "zb-h1"])].on(Shape(rng.randint(1, 6), rng.randint(1, 12)))
    times, message = random_times(rng, order.shape), rng.choice([0, 10, 200])
    world = World(times, lambda *_: message, blocking=True)
    run = play(order.shape, Policy(order, order, Dispatch.FIXED), world)
    assert floor(order.shape, times, world.transfer).ns <= run.makespan_ns


# The paper's bound (tests/test_theorem.py holds steps against it).


def test_the_paper_s_bound_is_refused_for_chunks() -> None:
    with pytest.raises(UsageError) as refusal:
        paper_bound_ns(Shape(2, 2, 2), TIMES)
    assert str(refusal.value) == (
        "the paper's bound is for one chunk per rank, not 2; "
        "compare with the floor, or use --chunks 1"
    )


def test_the_paper_s_bound_by_hand() -> None:
    # The forwards end at 1, 3 on rank 0 and 4, 5 on rank 1; the backwards at 2, 7 on rank 1 and
    # 5, 10 on rank 0. Microbatch 1's forward takes 1 more on rank 0 than on the last, microbatch
    # 0's backward too.
    assert paper_bound_ns(TWO_RANKS, TIMES) == 5 + 10 + 1 + 1
    # The other way round 3, 4 and 4, 6; 3, 6 and 5, 11. The first forward and the last backward
    # take longer on the first rank: these two do not count.
    swapped = TaskTimes(TIMES.forward[::-1], TIMES.input_gradient[::-1], TIMES.weight_gradient)
    assert paper_bound_ns(TWO_RANKS, swapped) == 6 + 11
