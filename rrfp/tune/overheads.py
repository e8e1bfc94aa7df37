"""Costs with the runtime's own time: what lies between two tasks, and what a message takes beyond
its costs."""

from dataclasses import dataclass, replace
from functools import lru_cache

from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.world import TaskTimes

_REMEMBERED = 64


@dataclass(frozen=True)
class WithOverheads:
    """A `Costs`: other costs, with the runtime's time as a part of every task and message."""

    costs: Costs
    task_ns: int
    message_ns: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_step", lru_cache(_REMEMBERED)(self._longer))

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        return self._step(shape, seed, replica)  # type: ignore[attr-defined,no-any-return]

    def _longer(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        found = self.costs.step(shape, seed, replica)
        times, links, more = found.times, found.links, self.task_ns
        # A backward that is not split is one task.
        of_weights = more if shape.splits_backward else 0
        return replace(
            found,
            times=TaskTimes(
                [[each + more for each in row] for row in times.forward],
                [[each + more for each in row] for row in times.input_gradient],
                [[each + of_weights for each in row] for row in times.weight_gradient],
            ),
            links=replace(links, latency_ns=links.latency_ns + self.message_ns),
        )
