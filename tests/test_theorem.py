"""The paper's bound (section 7) on a readiness-first step: one chunk a rank, messages in no time,
no backpressure, any times. In whole nanoseconds, so that nothing is rounded.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given

from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.step import play
from rrfp.simulate.time_bounds import floor, one_way_ns, paper_bound_ns
from rrfp.simulate.world import TaskTimes, World
from tests.cases import SEEDS
from tests.effort import examples
from tests.step_times import equal_times, random_times


def random_step(seed: int) -> tuple[Shape, TaskTimes]:
    rng = random.Random(seed)
    shape = Shape(rng.randint(1, 8), rng.randint(1, 16))
    return shape, random_times(rng, shape)


def makespan_ns(
    name: str, shape: Shape, times: TaskTimes, dispatch: Dispatch = Dispatch.READY
) -> int:
    hint = hint_named(name).on(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    policy = Policy(hint, order_of(hint, shape), dispatch)
    makespan = play(shape, policy, World(times)).makespan_ns
    assert floor(shape, times).ns <= makespan
    return makespan


@examples(quick=200, thorough=2000)
@given(SEEDS)
def test_bf_and_bfw_lie_between_the_floor_and_the_paper_s_bound(seed: int) -> None:
    shape, times = random_step(seed)
    for name in ("bf", "bfw"):
        assert makespan_ns(name, shape, times) <= paper_bound_ns(shape, times)


def test_one_stage_and_equal_times_take_what_the_bound_says() -> None:
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


def test_a_fixed_order_does_not_keep_the_bound() -> None:
    shape, times = random_step(6)
    assert makespan_ns("1f1b", shape, times, Dispatch.FIXED) > paper_bound_ns(shape, times)
