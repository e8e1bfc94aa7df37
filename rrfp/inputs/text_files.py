"""Reads the small text files that a user names, and fingerprints files of any size."""

import hashlib
from pathlib import Path

from rrfp.errors import UsageError

_MOST_BYTES = 2**28
"""Far more than any order needs; a larger file was named by mistake."""


def means_a_file(text: str, *suffixes: str) -> bool:
    """Whether a text that might be a name is a path: it has one of the suffixes, or exists."""
    path = Path(text)
    try:
        return bool(text) and (path.suffix in suffixes or path.exists())
    except (OSError, ValueError):  # not a valid path on this system
        return False


def read_text(path: str, what: str) -> str:
    """The text of a file; `what` names its kind in errors.

    Raises UsageError for a file that is not regular, cannot be read, is not UTF-8, or is huge.
    """
    # Reading a pipe could block forever, and the file is read twice.
    if means_a_file(path) and not (Path(path).is_file() or Path(path).is_dir()):
        raise UsageError(f"the {what} {path} is not a regular file; save it to one first")
    try:
        with Path(path).open("rb") as file:
            octets = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the {what} {path}: {error.strerror}; name another one"
        ) from None
    except ValueError:
        raise UsageError(
            f"cannot read the {what} {path!r}: no file has such a name; name another one"
        ) from None
    if len(octets) > _MOST_BYTES:
        raise UsageError(
            f"the {what} {path} is larger than {_MOST_BYTES >> 20} MiB; name another one"
        )
    try:
        # A spreadsheet's CSV may begin with a byte order mark.
        return octets.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(
            f"cannot read the {what} {path}: it is not UTF-8 text; name another one"
        ) from None


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
