"""Hints: non-binding rankings over ready tasks (paper section 5).

Two forms. `Turns` ask one direction after the other, in rounds (`bf`, `fb`) or by strict priority
(`b-first`, `f-first`); within a direction F prefers the smallest chunk and B the largest, then the
smallest microbatch. An `Order` ranks by place: the first entry that is ready is best.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.order import Order, gpipe, one_forward_one_backward
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind


@dataclass(frozen=True, slots=True)
class Turns:
    """Ask `first`, then the other direction; W only when neither has anything ready."""

    name: str
    first: Kind
    in_rounds: bool
    """A round runs one task of each direction that has one ready; else `first` always wins."""

    @property
    def second(self) -> Kind:
        return Kind.B if self.first is Kind.F else Kind.F


Hint = Turns | Order

TURNS = {
    turns.name: turns
    for turns in (
        Turns("bf", Kind.B, in_rounds=True),
        Turns("fb", Kind.F, in_rounds=True),
        Turns("b-first", Kind.B, in_rounds=False),
        Turns("f-first", Kind.F, in_rounds=False),
    )
}
ORDERS: dict[str, Callable[[Shape], Order]] = {"1f1b": one_forward_one_backward, "gpipe": gpipe}
HINT_NAMES = (*TURNS, *ORDERS)


def hint_named(name: str, shape: Shape) -> Hint:
    """The hint of that name for a pipeline of this shape; UsageError with the list otherwise."""
    if name in TURNS:
        return TURNS[name]
    if name in ORDERS:
        return ORDERS[name](shape)
    raise UsageError(
        f"'{name}' is neither a hint ({', '.join(HINT_NAMES)}) nor the path of an order file"
    )
