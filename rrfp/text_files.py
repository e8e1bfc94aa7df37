"""Small text files that a user names: orders of tasks and of microbatches."""

from pathlib import Path

from rrfp.errors import UsageError

_MOST_BYTES = 2**28
"""Far more than any order takes; a larger file is a slip."""


def means_a_file(text: str, *suffixes: str) -> bool:
    """Whether a text that might be a name is a path: it ends like one, or the file is there."""
    path = Path(text)
    try:
        return bool(text) and (path.suffix in suffixes or path.exists())
    except (OSError, ValueError):  # No path could be written like this.
        return False


def read_text(path: str, what: str) -> str:
    """The text of a file; `what` names its kind in errors.

    Raises UsageError for a file that cannot be read, is no UTF-8 text, or is huge.
    """
    try:
        with Path(path).open("rb") as file:
            octets = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"cannot read the {what} {path!r}: no file has such a name") from None
    if len(octets) > _MOST_BYTES:
        raise UsageError(
            f"the {what} {path} is larger than {_MOST_BYTES >> 20} MiB; name another one"
        )
    try:
        # A spreadsheet's CSV may begin with a byte order mark.
        return octets.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"cannot read the {what} {path}: it is not UTF-8 text") from None
