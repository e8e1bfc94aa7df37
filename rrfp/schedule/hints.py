"""Hints: non-binding rankings over ready tasks (paper section 5).

Two forms. `Turns` ask one direction after the other, in rounds (`bf`, `fb`) or by strict priority
(`b-first`, `f-first`); within a direction F prefers the smallest chunk and B the largest, then the
smallest microbatch. The `-deep` ones prefer the largest chunk in both directions. `bfw` splits the
backward, and runs W when neither direction has anything ready. An `Order` ranks by place: the first
entry that is ready is best.
"""

from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.order import Order
from rrfp.schedule.orders import ORDERS
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind


@dataclass(frozen=True, slots=True)
class Turns:
    """Ask `first`, then the other direction; W only when neither has anything ready."""

    name: str
    first: Kind
    in_rounds: bool
    """A round runs one task of each direction that has one ready; else `first` always wins."""
    deep: bool = False
    """Forwards prefer the largest chunk, as backwards do; else the smallest (the paper's rule)."""
    splits_backward: bool = False
    """The weight gradients are tasks of their own."""

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
        Turns("bfw", Kind.B, in_rounds=True, splits_backward=True),
        Turns("bf-deep", Kind.B, in_rounds=True, deep=True),
        Turns("bfw-deep", Kind.B, in_rounds=True, deep=True, splits_backward=True),
    )
}
HINT_NAMES = (*TURNS, *ORDERS)


def splits_backward(hint: Hint) -> bool:
    """Whether steps under this hint have weight gradients of their own."""
    return hint.splits_backward if isinstance(hint, Turns) else hint.shape.splits_backward


def kinds_of(hint: Hint) -> tuple[Kind, ...]:
    """The kinds of task in a training step under this hint."""
    return SPLIT_BACKWARD if splits_backward(hint) else WHOLE_BACKWARD


def hint_named(name: str, shape: Shape) -> Hint:
    """The hint of that name for a pipeline of this shape, whose backward is split as the hint
    says; UsageError, with the list, for a name that is none."""
    if name in TURNS:
        return TURNS[name]
    if name in ORDERS:
        return ORDERS[name](shape)
    raise UsageError(
        f"'{name}' is neither a hint ({', '.join(HINT_NAMES)}) nor the path of an order file"
    )
