"""Costs with every task longer or shorter by one factor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.world import TaskTimes


@dataclass(frozen=True, slots=True)
class ScaledCosts:
    """A `Costs`: other costs with their tasks' times multiplied; messages are unchanged."""

    costs: Costs
    factor: float

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        costs = self.costs.step(shape, seed, replica)
        times = costs.times
        return replace(
            costs,
            times=TaskTimes(
                self._rows(times.forward),
                self._rows(times.input_gradient),
                self._rows(times.weight_gradient),
            ),
        )

    def _rows(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[round(time_ns * self.factor) for time_ns in row] for row in rows]
