"""What a hint is: a non-binding ranking over ready tasks (paper section 5).

A dispatcher asks its hint two things. `keys` ranks the tasks of one kind among each other; `rounds`
says which kinds are asked first. To add a hint, write a class with these, and a line in
`rrfp.schedule.hints.table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind

Tier = tuple[Kind, ...]
"""Kinds whose ready tasks compete by their keys. A tier is asked when those before it have nothing
that may run."""


W_FILLS_IDLE_TIME: Tier = (Kind.W,)
"""The last tier of a round: weight gradients run when nothing else may."""


class WeightGradients(StrEnum):
    """When an order, used as a hint, runs the weight gradients that are split off the backward."""

    IDLE = "idle"
    """When neither a forward nor a backward may run; the order ranks them among themselves."""
    RANKED = "ranked"
    """By their places in the order, like any other task."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Which tiers are asked, in sequence."""

    top: tuple[Tier, ...]
    """At the start of the step, after a wait, and at the start of each round."""
    after: Mapping[Kind, tuple[Tier, ...]]
    """Once a task of that kind has run; a kind that is not named starts a new round."""


class Hint(Protocol):
    """A ranking over ready tasks."""

    @property
    def name(self) -> str: ...

    @property
    def splits_backward(self) -> bool:
        """Whether the weight gradients are tasks of their own."""
        ...

    @property
    def ranks_weight_gradients(self) -> bool:
        """Whether the weight gradients have places among the other tasks."""
        ...

    def on(self, shape: Shape) -> "Hint":
        """The hint for a pipeline of this shape, whose kinds do not count. Raises UsageError, with
        what to change, for a shape that the hint is not made for."""
        ...

    def keys(self, shape: Shape, rank: int) -> Sequence[int]:
        """The key of each of a rank's tasks, in the sequence of `Shape.tasks_of`: a whole number
        from 0 on, below the number of the rank's tasks; the smallest of a tier runs."""
        ...

    def rounds(self, w: WeightGradients) -> Rounds:
        """Which kinds are asked first."""
        ...


def kinds_of(hint: Hint) -> tuple[Kind, ...]:
    """The kinds of task in a training step under this hint."""
    return SPLIT_BACKWARD if hint.splits_backward else WHOLE_BACKWARD
