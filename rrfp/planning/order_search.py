"""A local search over orders of entry, from the pyramid.

A neighbour of the best order known swaps two microbatches, moves one, or reverses a segment. It is
simulated under the same draws of noise as the best one, draw by draw, and dropped as soon as it is
no better on average: most neighbours cost one or two simulations. What survives all draws becomes
the best. Each neighbour begins with another draw, so that none of them alone decides what is
dropped. What the draws together flatter is found out at the end, on draws that the search never
saw.

A search can be stopped after any neighbour. It depends on what it knows and on the number of its
simulations only, not on the machine.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from rrfp.schedule.admission import Admit, pyramid
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import order_by_costs, weights_ns
from rrfp.simulate.costs.model import Costs, Floats, StepCosts
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.jitter import LARGEST_SIGMA, Jitter, lognormals
from rrfp.simulate.step import play
from rrfp.trace.records import NS_PER_S

# What a planner knows of a step before it begins, and the step simulated on that knowledge.


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A step as far as it is known, its microbatches in the order of the data. It can be pickled:
    another process may plan it."""

    shape: Shape
    """Its kinds are those of the policy's hint."""
    policy: Policy
    costs: StepCosts
    """What tasks are expected to take."""
    noise: float
    """By how much real times differ from that: the standard deviation of their logarithm."""
    key: tuple[int | str, ...]
    """Of the planner's draws. They are of no step that is played."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together (tensor parallelism)."""
    blocking: bool = False
    """Transfers block the compute path."""
    budgets: tuple[int, ...] = ()
    """Bounds in bytes, by pipeline rank, in the place of the policy's; empty: the policy's."""

    @property
    def pyramid(self) -> tuple[int, ...]:
        """The order to begin with: light, heavy, light."""
        return tuple(pyramid(weights_ns(self.costs.times)))


class NoisySteps:
    """A known step in any order of entry, under numbered draws of its noise.

    A draw gives each task of the data its factor, wherever its microbatch enters: so two orders
    differ by what they do, and not by their luck.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        times = known.costs.times
        rows = (times.forward, times.input_gradient, times.weight_gradient)
        self._times = np.array(rows, dtype=np.float64)
        """By kind, stage and microbatch."""
        self._drawn: dict[int, Floats] = {}
        self.num_simulations = 0

    @property
    def is_noisy(self) -> bool:
        """Whether draws differ."""
        return self._known.noise > 0

    def makespan_ns(self, order: Sequence[int], draw: int) -> int:
        """How long the step takes in this order under a draw."""
        known, costs = self._known, self._known.costs
        links, sizes = costs.links, costs.sizes
        forward, input_gradient, weight_gradient = self._noisy(draw)[:, :, order].tolist()
        if links.num_bytes:
            links = costs.permuted(order).links
        world = StepConditions(
            TaskTimes(forward, input_gradient, weight_gradient),
            expected=costs.permuted(order).times if known.policy.waits else None,
            transfer=None if links.is_free else links,
            blocking=known.blocking,
            num_members=known.num_members,
            sizes=None if sizes is None else sizes.permuted(order),
            budgets=known.budgets,
            # A binding order leaves nothing to agree on.
            agreement_ns=0 if known.policy.dispatch is Dispatch.FIXED else costs.agreement_ns,
        )
        self.num_simulations += 1
        return play(known.shape, known.policy, world).makespan_ns

    def _noisy(self, draw: int) -> Floats:
        """The times under a draw, in whole nanoseconds."""
        if draw not in self._drawn:
            factors = lognormals(
                self._times.size, self._known.noise, *self._known.key, "plan", draw
            )
            noisy = self._times * factors.reshape(self._times.shape)
            self._drawn[draw] = np.rint(noisy).astype(np.int64)
        return self._drawn[draw]


Order = tuple[int, ...]

NUM_SIMULATIONS = 400
"""The default, which gains half of what eight times as many do."""

_DRAWS = 8
"""Draws that a neighbour must pass."""
_CHECKS = 8
"""Fresh draws on which the best order is compared with the pyramid."""
_CHECKING_SHARE = 8
"""Small searches check on fewer draws, with at most this part of their simulations."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An order of entry, and what it was chosen by."""

    order: Order
    num_candidates: int
    """Orders that were simulated, the pyramid among them."""
    predicted_ns: float
    """The mean time of the step in this order, under the planner's noise."""
    pyramid_ns: float
    """Likewise in the pyramid's; never less."""


