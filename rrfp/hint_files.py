"""A hint by its name, or from the order file that the user names."""

from pathlib import Path

from rrfp.schedule.hints import HINT_NAMES, Hint, hint_named
from rrfp.schedule.order import parse_order
from rrfp.schedule.shape import Shape
from rrfp.text_files import means_a_file, read_text


def resolve_hint(text: str, shape: Shape) -> Hint:
    """The hint named `text`, or the order in the file of that path, for a pipeline of this shape.

    Raises UsageError for an unknown hint (with the list of those there are), an unreadable file,
    or an order that is not one of this shape (with its line).
    """
    if order_file(text) is None:
        return hint_named(text, shape)
    return parse_order(read_text(text, "order file"), shape, text)


def order_file(text: str) -> Path | None:
    """The order file that a hint's text is the path of; None for a name."""
    return None if text in HINT_NAMES or not means_a_file(text, ".csv") else Path(text)
