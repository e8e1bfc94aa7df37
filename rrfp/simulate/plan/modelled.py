"""What a planner knows of a step whose costs are modelled, and whose jitter is drawn when it is
played."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.admission import order_by_costs
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.draws import LARGEST_SIGMA
from rrfp.simulate.jitter import Jitter
from rrfp.simulate.plan.known import Known
from rrfp.simulate.world import TaskTimes
from rrfp.trace.records import NS_PER_S

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
