"""A candidate: everything that `rrfp tune` may choose about a run."""

from dataclasses import dataclass, replace
from typing import Self

from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.knobs import IMPATIENT, Hold, Patience
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space."""

    hint: str
    dispatch: Dispatch = Dispatch.READY
    w: WeightGradients = WeightGradients.IDLE
    chunks: int = 1
    placement: Placement = Placement.LOOP
    split: tuple[int, ...] | None = None
    """Layers by stage, in model order; None where the costs do not tell layers apart."""
    hold: Hold | None = None
    """None under an order that binds."""
    limit: int | None = None
    """Of a run that was tuned without a hold."""
    admit: Admit = Admit.GIVEN
    patience: Patience = IMPATIENT
    joined: int = 1
    """So many of the given microbatches become one."""
    divided: int = 1
    """Each of the given microbatches becomes so many."""

    def microbatches(self, given: int) -> int:
        """How many there are, of `given` ones."""
        return given * self.divided // self.joined

    @property
    def policy(self) -> Policy:
        """Its policy; raises UsageError for parts that do not go together."""
        return Policy(
            HINTS[self.hint],
            None,
            self.dispatch,
            self.limit,
            self.hold,
            self.w,
            patience=self.patience,
        )

    @property
    def family(self) -> tuple[object, ...]:
        """What it has in common with those that differ from it in figures only."""
        return (self.hint, self.dispatch, self.w, self.chunks, self.placement)

    def with_split(self, split: tuple[int, ...]) -> Self:
        return replace(self, split=split)
