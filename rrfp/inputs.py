"""How many layers each stage has, as a user writes it: in Megatron's notation for
`--pipeline-model-parallel-layout`, or as plain numbers."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admission, Admit, parse_admission
from rrfp.schedule.balance import AdmitAcross, Dealing, parse_dealings
from rrfp.schedule.hints import Hint, Rounds, WeightGradients
from rrfp.schedule.named_hints import AUTO, HINTS, hint_named
from rrfp.schedule.order import Order, order_rounds, parse_order, splits
from rrfp.schedule.shape import Shape

# Reads the small text files that a user names, and fingerprints files of any size.


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


# Resolves a hint from its name or from an order file.


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


# Resolves an admission order from its name or from an admission file.


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


# Resolves how a global batch is dealt from its name or from a file of dealings.


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


_MOST = 10_000
"""Letters of a layout without its abbreviations; more is a typing error."""
_EXAMPLE = "'Et*3|t*4|t*4|t*3L' or 3,4,4,3"


def parse_layout(text: str, name: str) -> tuple[int, ...]:
    """The layers of each stage, in model order; `name` is what errors call the text.

    Megatron's letters: E embedding, t layer, L loss, | next stage, `t*4` and `(tt|)*2` repeat, and
    commas are for the eye. Raises UsageError for anything else, and for an embedding or a loss that
    is not at its end.
    """
    if re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII):
        return tuple(map(int, text.split(",")))
    letters = _unrolled(text.replace(",", ""))
    if letters is None or set(letters) - set("EtL|"):
        raise UsageError(
            f"{name} is '{text:.60}'; write the layers of each stage, as in {_EXAMPLE}"
        )
    if letters[:1] + letters[-1:] != "EL" or letters.count("E") + letters.count("L") != 2:
        raise UsageError(
            f"{name} is '{text:.60}'; it must begin with the embedding, E, and end with the loss, "
            f"L, as in {_EXAMPLE}"
        )
    return tuple(stage.count("t") for stage in letters.split("|"))


def layout_string(split: Sequence[int]) -> str:
    """Layers by stage in Megatron's notation, as short as it is easy to read."""
    stages = ["t" * layers if layers < 2 else f"t*{layers}" for layers in split]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _unrolled(text: str) -> str | None:
    """The text without repetitions, as Megatron unrolls them: those in parentheses first; None for
    one that is far too long."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if length > _MOST:
            return None
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text
