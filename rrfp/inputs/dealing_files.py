"""Resolves how a global batch is dealt from its name or from a file of dealings."""

from pathlib import Path

from rrfp.errors import UsageError
from rrfp.inputs.text_files import means_a_file, read_text
from rrfp.schedule.dealing import AdmitAcross, Dealing, parse_dealings


def resolve_dealing(text: str) -> Dealing:
    """The dealing named `text`, or those in the file at that path.

    Raises UsageError for an unknown name, an unreadable file, or a line that does not deal every
    item once and as many to each replica.
    """
    if text in list(AdmitAcross):
        return AdmitAcross(text)
    if dealing_file(text) is None:
        raise UsageError(
            f"'{text}' is no one to deal a global batch to; choose {' or '.join(AdmitAcross)}, or "
            "a file with a line per step"
        )
    return parse_dealings(read_text(text, "file of dealings"), text)


def dealing_file(text: str) -> Path | None:
    """The path of a file of dealings, or None where `text` is a name."""
    is_file = text not in list(AdmitAcross) and means_a_file(text, ".csv", ".txt")
    return Path(text) if is_file else None
