"""A hint by its name, or from the order file that the user names."""

from pathlib import Path

from rrfp.errors import UsageError
from rrfp.schedule.hints import HINT_NAMES, Hint, hint_named
from rrfp.schedule.order import parse_order
from rrfp.schedule.shape import Shape


def resolve_hint(text: str, shape: Shape) -> Hint:
    """The hint named `text`, or the order in the file of that path, for a pipeline of this shape.

    Raises UsageError for an unknown hint (with the list of those there are), an unreadable file,
    or an order that is not one of this shape (with its line).
    """
    path = Path(text)
    try:
        if not text or text in HINT_NAMES or not (path.suffix == ".csv" or path.exists()):
            return hint_named(text, shape)
        # A spreadsheet's CSV may begin with a byte order mark.
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the order file {text}: {reason}") from None
    return parse_order(content, shape, text)
