"""How a setting is declared: once, for the command line, for TOML files and for validation."""

import math
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from rrfp.errors import UsageError, did_you_mean
from rrfp.inputs.hint_files import resolve_hint
from rrfp.schedule.hints.hint import Hint
from rrfp.schedule.hold import Hold, parse_hold
from rrfp.schedule.patience.setting import Patience, parse_patience

_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}

_METADATA = "declared"


@dataclass(frozen=True, slots=True)
class Must:
    """A constraint on a setting's value."""

    wording: str
    """The constraint in words, after "it must be"."""
    holds: Callable[[Any], bool]


AT_LEAST_1 = Must("at least 1", lambda value: value >= 1)


@dataclass(frozen=True, slots=True)
class _Metadata:
    help: str
    must: Must | None
    flag: str | None
    metavar: str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """One declared setting."""

    flag: str
    """Its name as a keyword: `micro_batch_size`. The flag is `--micro-batch-size`; TOML files may
    use either spelling."""
    group: str
    field: str
    """Its attribute: `settings.<group>.<field>`."""
    kind: Any
    """int, float, bool, str, Path, a StrEnum, Hint, Hold, or Patience."""
    default: Any
    help: str
    must: Must | None
    metavar: str | None

    @property
    def spelled(self) -> str:
        """The flag's name on the command line, without the leading dashes."""
        return self.flag.replace("_", "-")

    @property
    def help_text(self) -> str:
        """Its help, with the default unless the text itself states it."""
        return self.help if self.help.endswith(".") else f"{self.help} [{self.default}]."

    def read(self, value: Any) -> Any:
        """Convert a number, a hint, a hold, a patience, a path or a choice given as text; any other
        value is returned as it is.

        Raises UsageError for a text that is no number or not one of the choices, and for an unknown
        hint.
        """
        if value is None or not isinstance(value, str):
            return value
        if self.kind is Hint:
            return resolve_hint(value, auto=True)
        if self.kind == Hold:
            return parse_hold(value, f"--{self.spelled}")
        if self.kind == Patience:
            return parse_patience(value, f"--{self.spelled}")
        if self.kind is Path:
            return Path(value)
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except ValueError:
                raise UsageError(
                    f"--{self.spelled} is '{value}'; it takes {_TYPE_NAMES[self.kind]}"
                ) from None
        if _is_choice(self.kind):
            if value not in list(self.kind):
                raise UsageError(
                    f"--{self.spelled} is '{value}'; it must be one of {', '.join(self.kind)}"
                    f"{did_you_mean(value, self.kind)}"
                )
            return self.kind(value)
        return value

    def read_toml(self, value: object, path: Path) -> Any:
        """Convert a value from a TOML file; raises UsageError if its type is wrong."""
        wanted = str if self.kind is Hint or _is_choice(self.kind) else self.kind
        if wanted in (Hold, Patience):
            wanted = int if type(value) is int else str
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
        """Raise UsageError if a value is out of the setting's range."""
        if value is not None and self.must is not None and not self.must.holds(value):
            raise UsageError(f"--{self.spelled} is {value}; it must be {self.must.wording}")


def setting(
    default: Any,
    help_text: str,
    *,
    must: Must | None = None,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a group of settings. The default is appended to a help text that does not end with
    a full stop. `flag` names the setting if its field has another name."""
    return field(default=default, metadata={_METADATA: _Metadata(help_text, must, flag, metavar)})


def declared_in(group: str, of: type) -> Iterator[Declared]:
    """The settings of a group, in the order of its fields."""
    hints = typing.get_type_hints(of)
    for each in fields(of):
        metadata: _Metadata = each.metadata[_METADATA]
        yield Declared(
            metadata.flag or each.name,
            group,
            each.name,
            _without_none(hints[each.name]),
            each.default,
            metadata.help,
            metadata.must,
            metadata.metavar,
        )


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        parts = [part for part in annotation.__args__ if part is not types.NoneType]
        return reduce(or_, parts)
    return annotation


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)
