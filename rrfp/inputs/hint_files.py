"""Resolves a hint from its name or from an order file."""

from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.inputs.text_files import means_a_file, read_text
from rrfp.schedule.hints.auto import AUTO
from rrfp.schedule.hints.hint import Hint, Rounds, WeightGradients
from rrfp.schedule.hints.table import HINTS, hint_named
from rrfp.schedule.order import Order, order_rounds, parse_order, splits
from rrfp.schedule.shape import Shape


@dataclass(frozen=True, slots=True)
class OrderFile:
    """A hint: the order in a file, parsed once the step's shape is known."""

    name: str
    """The file's path."""
    text: str

    @property
    def splits_backward(self) -> bool:
        return splits(self.text, self.name)

    @property
    def ranks_weight_gradients(self) -> bool:
        return self.splits_backward

    def on(self, shape: Shape) -> Order:
        """Raises UsageError, with the line, if the file does not hold an order of this shape."""
        return parse_order(self.text, shape, self.name)

    def keys(self, shape: Shape, rank: int) -> list[int]:
        return self.on(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        return order_rounds(w)


def resolve_hint(text: str, *, auto: bool = False) -> Hint:
    """The hint named `text`, or the order in the file at that path; with `auto`, that name is the
    wish for a choice while the run goes on.

    Raises UsageError for an unknown hint, listing the known ones, and for an unreadable file.
    """
    if text == AUTO.name:
        if auto:
            return AUTO
        raise UsageError(
            f"hint auto is chosen while a run goes on, and nothing runs here; name one of "
            f"{', '.join(HINTS)}"
        )
    return (
        hint_named(text, (AUTO.name,) if auto else ())
        if order_file(text) is None
        else OrderFile(text, read_text(text, "order file"))
    )


def order_file(text: str) -> Path | None:
    """The path of an order file, or None where `text` is a name."""
    return None if text in (AUTO.name, *HINTS) or not means_a_file(text, ".csv") else Path(text)
