"""Tests of random steps: none stalls, every bound holds, and every decision is as specified."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.schedule.hints import WeightGradients, kinds_of
from rrfp.schedule.named_hints import HINTS, ORDERS, hint_named
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import play
from rrfp.simulate.time_bounds import floor, one_way_ns, paper_bound_ns
from tests.analyze.simulated_runs import equal_times, random_times
from tests.properties.cases import (
    MAX_CHUNKS,
    MAX_MEMBERS,
    MAX_MICROBATCHES,
    MAX_RANKS,
    SEEDS,
    Case,
    cases,
    connected,
    examples,
    random_case,
)
from tests.properties.virtual_time import History, check_step


def check(case: Case, history: History) -> None:
    check_step(history, limit=case.bound_on_depth, hold=case.bound_on_held)


@pytest.mark.timeout(1800)
@examples(quick=200, thorough=20_000)
@given(cases())
def test_no_step_stalls_and_every_bound_holds(case: Case) -> None:
    check(case, case.play(case.dispatchers()))


@pytest.mark.timeout(1800)
@examples(quick=60, thorough=2_000)
@given(cases())
def test_every_instruction_matches_the_specification(case: Case) -> None:
    check(case, case.play(case.checked_dispatchers()))


@examples(quick=25, thorough=250)
@given(cases())
def test_the_same_stimuli_give_the_same_step(case: Case) -> None:
    first, second = (case.play(case.dispatchers()) for _ in range(2))
    assert first == second


def test_random_steps_are_of_every_kind() -> None:
    drawn = [random_case(seed) for seed in range(3000)]
    seen = Counter(
        kind
        for case in drawn
        for kind in (
            case.hint.name,
            case.dispatch,
            case.w,
            case.rule,
            case.shape.placement,
            ("ranks", case.shape.num_ranks),
            ("chunks", case.shape.num_chunks),
            ("members", case.num_members),
            ("groups", len(case.groups)),
            ("limit", case.bound_on_depth),
            ("spare slots", (case.bound_on_held or 0) - case.shape.num_chunks),
        )
    )
    assert {*HINTS, "random"} <= seen.keys()
    assert {
        Dispatch.READY,
        Dispatch.FIXED,
        *WeightGradients,
        *AgreementRule,
        *Placement,
    } <= seen.keys()
    assert {("limit", 1), ("limit", 2), ("spare slots", 0), ("spare slots", 1)} <= seen.keys()
    assert {("groups", number) for number in range(1, MAX_MEMBERS + 1)} <= seen.keys()
    largest = {"ranks": MAX_RANKS, "chunks": MAX_CHUNKS, "members": MAX_MEMBERS}
    for name, most in largest.items():
        numbers = {kind[1] for kind in seen if kind[0] == name}
        assert numbers == set(range(1, most + 1))
    assert max(case.shape.num_microbatches for case in drawn) == MAX_MICROBATCHES
    # Some cases have replicas that are coupled on some stages only.
    assert any(len({str(sets) for sets in case.collectives}) > 1 for case in drawn)


def test_members_that_share_any_collective_are_in_one_group() -> None:
    assert connected(3, []) == [[0], [1], [2]]
    assert connected(4, [[[0, 1], [2, 3]]]) == [[0, 1], [2, 3]]
    assert connected(4, [[[0, 1], [2], [3]], [[0], [1, 3], [2]]]) == [[0, 1, 3], [2]]
    assert connected(4, [[[0], [1], [2, 3]], [[0, 1], [2], [3]], [[0], [1, 2], [3]]]) == [
        [0, 1, 2, 3]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_the_largest_size_passes_all_checks(seed: int) -> None:
    case = random_case(seed, is_largest=True)
    check(case, case.play(case.dispatchers()))


# The paper's bound (section 7) on a readiness-first step with one chunk per rank, instant messages,
# no backpressure and any task times. Times are whole nanoseconds, so that nothing is rounded.


def random_step(seed: int) -> tuple[Shape, TaskTimes]:
    rng = random.Random(seed)
    shape = Shape(rng.randint(1, 8), rng.randint(1, 16))
    return shape, random_times(rng, shape)


def makespan_ns(
    name: str, shape: Shape, times: TaskTimes, dispatch: Dispatch = Dispatch.READY
) -> int:
    hint = hint_named(name).for_shape(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    policy = Policy(hint, order_of(hint, shape), dispatch)
    makespan = play(shape, policy, StepConditions(times)).makespan_ns
    assert floor(shape, times).ns <= makespan
    return makespan


@examples(quick=200, thorough=2000)
@given(SEEDS)
def test_bf_and_bfw_lie_between_the_floor_and_the_paper_s_bound(seed: int) -> None:
    shape, times = random_step(seed)
    for name in ("bf", "bfw"):
        assert makespan_ns(name, shape, times) <= paper_bound_ns(shape, times)


def test_the_bound_is_exact_for_one_stage_and_for_equal_times() -> None:
    alone, times = Shape(1, 3), TaskTimes([[2, 3, 4]], [[2, 3, 4]], [[2, 3, 4]])
    assert paper_bound_ns(alone, times) == 27
    assert makespan_ns("bfw", alone, times) == 27
    shape = Shape(4, 6)
    times = equal_times(shape, 5, 3, 2)
    assert paper_bound_ns(shape, times) == 2 * 9 * 5
    assert makespan_ns("bf", shape, times) == 2 * 9 * 5


@pytest.mark.parametrize(("name", "seed"), [("bf", 96), ("bfw", 307)])
def test_the_bound_without_its_sums_does_not_hold(name: str, seed: int) -> None:
    shape, times = random_step(seed)
    whole = times.by_kind(split=False)
    without_sums = one_way_ns(whole[Kind.F]) + one_way_ns(whole[Kind.B][::-1])
    assert without_sums < makespan_ns(name, shape, times) <= paper_bound_ns(shape, times)


def test_a_fixed_order_can_exceed_the_bound() -> None:
    shape, times = random_step(6)
    assert makespan_ns("1f1b", shape, times, Dispatch.FIXED) > paper_bound_ns(shape, times)


# Makespans in closed form from the literature, which the simulator must reproduce to the ns.
#
# Stages and microbatches are equal, links are free, and the order binds. F, B and W are the times
# of a rank's forward, input gradient and weight gradient; a whole backward is all in B.


RANKS = st.integers(1, 6)
TIMES = st.integers(1, 50)


def makespan_and_floor(
    name: str, shape: Shape, forward: int, input_gradient: int, weight_gradient: int = 0
) -> tuple[int, int]:
    """Simulate a step with these times of one chunk; return its makespan and floor in ns."""
    order = ORDERS[name].for_shape(shape)
    times = equal_times(order.shape, forward, input_gradient, weight_gradient)
    run = play(order.shape, Policy(order, order, Dispatch.FIXED), StepConditions(times))
    return run.makespan_ns, floor(order.shape, times).ns


@examples(quick=50, thorough=1000)
@given(ranks=RANKS, microbatches=st.integers(1, 20), f=TIMES, b=TIMES)
def test_gpipe_and_1f1b_fill_and_drain_once(ranks: int, microbatches: int, f: int, b: int) -> None:
    # Huang et al. 2019; Narayanan et al. 2021, section 2.2.1. It equals the floor, so no schedule
    # of whole backwards is faster.
    expected = (microbatches + ranks - 1) * (f + b)
    for name in ("gpipe", "1f1b"):
        shape = Shape(ranks, microbatches)
        assert makespan_and_floor(name, shape, f, b) == (expected, expected)


@examples(quick=50, thorough=500)
@given(ranks=RANKS, rounds=st.integers(1, 4), chunks=st.integers(2, 4), f=TIMES, b=TIMES)
def test_interleaving_divides_the_bubble_by_its_chunks(
    ranks: int, rounds: int, chunks: int, f: int, b: int
) -> None:
    # Narayanan et al. 2021, section 2.2.2: (N - 1)(F + B) / C. With f = F / C and b = B / C:
    shape = Shape(ranks, rounds * ranks, chunks)
    expected = shape.num_microbatches * chunks * (f + b) + (ranks - 1) * (f + b)
    assert makespan_and_floor("interleaved", shape, f, b) == (expected, expected)


@examples(quick=100, thorough=2000)
@given(ranks=RANKS, more=st.integers(0, 20), f=TIMES, b=TIMES, w=TIMES)
def test_zb_h1_has_its_paper_s_bubble_and_a_larger_one_if_w_is_longest(
    ranks: int, more: int, f: int, b: int, w: int
) -> None:
    # Qi et al. 2024 (ICLR), table 2: (N - 1)(F + B - W) for N or more microbatches, if W is no
    # longer than F and B. A longer W does not fill more of the bubble.
    shape = Shape(ranks, ranks + more)
    makespan, floor_ns = makespan_and_floor("zb-h1", shape, f, b, w)
    assert floor_ns <= makespan
    bubble = makespan - shape.num_microbatches * (f + b + w)
    assert bubble == (ranks - 1) * (f + b - min(f, b, w))


@examples(quick=30, thorough=500)
@given(ranks=st.integers(1, 12), more=st.integers(2, 12), time=TIMES)
def test_v_half_and_v_min_have_half_and_two_thirds_of_1f1b_s_bubble(
    ranks: int, more: int, time: int
) -> None:
    # Qi et al. 2024 (arXiv 2405.15362): about N/2M and 2N/3M of the load if F, B and W are equal.
    # In times of one chunk, which are half of a rank's, 1F1B idles for 6(N - 1).
    idle = {
        "v-half": max(ranks - 1, 3 * ranks - (4 if ranks % 2 else 7)),
        "v-min": max(ranks - 1, 4 * ranks - (5 if ranks % 3 else 7)),
    }
    shape = Shape(ranks, ranks + more, 2, Placement.V)
    for name, bubble in idle.items():
        makespan, floor_ns = makespan_and_floor(name, shape, time, time, time)
        assert floor_ns <= makespan == (6 * shape.num_microbatches + bubble) * time