class Search:
    """One search. Every call of `improve` tries another order."""

    def __init__(self, known: Known) -> None:
        self._steps = NoisySteps(known)
        self._num_draws = _DRAWS if self._steps.is_noisy else 1
        self.pyramid = self.best = known.pyramid
        self._best_ns: dict[int, int] = {}
        """What the best order takes, by draw."""
        self._pyramid_ns: dict[int, int] = {}
        self._first = 0
        """The draw that the next neighbour is tried under first."""
        self._random = random.Random(f"plan {known.key}")
        self.num_candidates = 1

    @property
    def num_simulations(self) -> int:
        return self._steps.num_simulations

    @property
    def can_improve(self) -> bool:
        """Whether there is another order than the pyramid."""
        return len(self.pyramid) > 1

    def improve(self) -> bool:
        """Try a neighbour of the best order; whether it became the best."""
        order = self._neighbour()
        self.num_candidates += 1
        first, self._first = self._first, (self._first + 1) % self._num_draws
        taken_ns: dict[int, int] = {}
        excess_ns = 0
        for place in range(self._num_draws):
            draw = (first + place) % self._num_draws
            taken_ns[draw] = self._steps.makespan_ns(order, draw)
            excess_ns += taken_ns[draw] - self._of_best(draw)
            if excess_ns >= 0:
                return False
        if self.best == self.pyramid:
            self._pyramid_ns |= self._best_ns
        self.best, self._best_ns = order, taken_ns
        return True

    @property
    def estimate(self) -> Plan:
        """The order that an improvement has just found, by the draws that it was found with, which
        flatter it."""
        predicted_ns = fmean(self._best_ns.values())
        pyramid_ns = fmean(self._pyramid_ns[draw] for draw in self._best_ns)
        return Plan(self.best, self.num_candidates, predicted_ns, max(predicted_ns, pyramid_ns))

    @property
    def num_checks(self) -> int:
        """Fresh draws on which a search of this length checks its best order."""
        if not self._steps.is_noisy:
            return 1
        return max(1, min(_CHECKS, self.num_simulations // (2 * _CHECKING_SHARE)))

    def plan(self) -> Plan:
        """The best order so far, or the pyramid where that is no worse under fresh draws. It takes
        up to two simulations for each check."""
        first = self._num_draws if self._steps.is_noisy else 0
        draws = range(first, first + self.num_checks)
        pyramid_ns = fmean(self._of_pyramid(draw) for draw in draws)
        best_ns = pyramid_ns
        if self.best != self.pyramid:
            best_ns = fmean(self._steps.makespan_ns(self.best, draw) for draw in draws)
        if best_ns >= pyramid_ns:
            return Plan(self.pyramid, self.num_candidates, pyramid_ns, pyramid_ns)
        return Plan(self.best, self.num_candidates, best_ns, pyramid_ns)

    def _of_best(self, draw: int) -> int:
        if draw not in self._best_ns:
            self._best_ns[draw] = self._steps.makespan_ns(self.best, draw)
        return self._best_ns[draw]

    def _of_pyramid(self, draw: int) -> int:
        if draw not in self._pyramid_ns:
            self._pyramid_ns[draw] = self._steps.makespan_ns(self.pyramid, draw)
        return self._pyramid_ns[draw]

    def _neighbour(self) -> Order:
        order = list(self.best)
        one, other = self._two(len(order))
        match self._below(3):
            case 0:
                order[one], order[other] = order[other], order[one]
            case 1:
                order.insert(other, order.pop(one))
            case _:
                first, last = sorted((one, other))
                order[first : last + 1] = order[first : last + 1][::-1]
        return tuple(order)

    def _two(self, num: int) -> tuple[int, int]:
        """Two different places."""
        one, other = self._below(num), self._below(num - 1)
        return one, other + (other >= one)

    def _below(self, num: int) -> int:
        # Only `random` itself gives the same numbers under every version of Python.
        return int(self._random.random() * num)


def plan_entry(
    known: Known,
    num_simulations: int = NUM_SIMULATIONS,
    is_over: Callable[[], bool] = lambda: False,
) -> Plan:
    """Plan the order in which a step's microbatches enter, with so many simulations; before each
    order, `is_over` is asked whether to stop.

    Raises UsageError for a hold with which the step could get stuck, and RrfpError for a binding
    order that does.
    """
    search = Search(known)
    while (
        search.can_improve
        and search.num_simulations + 2 * search.num_checks < num_simulations
        and not is_over()
    ):
        search.improve()
    return search.plan()


# What a planner knows of a step whose costs are modelled, and whose jitter is drawn when it is
# played.


_OF_DELAYS = 0.1
"""Noise that stands for delays and stops, which hit few tasks and cannot be foreseen."""


def known_of(
    costs: Costs,
    jitter: Jitter,
    policy: Policy,
    shape: Shape,
    seed: int,
    replica: int,
    num_members: int = 1,
    *,
    blocking: bool = False,
) -> Known:
    """What is known of a replica's step: its costs, and how much jitter there is, but not which.

    Raises UsageError for costs that are not known before the step.
    """
    of_step = costs.step(shape, seed, replica)
    order_by_costs(of_step, Admit.PLAN, 0)
    return Known(
        shape=shape,
        policy=policy,
        costs=replace(of_step, links=jitter.links(of_step.links)),
        noise=noise_of(jitter, shape),
        key=(seed, replica),
        num_members=num_members,
        blocking=blocking,
    )


@lru_cache(maxsize=64)
def noise_of(jitter: Jitter, shape: Shape) -> float:
    """The standard deviation of the logarithm of the factors that jitter puts on times. Which
    factors a step will meet, it does not say."""
    least = _OF_DELAYS if jitter.delays_tasks else 0.0
    if not jitter.factors:
        return least
    seconds = [[NS_PER_S] * shape.num_microbatches] * shape.num_stages
    times = jitter.times(TaskTimes(seconds, seconds, seconds), shape, 0, 0)
    # What is the same for all of a stage's tasks is no noise.
    spreads = [
        np.log(np.maximum(row, 1)).var()
        for rows in (times.forward, times.input_gradient, times.weight_gradient)
        for row in rows
    ]
    return min(max(least, math.sqrt(float(np.mean(spreads)))), LARGEST_SIGMA)
