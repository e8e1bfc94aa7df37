"""What a planner knows of a step before it begins, and the step simulated on that knowledge."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rrfp.schedule.admission import pyramid
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.admission import weights_ns
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.draws import Floats, lognormals
from rrfp.simulate.play import play
from rrfp.simulate.world import TaskTimes, World


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
        world = World(
            TaskTimes(forward, input_gradient, weight_gradient),
            expected=costs.permuted(order).times if known.policy.patience else None,
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
