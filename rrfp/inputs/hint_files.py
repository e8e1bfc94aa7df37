"""A hint by its name, or from the order file that the user names."""

from dataclasses import dataclass
from pathlib import Path

from rrfp.inputs.text_files import means_a_file, read_text
from rrfp.schedule.hints.hint import Hint, Rounds, WeightGradients
from rrfp.schedule.hints.table import HINTS, hint_named
from rrfp.schedule.order import Order, order_rounds, parse_order, splits
from rrfp.schedule.shape import Shape


@dataclass(frozen=True, slots=True)
class OrderFile:
    """The order in a file, for whatever shape a step turns out to have: a hint."""

    name: str
    """Its path."""
    text: str

    @property
    def splits_backward(self) -> bool:
        return splits(self.text, self.name)

    @property
    def ranks_weight_gradients(self) -> bool:
        return self.splits_backward

    def on(self, shape: Shape) -> Order:
        """Raises UsageError, with the line, for a file that is no order of this shape."""
        return parse_order(self.text, shape, self.name)

    def keys(self, shape: Shape, rank: int) -> list[int]:
        return self.on(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        return order_rounds(w)


def resolve_hint(text: str) -> Hint:
    """The hint named `text`, or the order in the file of that path.

    Raises UsageError for an unknown hint, with the list of those there are, and for a file that
    cannot be read.
    """
    return (
        hint_named(text)
        if order_file(text) is None
        else OrderFile(text, read_text(text, "order file"))
    )


def order_file(text: str) -> Path | None:
    """The order file that a hint's text is the path of; None for a name."""
    return None if text in HINTS or not means_a_file(text, ".csv") else Path(text)
