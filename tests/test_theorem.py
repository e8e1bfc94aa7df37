"""The paper's bound (section 7) on a readiness-first step: one chunk a rank, messages in no time,
no backpressure, any costs. In whole nanoseconds, so that nothing is rounded.

    C  <=  forwards + backwards + sum_{j=1}^{M-1} (F^j_max - F^j_last)
                                + sum_{j=0}^{M-2} (B^j_max - B^j_last)

`forwards` is the makespan of the forwards alone, `backwards` that of the backwards alone with all
their inputs there from the start; F^j_max is the longest forward of microbatch j on any stage,
F^j_last the one on the last stage.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given

from rrfp.schedule.dispatcher import Dispatch, Dispatcher
from rrfp.schedule.hints import TURNS, hint_named, kinds_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from tests.cases import SEEDS
from tests.effort import examples
from tests.virtual_time import Node, play


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of each task, by stage and microbatch."""

    of: dict[Kind, list[list[int]]]

    @property
    def shape(self) -> Shape:
        forwards = self.of[Kind.F]
        return Shape(num_ranks=len(forwards), num_microbatches=len(forwards[0]))

    def duration(self, _node: Node, task: Task) -> int:
        return self.of[task.kind][task.stage][task.microbatch]


def random_costs(seed: int) -> Costs:
    """Costs of F, B and W that spread little or much, by task, by stage and by microbatch."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randint(1, 8), rng.randint(1, 16)
    sigma = rng.choice([0.0, 0.1, 0.5, 2.0])
    by_stage = [rng.choice([1, 1, 1, 3]) for _ in range(num_stages)]
    by_microbatch = [rng.choice([1, 1, 1, 5]) for _ in range(num_microbatches)]
    return Costs(
        {
            kind: [
                [
                    1 + int(100 * of_stage * of_microbatch * rng.lognormvariate(0, sigma))
                    for of_microbatch in by_microbatch
                ]
                for of_stage in by_stage
            ]
            for kind in Kind
        }
    )


def makespan(name: str, costs: Costs, dispatch: Dispatch = Dispatch.READY) -> int:
    hint = hint_named(name, costs.shape)
    shape = replace(costs.shape, kinds=kinds_of(hint))
    ranks = range(shape.num_ranks)
    deciders = [[Dispatcher(shape, rank, hint, dispatch=dispatch)] for rank in ranks]
    return play(shape, deciders, costs.duration).makespan_ns


class Bound(NamedTuple):
    makespans: int
    sums: int


def bound(costs: Costs, *, splits_backward: bool) -> Bound:
    forwards = costs.of[Kind.F]
    backwards = costs.of[Kind.B]
    if splits_backward:
        backwards = [
            [b + w for b, w in zip(*rows, strict=True)]
            for rows in zip(backwards, costs.of[Kind.W], strict=True)
        ]
    last = len(forwards) - 1
    num_microbatches = len(forwards[0])
    sums = sum(
        max(row[j] for row in forwards) - forwards[last][j] for j in range(1, num_microbatches)
    ) + sum(
        max(row[j] for row in backwards) - backwards[last][j] for j in range(num_microbatches - 1)
    )
    return Bound(one_way_makespan(forwards) + one_way_makespan(backwards[::-1]), sums)


def one_way_makespan(times: Sequence[Sequence[int]]) -> int:
    """A pipeline of one direction, every microbatch there at the start; its first stage first."""
    ends = [0] * len(times[0])
    for row in times:
        free_at = 0
        for j, time in enumerate(row):
            free_at = ends[j] = max(free_at, ends[j]) + time
    return max(ends)


@examples(quick=100, thorough=2000)
@given(SEEDS)
def test_bf_keeps_the_paper_s_bound(seed: int) -> None:
    costs = random_costs(seed)
    assert makespan("bf", costs) <= sum(bound(costs, splits_backward=False))


@examples(quick=100, thorough=2000)
@given(SEEDS)
def test_bfw_keeps_it_with_b_and_w_as_the_backward(seed: int) -> None:
    costs = random_costs(seed)
    assert makespan("bfw", costs) <= sum(bound(costs, splits_backward=True))


def test_one_stage_and_equal_times_take_what_the_bound_says() -> None:
    alone = Costs({kind: [[2, 3, 4]] for kind in Kind})
    assert bound(alone, splits_backward=True) == (27, 0)
    assert makespan("bfw", alone) == 27
    equal = Costs({kind: [[5] * 6] * 4 for kind in Kind})
    assert bound(equal, splits_backward=False) == (2 * 9 * 5, 0)
    assert makespan("bf", equal) == 2 * 9 * 5


@pytest.mark.parametrize(("name", "seed"), [("bf", 8), ("bfw", 307)])
def test_the_bound_without_its_sums_does_not_hold(name: str, seed: int) -> None:
    costs = random_costs(seed)
    limit = bound(costs, splits_backward=TURNS[name].splits_backward)
    assert limit.makespans < makespan(name, costs) <= sum(limit)


def test_a_fixed_order_does_not_keep_the_bound() -> None:
    costs = random_costs(6)
    assert makespan("1f1b", costs, Dispatch.FIXED) > sum(bound(costs, splits_backward=False))
