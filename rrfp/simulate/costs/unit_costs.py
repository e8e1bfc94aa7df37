"""Costs by unit: a model's embedding, its layers in their order, and its head.

So costs can be cut into other stages, or into other microbatches. A unit takes the same time on
every rank, apart from the rank's speed: layers that move from a slow rank get faster, and layers
that move to it slower. The module is apart from `model` because it imports NumPy, which the help of
a command must not wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import StepCosts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """The costs of a step by unit: the embedding, each layer, the head.

    Arrays are [units, microbatches], with two units more than layers; embedding and head may be
    zero.
    """

    times_ns: dict[Kind, Floats]
    """Nanoseconds of F, B and W on a rank of speed 1."""
    activations: Floats | None
    """Activation bytes from F on; None if the costs do not include memory."""
    pending_w: Floats | None
    """Bytes from B until W; None: all of them."""
    rest: StepCosts
    """Links, agreement and the rest, for these microbatches; its times and sizes do not count."""


class Layered(Protocol):
    """Costs that tell a model's layers apart."""

    @property
    def num_layers(self) -> int: ...

    @property
    def fixed_ns(self) -> dict[Kind, Floats] | None:
        """The part of the task times by unit that does not depend on the microbatch's size,
        [units]; None if not known."""
        ...

    def slowness(self, num_ranks: int) -> Sequence[float]:
        """Return the factor on all times of each pipeline rank; 1 is usual."""
        ...

    def units(self, num_ranks: int, num_microbatches: int, seed: int, replica: int) -> UnitCosts:
        """Return the costs of one step by unit. Raises UsageError if the costs are of another
        number of ranks or microbatches."""
        ...
