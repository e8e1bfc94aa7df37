"""An admission order by its name, or from the admission file that the user names."""

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admission, Admit, parse_admission
from rrfp.text_files import means_a_file, read_text


def resolve_admission(text: str, num_microbatches: int | None = None) -> Admission:
    """The admission order named `text`, or those in the file of that path, for steps of so many
    microbatches (None: of as many as its first line has).

    Raises UsageError for an unknown name, an unreadable file, or a line that does not admit every
    microbatch once.
    """
    if text in list(Admit):
        return Admit(text)
    if not means_a_file(text, ".csv", ".txt"):
        raise UsageError(
            f"'{text}' is not an admission order; choose {', '.join(Admit)}, or a file with a line "
            "of microbatches a step"
        )
    return parse_admission(read_text(text, "admission file"), text, num_microbatches)
