"""Settings as they are declared, the files that users name, and layouts.

A setting is declared once, by `setting` or by `rrfp.schedule.policy.knob`. Options of the command
line, TOML files and validation derive from the declaration.
"""

import hashlib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from rrfp.errors import UsageError
from rrfp.schedule.admission import (
    Admission,
    Admit,
    AdmitAcross,
    Balancing,
    parse_admission,
    parse_assignments,
)
from rrfp.schedule.hints import Hint, OrderFile
from rrfp.schedule.named_hints import AUTO, HINTS, hint_named
from rrfp.schedule.policy import KNOBS, Knob, one_of

# Small text files that a user names, and fingerprints of files of any size.


_MOST_BYTES = 2**28
"""Far more than any order needs; a larger file was named by mistake."""


def means_a_file(text: str, *suffixes: str) -> bool:
    """Return True if a text that might be a name is a path: it ends in one of `suffixes`, or a file
    or directory of that name exists. False for an empty text, and if the system cannot look it
    up."""
    path = Path(text)
    try:
        return bool(text) and (path.suffix in suffixes or path.exists())
    except (OSError, ValueError):  # not a valid path on this system
        return False


def read_text(path: str, what: str) -> str:
    """Read a UTF-8 file, without its byte order mark; `what` names the kind of file in errors.

    Raises UsageError for a file that is not regular, cannot be read, is not UTF-8, or exceeds 256
    MiB.
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
    """Return the SHA-256 of a file's contents, in hexadecimal. Raises OSError if it cannot be
    read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A hint, by its name or from an order file.


def resolve_hint(text: str, *, auto: bool = False) -> Hint:
    """Return the hint named `text`, or the order file at that path, which is read but not parsed.
    With `auto`, the name `auto` requests a choice during the run; without it, that name is an
    error.

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
    """Return the path of an order file: a text that is no hint's name and ends in .csv or exists.
    None for any other text."""
    return None if text in (AUTO.name, *HINTS) or not means_a_file(text, ".csv") else Path(text)


# An admission order, by its name or from an admission file.


def resolve_admission(text: str, num_microbatches: int | None = None) -> Admission:
    """Return the admission order named `text`, or parse the orders in the file at that path.

    Each line of a file must admit `num_microbatches` microbatches (None: as many as its first line
    does), for equally many replicas. Raises UsageError for an unknown name, an unreadable or empty
    file, or a line that does not admit every microbatch once.
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
    """Return the path of an admission file: a text that is no order's name and ends in .csv or .txt
    or exists. None for any other text."""
    is_file = text not in list(Admit) and means_a_file(text, ".csv", ".txt")
    return Path(text) if is_file else None


# The balancing of a global batch over the replicas, by a name or from an assignment file.


def resolve_balancing(text: str) -> Balancing:
    """Return the balancing named `text`, or parse the assignments in the file at that path.

    Raises UsageError for an unknown name, an unreadable or empty file, or a line that does not
    assign every item once and equally many to each replica.
    """
    if text in list(AdmitAcross):
        return AdmitAcross(text)
    if assignment_file(text) is None:
        raise UsageError(
            f"'{text}' does not say how to balance a global batch; choose "
            f"{' or '.join(AdmitAcross)}, or a file with a line per step"
        )
    return parse_assignments(read_text(text, "assignment file"), text)


def assignment_file(text: str) -> Path | None:
    """Return the path of an assignment file: a text that is no balancing's name and ends in .csv or
    .txt or exists. None for any other text."""
    is_file = text not in list(AdmitAcross) and means_a_file(text, ".csv", ".txt")
    return Path(text) if is_file else None


_MOST = 10_000
"""Letters of a layout without its abbreviations; more is a typing error."""
_EXAMPLE = "'Et*3|t*4|t*4|t*3L' or 3,4,4,3"


