"""Hints that alternate between forwards and backwards, or strictly prefer one of them."""

from dataclasses import dataclass
from typing import Self

from rrfp.schedule.hints.hint import Rounds, WeightGradients
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.schedule.values import Value


@dataclass(frozen=True, slots=True)
class Alternation(Value):
    """Try `first`, then the other direction (paper section 5). Forwards prefer the smallest chunk
    (the largest if `deep`), backwards the largest; within a chunk the smallest microbatch wins."""

    name: str
    first: Kind
    in_rounds: bool
    """A round runs one task of each direction that has one ready; otherwise `first` always wins."""
    deep: bool = False
    """Forwards prefer the largest chunk, as backwards do, instead of the smallest (the paper's
    rule)."""
    splits_backward: bool = False

    @property
    def second(self) -> Kind:
        return Kind.B if self.first is Kind.F else Kind.F

    @property
    def ranks_weight_gradients(self) -> bool:
        return False

    def on(self, shape: Shape) -> Self:
        """Itself: it fits any shape."""
        return self

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Ranked by chunk, then microbatch."""
        num_chunks, num_microbatches = shape.num_chunks, shape.num_microbatches
        keys: list[int] = []
        for kind in shape.kinds:
            prefers_shallow = kind is Kind.F and not self.deep
            for chunk in range(num_chunks):
                preference = chunk if prefers_shallow else num_chunks - 1 - chunk
                start = preference * num_microbatches
                keys += range(start, start + num_microbatches)
        return keys

    def rounds(self, w: WeightGradients) -> Rounds:
        first, second = (self.first,), (self.second,)
        top = (first, second)
        if not self.in_rounds:
            return Rounds(top, {})
        return Rounds(top, {self.first: (second, first)})


BF = Alternation("bf", Kind.B, in_rounds=True)
BFW = Alternation("bfw", Kind.B, in_rounds=True, splits_backward=True)

ALTERNATIONS = {
    hint.name: hint
    for hint in (
        BF,
        Alternation("fb", Kind.F, in_rounds=True),
        Alternation("b-first", Kind.B, in_rounds=False),
        Alternation("f-first", Kind.F, in_rounds=False),
        BFW,
        Alternation("bf-deep", Kind.B, in_rounds=True, deep=True),
        Alternation("bfw-deep", Kind.B, in_rounds=True, deep=True, splits_backward=True),
    )
}
