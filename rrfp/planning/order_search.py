"""A local search over orders of entry, from the pyramid.

A neighbor of the best order swaps two microbatches, moves one, or reverses a segment. It is
simulated under the same draws of noise as the best one, draw by draw, and dropped as soon as it is
no better on average: most neighbors cost one or two simulations. A neighbor that passes all draws
becomes the best order. Each neighbor begins with another draw, so that no single draw decides.
Fresh draws at the end show how far the search has fitted its own draws.

A search can be stopped after any neighbor. Its result depends on the forecast and the number of
simulations only, not on the machine.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import fmean

import numpy as np

from rrfp.errors import RrfpError, UsageError
from rrfp.planning.planner_process import PlannerProcess
from rrfp.schedule.admission import pyramid
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import weights_ns
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.costs.unit_costs import Floats
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.jitter import lognormals
from rrfp.simulate.step import play
from rrfp.system import num_cores

# The step as a planner knows it before it begins, and simulations of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """The costs of a step as far as they are known before it begins, with its microbatches in the
    order of the data. It can be pickled, for a search in another process."""

    shape: Shape
    """With the kinds of the policy's hint."""
    policy: Policy
    costs: StepCosts
    """The expected costs of the tasks."""
    noise: float
    """The standard deviation of the logarithm of real times over expected ones."""
    key: tuple[int | str, ...]
    """Key of the planner's draws, disjoint from the seeds of simulated steps."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together (tensor parallelism)."""
    blocking: bool = False
    """Transfers block the compute path."""
    budgets: tuple[int, ...] = ()
    """Bounds in bytes, by pipeline rank, in the place of the policy's; empty: the policy's."""

    @property
    def pyramid(self) -> tuple[int, ...]:
        """The order that a search begins with: light, heavy, light, by the expected times over all
        stages."""
        return tuple(pyramid(weights_ns(self.costs.times)))


class NoisySteps:
    """Simulates a step in any order of entry, under numbered draws of the noise of its forecast.

    A draw has a factor for each task of the data, wherever its microbatch enters: so two orders
    differ by their own merit and not by their luck.
    """

    def __init__(self, forecast: StepForecast) -> None:
        self._forecast = forecast
        times = forecast.costs.times
        rows = (times.forward, times.input_gradient, times.weight_gradient)
        self._times = np.array(rows, dtype=np.float64)
        """By kind, stage and microbatch."""
        self._drawn: dict[int, Floats] = {}
        self.num_simulations = 0

    @property
    def is_noisy(self) -> bool:
        """True if draws differ."""
        return self._forecast.noise > 0

    def makespan_ns(self, order: Sequence[int], draw: int) -> int:
        """Simulate the step in this order under a numbered draw of noise, and return its time in
        ns. Each call counts in `num_simulations`."""
        forecast, costs = self._forecast, self._forecast.costs
        links, sizes = costs.links, costs.sizes
        forward, input_gradient, weight_gradient = self._noisy(draw)[:, :, order].tolist()
        if links.num_bytes:
            links = costs.permuted(order).links
        world = StepConditions(
            TaskTimes(forward, input_gradient, weight_gradient),
            expected=costs.permuted(order).times if forecast.policy.waits else None,
            transfer=None if links.is_free else links,
            blocking=forecast.blocking,
            num_members=forecast.num_members,
            sizes=None if sizes is None else sizes.permuted(order),
            budgets=forecast.budgets,
            # A binding order leaves nothing to agree on.
            agreement_ns=0 if forecast.policy.dispatch is Dispatch.FIXED else costs.agreement_ns,
        )
        self.num_simulations += 1
        return play(forecast.shape, forecast.policy, world).makespan_ns

    def _noisy(self, draw: int) -> Floats:
        """Return the times under a draw, in whole nanoseconds, by kind, stage and microbatch. Each
        draw is made once and kept."""
        if draw not in self._drawn:
            factors = lognormals(
                self._times.size, self._forecast.noise, *self._forecast.key, "plan", draw
            )
            noisy = self._times * factors.reshape(self._times.shape)
            self._drawn[draw] = np.rint(noisy).astype(np.int64)
        return self._drawn[draw]


Order = tuple[int, ...]