def parse_layout(text: str, name: str) -> tuple[int, ...]:
    """Return the number of layers of each stage, in model order, from numbers such as 3,4,4,3 or
    from Megatron's letters; `name` is what errors call the text.

    The letters: E embedding, t layer, L loss, | next stage; `t*4` and `(tt|)*2` repeat, and commas
    are ignored. Only t counts. Raises UsageError for anything else, and for letters that do not
    have one E at the start and one L at the end.
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
    """Format the layers of each stage in Megatron's notation, with the embedding in the first stage
    and the loss in the last: `Et*3|t*4|t|t*3L`."""
    stages = ["t" * layers if layers < 2 else f"t*{layers}" for layers in split]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _unrolled(text: str) -> str | None:
    """Expand the repetitions of a layout as Megatron does, those in parentheses first. None if the
    text and what its repetitions expand to have more than 10,000 letters."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if length > _MOST:
            return None
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text


# How a setting is declared.


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}
_METADATA = "declared"


@dataclass(frozen=True, slots=True)
class Must:
    """A constraint on a setting's value."""

    wording: str
    """The constraint in words, after "it must be"."""
    holds: Callable[[Any], bool]


AT_LEAST_1 = Must("at least 1", lambda value: value >= 1)
FINITE_ABOVE_0 = Must("a finite number above 0", lambda value: math.isfinite(value) and value > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One declared setting."""

    flag: str
    """The name as a keyword: `micro_batch_size`. The flag is `--micro-batch-size`. TOML files may
    use either spelling."""
    group: str = ""
    """The object of settings that holds it."""
    field: str
    """The attribute of the group."""
    kind: Any
    """int, float, bool, str, Path, a StrEnum, a list of one of these, or the declaration of a
    knob."""
    default: Any = None
    help: str
    in_run: bool = True
    """Whether the command runs a job; some values of a knob mean something there alone."""
    must: Must | None = None
    metavar: str | None = None
    panel: str | None = None
    """The part of the help screen that lists it. None: the one of its group."""
    is_common: bool = False
    """Whether a short help screen lists it, too."""
    least: float | None = None
    most: float | None = None
    """Bounds that the command line checks."""
    is_argument: bool = False
    """Whether it has a place on the command line instead of a flag."""
    completes: Callable[[str], Any] | None = None
    """Offers a shell how a text may go on. None: what the kind offers."""

    @property
    def spelled(self) -> str:
        """The flag's name on the command line, without the leading dashes."""
        return self.flag.replace("_", "-")

    @property
    def value_type(self) -> Any:
        """The type of a value on the command line: the kind itself, and for a knob its only type,
        or str if it takes values of several types."""
        if not isinstance(self.kind, Knob):
            return self.kind
        return self.kind.kinds[0] if len(self.kind.kinds) == 1 else str

    @property
    def default_described(self) -> Any:
        """The default as a JSON value; the default of a knob is converted, others are unchanged."""
        return self.kind.describe(self.default) if isinstance(self.kind, Knob) else self.default

    @property
    def help_text(self) -> str:
        """The help, followed by the default in brackets unless the text ends with a full stop."""
        return self.help if self.help.endswith(".") else f"{self.help} [{self.default}]."

    def read(self, value: Any) -> Any:
        """Convert a value from the command line if it is a text, and return any other value as it
        is.

        Raises UsageError for a text that is no number or not one of the choices, an invalid value
        of a knob, and an unknown hint. Only a knob checks that a number is in range.
        """
        if not isinstance(value, str):
            return value
        label = f"--{self.spelled}"
        kind = self.value_type
        if kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                raise UsageError(f"{label} is '{value}'; it takes {_TYPE_NAMES[kind]}") from None
        if isinstance(self.kind, Knob):
            return read_knob(self.kind, value, label, in_run=self.in_run)
        if is_choice(kind):
            return one_of(kind)(value, label, True)
        return Path(value) if kind is Path else value

    def read_toml(self, value: object, path: Path) -> Any:
        """Convert a value from a TOML file: a path's text becomes a Path, and an integer a float
        where a float is wanted. Choices and hints stay text. Raises UsageError if the type is
        wrong."""
        wanted = str if is_choice(self.kind) else self.kind
        if isinstance(self.kind, Knob):
            wanted = self.kind.kinds[-1]
            if type(value) in self.kind.kinds:
                return value
        if wanted is Path and isinstance(value, str):
            return Path(value)
        if wanted is float and type(value) is int:
            return float(value) if abs(value) < sys.float_info.max else math.inf
        if type(value) is not wanted:
            raise UsageError(
                f"{path} sets {self.spelled} to {value!r}; it takes "
                f"{_TYPE_NAMES.get(wanted, 'a string')}"
            )
        return value

    def check(self, value: Any) -> None:
        """Raise UsageError if a value violates the setting's own constraint (`must`). None
        passes."""
        if value is not None and self.must is not None and not self.must.holds(value):
            raise UsageError(f"--{self.spelled} is {value}; it must be {self.must.wording}")

    def check_keyword(self, value: object) -> None:
        """Raise UsageError if a keyword's number or bool has another type or violates `must`.
        Settings of other kinds pass, and so does None if it is the default."""
        if (value is None and self.default is None) or self.kind not in (int, float, bool):
            return
        numbers = (int, float) if self.kind is float else self.kind
        is_one = isinstance(value, numbers) and (self.kind is bool or not isinstance(value, bool))
        if not is_one or (self.must is not None and not self.must.holds(value)):
            wanted = _TYPE_NAMES[self.kind] if self.must is None else self.must.wording
            raise UsageError(f"{self.field} is {value!r}; it must be {wanted}")


def setting(default: Any, help_text: str, *, kind: Any = None, **declared: Any) -> Any:
    """Declare a field of a dataclass of settings; `declared_in` reads the declaration from the
    field's metadata.

    The default is appended to a help text that does not end with a full stop. `kind` replaces the
    field's annotation, and `flag` its name; the other keywords are those of `Declared`.
    """
    metadata = {_METADATA: {"kind": kind, "help": help_text, **declared}}
    return field(default=default, metadata=metadata)


def declared_in(group: str, of: type) -> Iterator[Declared]:
    """Yield the settings that a dataclass declares with `setting`, in the order of its fields;
    other fields are skipped. The kind is the field's annotation without None, unless one was
    declared."""
    annotations = typing.get_type_hints(of)
    for each in fields(of):
        if _METADATA not in each.metadata:
            continue
        metadata = dict(each.metadata[_METADATA])
        kind = metadata.pop("kind") or _without_none(annotations[each.name])
        flag = metadata.pop("flag", each.name)
        yield Declared(
            flag=flag,
            group=group,
            field=each.name,
            kind=kind,
            default=each.default,
            **metadata,
        )


def declared_knobs(group: str, *, in_run: bool) -> Iterator[Declared]:
    """Yield all knobs of a policy as settings of `group`. `in_run` selects the help text: for a
    command that runs a job, or for one that simulates."""
    for name, knob in KNOBS.items():
        yield Declared(
            flag=name,
            group=group,
            field=name,
            kind=knob,
            default=knob.default,
            in_run=in_run,
            help=knob.help_text(in_run=in_run),
            metavar=knob.metavar,
            panel=knob.panel,
            is_common=knob.is_common,
        )


def read_knob(knob: Knob, value: Any, label: str, *, in_run: bool = True) -> Any:
    """Parse the value of a knob if it is a text, and return any other value as it is.

    A hint may be the path of an order file, which is read here because `rrfp.schedule` reads no
    files. Unless `in_run`, `none` gives None for a knob with that default. Raises UsageError, in
    which the value is called `label`.
    """
    if value == "none" and knob.default is None and not in_run:
        return None
    if knob.name == "hint" and isinstance(value, str):
        return resolve_hint(value, auto=True)
    return knob.read(value, label, in_run=in_run)


def is_choice(kind: Any) -> bool:
    """Return True if a kind of setting is a class of names (a StrEnum)."""
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _without_none(annotation: Any) -> Any:
    """Return a union such as `int | None` without None, and any other annotation as it is."""
    if isinstance(annotation, types.UnionType):
        parts = [part for part in annotation.__args__ if part is not types.NoneType]
        return reduce(or_, parts)
    return annotation
