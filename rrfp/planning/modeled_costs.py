"""The steps of a run whose costs are modeled: a source of costs that every rank knows before a
step begins, balanced over the replicas where that is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

import numpy as np

from rrfp.errors import UsageError
from rrfp.planning.order_search import StepForecast
from rrfp.schedule.admission import (
    Admission,
    Admit,
    Assignment,
    ListedAssignments,
    ListedOrders,
    Times,
    balance_batch,
)
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import Conditions, conditions, order_by_costs
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import LARGEST_SIGMA, Jitter
from rrfp.trace.records import NS_PER_S


class ModeledSteps:
    """The modeled steps of one replica. Every rank computes the same orders from them."""

    def __init__(
        self,
        costs: Costs,
        jitter: Jitter,
        admission: Admission,
        seed: int,
        shape: Shape,
        replica: int,
    ) -> None:
        """`seed` is that of step 0. `shape` has the kinds of the hint. `replica` is the number of
        the simulated replica."""
        self.shape = shape
        self._costs = costs
        self._jitter = jitter
        self._admission = admission
        self._seed = seed
        self._replica = replica
        self._planned: tuple[int, tuple[int, ...]] | None = None
        """A step, and its planned order."""

    def order(self, step: int) -> Sequence[int]:
        """Return the admission order of a step's microbatches: the order of the data, the listed
        one, or the pyramid of their modeled costs (also for `--admit plan`). Planned orders
        (`admit_as`) do not change it. Raises as `order_by_costs` does."""
        costs = self._costs.step(self.shape, self._seed + step, self._replica)
        return order_by_costs(costs, self._admission, step, self._replica)

    def admit_as(self, step: int, order: Sequence[int]) -> None:
        """Remember the planned order of one step, for its `conditions`. It replaces an earlier
        one."""
        self._planned = step, tuple(order)

    def forecast(self, step: int, policy: Policy, num_members: int) -> StepForecast:
        """Return the forecast of a step for a planner of this policy. Raises as `forecast_step`
        does."""
        return forecast_step(
            self._costs,
            self._jitter,
            policy,
            self.shape,
            self._seed + step,
            self._replica,
            num_members,
        )

    def assignment(self, step: int) -> Assignment:
        """The items of a step's global batch that each replica gets, in the order in which they
        enter. The costs must be `BalancedCosts`."""
        costs, shape, seed = self._costs, self.shape, self._seed + step
        assert isinstance(costs, BalancedCosts)
        return [
            [
                numbers[index]
                for index in order_by_costs(
                    costs.step(shape, seed, replica), self._admission, step, replica
                )
            ]
            for replica, numbers in enumerate(costs.assignment(shape, seed))
        ]

    def conditions(self, step: int, shape: Shape) -> Conditions:
        """Draw the costs and the jitter of a step of this shape, in its admission order: the order
        of `admit_as` if that was for this step."""
        admission, seed = self._admission, self._seed + step
        if self._planned is not None and self._planned[0] == step:
            admission = ListedOrders("plan", (self._planned[1],))
        return conditions(self._costs, self._jitter, admission, shape, seed, self._replica, step)


# Forecasts: jitter is drawn when a step is simulated or run.


_NOISE_OF_DELAYS = 0.1
"""Noise that stands for delays and stops, which hit few tasks and cannot be foreseen."""


def forecast_step(
    costs: Costs,
    jitter: Jitter,
    policy: Policy,
    shape: Shape,
    seed: int,
    replica: int,
    num_members: int = 1,
    *,
    blocking: bool = False,
) -> StepForecast:
    """Forecast a replica's step: its costs and the amount of its jitter, but not the jitter itself.

    Raises UsageError for costs that are not known before the step.
    """
    step_costs = costs.step(shape, seed, replica)
    order_by_costs(step_costs, Admit.PLAN, 0)
    return StepForecast(
        shape=shape,
        policy=policy,
        costs=replace(step_costs, links=jitter.links(step_costs.links)),
        noise=noise_of(jitter, shape),
        key=(seed, replica),
        num_members=num_members,
        blocking=blocking,
    )


@lru_cache(maxsize=64)
def noise_of(jitter: Jitter, shape: Shape) -> float:
    """Return the standard deviation of the logarithm of the factors by which jitter changes times,
    from one draw of them. It is at most `LARGEST_SIGMA`, at least 0.1 if jitter delays tasks, and 0
    without jitter."""
    least = _NOISE_OF_DELAYS if jitter.delays_tasks else 0.0
    if not jitter.factors:
        return least
    seconds = [[NS_PER_S] * shape.num_microbatches] * shape.num_stages
    times = jitter.times(TaskTimes(seconds, seconds, seconds), shape, 0, 0)
    # A factor that is the same for all of a stage's tasks is no noise.
    spreads = [
        np.log(np.maximum(row, 1)).var()
        for rows in (times.forward, times.input_gradient, times.weight_gradient)
        for row in rows
    ]
    return min(max(least, math.sqrt(float(np.mean(spreads)))), LARGEST_SIGMA)


# A global batch that is balanced over the replicas by the modeled times of its items.


_MOST_REMEMBERED = 2
"""Number of steps that are remembered, because every replica asks for its own part."""


@dataclass(frozen=True, slots=True)
class _BalancedStep:
    """A step of all replicas."""

    given: Sequence[StepCosts]
    joined: StepCosts
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class BalancedCosts:
    """A `Costs` in which every replica has the items that are assigned to it, out of the draws of
    all replicas."""

    given: Costs
    num_replicas: int
    listed: ListedAssignments | None = None
    """The assignments of a file; None: by the times of the items, ascending in each replica."""
    first_seed: int = 0
    """The seed of step 0, to find a step in a file."""
    _steps: dict[tuple[Shape, int], _BalancedStep] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of the items that are assigned to a replica, in the order in which they
        enter. The other costs (agreement, lateness, gradient reduction) remain the replica's own.

        Raises UsageError if the costs do not fit the shape, if they are not known before the step
        and no file assigns items, and if a file has another number of replicas or microbatches.
        """
        balanced = self._step(shape, seed)
        own = balanced.given[replica]
        return replace(
            balanced.joined.permuted(balanced.assignment[replica]),
            agreement_ns=own.agreement_ns,
            lateness_ns=own.lateness_ns,
            gradient_sync_ns=own.gradient_sync_ns,
        )

    def assignment(self, shape: Shape, seed: int) -> Assignment:
        """The numbers of the items that each replica gets in the step of this seed."""
        return self._step(shape, seed).assignment

    def _step(self, shape: Shape, seed: int) -> _BalancedStep:
        """Return the balanced step of all replicas; the last two steps are cached."""
        key = shape, seed
        if key not in self._steps:
            if len(self._steps) == _MOST_REMEMBERED:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = self._balance(shape, seed)
        return self._steps[key]

    def _balance(self, shape: Shape, seed: int) -> _BalancedStep:
        """Draw the items of all replicas and assign them to the replicas: as the file lists them,
        or else so that the times of the ranks are balanced. Raises as `step` does."""
        given = [self.given.step(shape, seed, replica) for replica in range(self.num_replicas)]
        joined = _joined(given)
        if self.listed is not None:
            step, num = seed - self.first_seed, shape.num_microbatches
            return _BalancedStep(given, joined, self.listed.of_step(step, self.num_replicas, num))
        if not joined.is_known:
            raise UsageError(
                "--admit-across replicas balances by what is known before the step, and these "
                "costs are drawn task by task; leave it out or choose other costs"
            )
        assignment = balance_batch(times_by_rank(joined.times, shape), self.num_replicas)
        return _BalancedStep(given, joined, assignment)