NUM_SIMULATIONS = 400
"""The default, which gains half of what eight times as many do."""

_DRAWS = 8
"""Draws that a neighbor must pass."""
_CHECKS = 8
"""Fresh draws on which the best order is compared with the pyramid."""
_CHECKING_SHARE = 8
"""Small searches check on fewer draws, with at most this part of their simulations."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An order of entry, and the figures of its search."""

    order: Order
    num_candidates: int
    """Orders that were simulated, the pyramid among them."""
    predicted_ns: float
    """The mean time of the step in this order, under the planner's noise."""
    pyramid_ns: float
    """The mean time in the pyramid's order, never less than `predicted_ns`."""

    def to_json(self) -> dict[str, object]:
        """Return the plan as the fields of a planner process' answer."""
        return {
            "order": self.order,
            "candidates": self.num_candidates,
            "predicted_ns": self.predicted_ns,
            "pyramid_ns": self.pyramid_ns,
        }


class Search:
    """One search. Each call of `improve` tries another order."""

    def __init__(self, forecast: StepForecast) -> None:
        self._steps = NoisySteps(forecast)
        self._num_draws = _DRAWS if self._steps.is_noisy else 1
        self.pyramid = self.best = forecast.pyramid
        self._best_ns: dict[int, int] = {}
        """The times of the best order, by draw."""
        self._pyramid_ns: dict[int, int] = {}
        self._first = 0
        """The draw under which the next neighbor is tried first."""
        self._random = random.Random(f"plan {forecast.key}")
        self.num_candidates = 1

    @property
    def num_simulations(self) -> int:
        """The number of simulations so far, with those of the pyramid and of checks."""
        return self._steps.num_simulations

    @property
    def can_improve(self) -> bool:
        """True if there are other orders than the pyramid: the step has two or more
        microbatches."""
        return len(self.pyramid) > 1

    def improve(self) -> bool:
        """Try a random neighbor of the best order. Returns True if it has become the best. It is
        dropped after the first draw by which its total time is no less than that of the best
        order."""
        order = self._neighbor()
        self.num_candidates += 1
        first, self._first = self._first, (self._first + 1) % self._num_draws
        times_ns: dict[int, int] = {}
        excess_ns = 0
        for place in range(self._num_draws):
            draw = (first + place) % self._num_draws
            times_ns[draw] = self._steps.makespan_ns(order, draw)
            excess_ns += times_ns[draw] - self._simulate_best(draw)
            if excess_ns >= 0:
                return False
        if self.best == self.pyramid:
            self._pyramid_ns |= self._best_ns
        self.best, self._best_ns = order, times_ns
        return True

    @property
    def estimate(self) -> Plan:
        """The order that an improvement has just found, with its times under the draws that chose
        it, which favor it."""
        predicted_ns = fmean(self._best_ns.values())
        pyramid_ns = fmean(self._pyramid_ns[draw] for draw in self._best_ns)
        return Plan(self.best, self.num_candidates, predicted_ns, max(predicted_ns, pyramid_ns))

    @property
    def num_checks(self) -> int:
        """Fresh draws on which a search of this length checks its best order: 8, fewer after less
        than 128 simulations, and 1 without noise."""
        if not self._steps.is_noisy:
            return 1
        return max(1, min(_CHECKS, self.num_simulations // (2 * _CHECKING_SHARE)))

    def plan(self) -> Plan:
        """Return the best order so far, or the pyramid where that is no worse under fresh draws
        (without noise, under the only draw). This takes up to two simulations for each check."""
        first = self._num_draws if self._steps.is_noisy else 0
        draws = range(first, first + self.num_checks)
        pyramid_ns = fmean(self._simulate_pyramid(draw) for draw in draws)
        best_ns = pyramid_ns
        if self.best != self.pyramid:
            best_ns = fmean(self._steps.makespan_ns(self.best, draw) for draw in draws)
        if best_ns >= pyramid_ns:
            return Plan(self.pyramid, self.num_candidates, pyramid_ns, pyramid_ns)
        return Plan(self.best, self.num_candidates, best_ns, pyramid_ns)

    def _simulate_best(self, draw: int) -> int:
        """Return the time of the best order under a draw, in ns; simulated once for each draw."""
        if draw not in self._best_ns:
            self._best_ns[draw] = self._steps.makespan_ns(self.best, draw)
        return self._best_ns[draw]

    def _simulate_pyramid(self, draw: int) -> int:
        """Return the time of the pyramid under a draw, in ns; simulated once for each draw."""
        if draw not in self._pyramid_ns:
            self._pyramid_ns[draw] = self._steps.makespan_ns(self.pyramid, draw)
        return self._pyramid_ns[draw]

    def _neighbor(self) -> Order:
        """Return a random neighbor of the best order: two microbatches swapped, one moved, or a
        segment reversed."""
        order = list(self.best)
        one, other = self._two_places(len(order))
        match self._below(3):
            case 0:
                order[one], order[other] = order[other], order[one]
            case 1:
                order.insert(other, order.pop(one))
            case _:
                first, last = sorted((one, other))
                order[first : last + 1] = order[first : last + 1][::-1]
        return tuple(order)

    def _two_places(self, num: int) -> tuple[int, int]:
        """Draw two different places."""
        one, other = self._below(num), self._below(num - 1)
        return one, other + (other >= one)

    def _below(self, num: int) -> int:
        """Draw an integer of 0 or more that is less than `num`."""
        # Only `random` itself gives the same numbers under every version of Python.
        return int(self._random.random() * num)


def plan_order(
    forecast: StepForecast,
    num_simulations: int = NUM_SIMULATIONS,
    is_over: Callable[[], bool] = lambda: False,
) -> Plan:
    """Plan the order in which a step's microbatches enter, with about `num_simulations`: the last
    order tried, and the checks, may exceed them by a few. Before each order, `is_over` is called,
    and stops the search if it returns True.

    Raises UsageError for a hold with which the step could get stuck, and RrfpError for a binding
    order that does.
    """
    search = Search(forecast)
    while (
        search.can_improve
        and search.num_simulations + 2 * search.num_checks < num_simulations
        and not is_over()
    ):
        search.improve()
    return search.plan()


# Plans of many steps, in one process per core.


_LEAST_SIMULATIONS = 500
"""Number of simulations, over all plans, below which starting processes takes longer than it
saves."""


def plan_all(
    steps: Sequence[StepForecast],
    num_simulations: int,
    finished: Callable[[], None] = lambda: None,
    num_processes: int | None = None,
) -> list[Plan]:
    """Plan each step, in planner processes that run at the same time (by default, one a core) and
    end before this returns; a single step, or few simulations, run in this process. The plans do
    not depend on the number of processes. `finished` is called after each. Raises as `plan_order`
    does."""
    num_processes = min(num_processes or num_cores(), len(steps))
    if num_processes < 2 or num_simulations * len(steps) < _LEAST_SIMULATIONS:
        plans = []
        for forecast in steps:
            plans.append(plan_order(forecast, num_simulations))
            finished()
        return plans
    processes = [PlannerProcess("plan_simulated_steps") for _ in range(num_processes)]
    free: SimpleQueue[PlannerProcess] = SimpleQueue()
    for process in processes:
        free.put(process)

    def plan(forecast: StepForecast) -> Plan:
        process = free.get()
        try:
            found = _plan_in(process, forecast, num_simulations)
        finally:
            # A waiting thread must get a process, if only to see that it has failed.
            free.put(process)
        finished()
        return found

    try:
        with ThreadPoolExecutor(num_processes) as pool:
            futures = [pool.submit(plan, forecast) for forecast in steps]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                # Running searches end at once, and so do the threads that wait for them.
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            process.close()


def _plan_in(process: PlannerProcess, forecast: StepForecast, num_simulations: int) -> Plan:
    """Let a process plan a step, wait for its answer and return the plan. Raises the UsageError or
    RrfpError that it answers, and RrfpError if it ends without an answer."""
    process.send((forecast, num_simulations), waits=True)
    fields, *_ = process.wait()
    if "error" in fields:
        error = UsageError if fields["kind"] == UsageError.__name__ else RrfpError
        raise error(fields["error"])
    return Plan(
        tuple(fields["order"]), fields["candidates"], fields["predicted_ns"], fields["pyramid_ns"]
    )
