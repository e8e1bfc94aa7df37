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

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from rrfp.simulate.plan.known import Known, NoisySteps

Order = tuple[int, ...]

NUM_SIMULATIONS = 400
"""By default: half of what eight times as many gain (docs/performance.md)."""

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
