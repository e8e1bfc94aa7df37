"""The hint that is chosen while a run goes on, by simulation (`rrfp.simulate.choice`)."""

from dataclasses import dataclass
from typing import Final

from rrfp.errors import UsageError
from rrfp.schedule.hints.hint import Hint, Rounds, WeightGradients
from rrfp.schedule.hints.table import HINTS, hint_named
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.values import Value

NAME: Final = "auto"


@dataclass(frozen=True, slots=True)
class AutoHint(Value):
    """The wish for a choice. As a hint it is the one to begin with, which whatever knows of no
    choice has as well, such as an evaluation."""

    first: str | None = None
    """The hint to begin with. None: `zb-v` on a V, `bfw` with one chunk, `bfw-deep` with several in
    a loop."""
    every: int = 50
    """Steps from one choice to the next."""
    waits: bool = False
    """Whether the step after a question waits for the answer: then it does not depend on the
    machine which steps have which hint, as far as their costs do not."""

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown hint, and for steps that leave none to measure."""
        if self.first is not None:
            hint_named(self.first)
        if self.every < 2:
            raise UsageError(
                f"hint auto is to choose every {self.every} steps, and it has to measure one "
                "first; set it to 2 or more"
            )

    @property
    def name(self) -> str:
        return NAME

    @property
    def splits_backward(self) -> bool:
        return self.first is None or HINTS[self.first].splits_backward

    @property
    def ranks_weight_gradients(self) -> bool:
        return False

    def on(self, shape: Shape) -> Hint:
        """The hint to begin with."""
        name = self.first
        if name is None and shape.placement is Placement.V:
            name = "zb-v"
        if name is None:
            name = "bfw" if shape.num_chunks == 1 else "bfw-deep"
        return HINTS[name].on(shape)

    def keys(self, shape: Shape, rank: int) -> list[int]:
        return self.on(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        raise TypeError("a choice of a hint is fitted to a shape before it steers anything")


AUTO: Final = AutoHint()
