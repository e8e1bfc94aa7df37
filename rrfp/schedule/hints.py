"""What a hint is: a non-binding ranking of ready tasks (paper section 5).

A dispatcher asks its hint for two things: `keys` rank tasks among each other, and `rounds` say
which kinds go first. To add a hint, write a class with the members of `Hint`, and add a line to
`HINTS` in `rrfp.schedule.named_hints`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Value

Tier = tuple[Kind, ...]
"""Kinds whose ready tasks compete by their keys. A tier gets its chance when no task of the tiers
before it may run (`Dispatcher._best`)."""


class WeightGradients(StrEnum):
    """When an order used as a hint runs the weight gradients that it splits off the backward."""

    IDLE = "idle"
    """Only when no forward or backward may run; the order ranks them among themselves."""
    RANKED = "ranked"
    """By their places in the order, like any other task."""


@dataclass(frozen=True, slots=True)
class Rounds(Value):
    """The tiers to try, in sequence, at each point of a round."""

    top: tuple[Tier, ...]
    """At the start of the step and of each round, and after a wait."""
    after: Mapping[Kind, tuple[Tier, ...]]
    """After a task of this kind; a kind that is not listed starts a new round."""

    def tiers(self, ran: Kind | None = None) -> tuple[Tier, ...]:
        """The tiers to try after a task of that kind, or, with None, at the top of a round.

        Here it is decided that weight gradients fill idle time: unless the hint ranks them among
        other tasks, they are the last tier, and run when nothing else may.
        """
        tiers = self.top if ran is None else self.after.get(ran, self.top)
        ranks_weight_gradients = any(Kind.W in tier for tier in tiers)
        return tiers if ranks_weight_gradients else (*tiers, (Kind.W,))


class Hint(Protocol):
    """A ranking of ready tasks."""

    @property
    def name(self) -> str: ...

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate tasks."""
        ...

    @property
    def ranks_weight_gradients(self) -> bool:
        """Whether weight gradients have places among the other tasks."""
        ...

    def on(self, shape: Shape) -> "Hint":
        """The hint for a pipeline of this shape; the shape's kinds are ignored. Raises UsageError,
        saying what to change, for a shape that the hint does not support."""
        ...

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """A key for each of a rank's tasks, in the order of `Shape.tasks_of`: an integer from 0 to
        the number of the rank's tasks - 1. Within a tier the smallest key wins."""
        ...

    def rounds(self, w: WeightGradients) -> Rounds:
        """Which kinds go first, and when."""
        ...


def kinds_of(hint: Hint) -> tuple[Kind, ...]:
    """The kinds of task that a training step has under this hint."""
    return SPLIT_BACKWARD if hint.splits_backward else WHOLE_BACKWARD