def without_balance(costs: Costs) -> Costs:
    """Return the costs of the items that the data give to each replica: those inside
    `BalancedCosts`, and any other costs unchanged."""
    return costs.given if isinstance(costs, BalancedCosts) else costs


def times_by_rank(times: TaskTimes, shape: Shape) -> list[Times]:
    """Return, for each microbatch, its time on each pipeline rank in ns, summed over F, B and W and
    over the rank's stages."""
    by_rank: list[list[Sequence[int]]] = [[] for _ in range(shape.num_ranks)]
    for rows in (times.forward, times.input_gradient, times.weight_gradient):
        for stage, row in enumerate(rows):
            by_rank[shape.rank_of(stage)].append(row)
    sums = [list(map(sum, zip(*rows, strict=True))) for rows in by_rank]
    return list(zip(*sums, strict=True))


def _joined(given: Sequence[StepCosts]) -> StepCosts:
    """Join the microbatches of all replicas in one step, whose other costs are those of the first
    replica. It has sizes only if all replicas have them."""
    first = given[0]
    sizes = [each.sizes for each in given if each.sizes is not None]
    return replace(
        first,
        times=TaskTimes(
            _joined_rows([each.times.forward for each in given]),
            _joined_rows([each.times.input_gradient for each in given]),
            _joined_rows([each.times.weight_gradient for each in given]),
        ),
        links=replace(
            first.links, num_bytes=list(chain.from_iterable(each.links.num_bytes for each in given))
        ),
        is_known=all(each.is_known for each in given),
        sizes=ActivationSizes(
            _joined_rows([each.activations for each in sizes]),
            _joined_rows([each.pending_w for each in sizes if each.pending_w is not None]) or None,
        )
        if len(sizes) == len(given)
        else None,
    )


def _joined_rows(tables: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Concatenate the rows of several tables: row n of the result has row n of each table."""
    return [list(chain.from_iterable(rows)) for rows in zip(*tables, strict=True)]
