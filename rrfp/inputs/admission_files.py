"""Resolves an admission order from its name or from an admission file."""

from pathlib import Path

from rrfp.errors import UsageError
from rrfp.inputs.text_files import means_a_file, read_text
from rrfp.schedule.admission import Admission, Admit, parse_admission


def resolve_admission(text: str, num_microbatches: int | None = None) -> Admission:
    """The admission order named `text`, or the orders in the file at that path.

    Each line of a file must admit `num_microbatches` microbatches (None: as many as its first
    line does).

    Raises UsageError for an unknown name, an unreadable file, or a line that does not admit every
    microbatch once.
    """
    if text in list(Admit):
        return Admit(text)
    if admission_file(text) is None:
        raise UsageError(
            f"'{text}' is not an admission order; choose {', '.join(Admit)}, or a file with a line "
            "of microbatches per step"
        )
    return parse_admission(read_text(text, "admission file"), text, num_microbatches)


def admission_file(text: str) -> Path | None:
    """The path of an admission file, or None where `text` is a name."""
    is_file = text not in list(Admit) and means_a_file(text, ".csv", ".txt")
    return Path(text) if is_file else None
