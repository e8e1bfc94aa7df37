"""Reads dataclasses from TOML tables: fields are the keys, and their types say what is valid."""

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rrfp.errors import UsageError

MOST = 10**9
"""The largest number, unless its field says otherwise; a larger one is a typing error."""

_T = TypeVar("_T")


def ranged(least: float, most: float = MOST, **of_the_field: Any) -> Any:
    """A dataclass field for a number, or for a mapping to numbers, from `least` to `most`."""
    return field(metadata={"range": (least, most)}, **of_the_field)


def read_table(kind: type[_T], table: object, where: str) -> _T:
    """A `kind` read from a table; `where` is what errors call the table.

    Fields may be numbers (at least 0 unless `ranged`), strings, booleans, choices (a StrEnum),
    other such dataclasses, tuples of them (an array of tables) or mappings from names or choices to
    numbers; each may be optional. Raises UsageError for an unknown or missing key, and for a value
    of the wrong type or out of range.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}; it must be a table")
    types = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise UsageError(f"{where} has no '{key}'; it has {', '.join(known)}")
    for key, each in known.items():
        if key not in table and each.default is MISSING and each.default_factory is MISSING:
            raise UsageError(f"{where} lacks {key}; add it")
    values = {}
    for key, value in table.items():
        limits = known[key].metadata.get("range", (0, MOST))
        values[key] = _value(types[key], value, limits, key, where)
    return kind(**values)


def _value(kind: Any, value: object, limits: tuple[float, float], key: str, where: str) -> Any:
    """The value of the table's `key`, as the field's type `kind`."""
    if NoneType in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where}: {key} is {value!r}; write it as [[{key}]]")
        return tuple(
            read_table(get_args(kind)[0], each, f"{where}, [[{key}]] {number}")
            for number, each in enumerate(value, 1)
        )
    if origin is not None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}: {key} is {value!r}; it must be a table")
        names, numbers = get_args(kind)
        where = f"{where}, {key}"
        return {
            _value(names, name, limits, "a key", where): _value(numbers, each, limits, name, where)
            for name, each in value.items()
        }
    if is_dataclass(kind):
        return read_table(kind, value, f"{where}, [{key}]")  # type: ignore[arg-type]
    if issubclass(kind, StrEnum):
        return _choice(kind, value, key, where)
    if kind in (str, bool):
        if not isinstance(value, kind):
            wanted = "a text" if kind is str else "true or false"
            raise UsageError(f"{where}: {key} is {value!r}; it must be {wanted}")
        return value
    return _number(kind, value, limits, key, where)


def _choice(kind: type[StrEnum], value: object, key: str, where: str) -> StrEnum:
    if value not in tuple(kind):
        raise UsageError(f"{where}: {key} is {value!r}; it must be {' or '.join(kind)}")
    return kind(str(value))


def _number(
    kind: type, value: object, limits: tuple[float, float], key: str, where: str
) -> int | float:
    least, most = limits
    wanted = int if kind is int else int | float
    # NaN compares as false, and booleans are integers to Python; neither is accepted.
    if not isinstance(value, wanted) or isinstance(value, bool) or not least <= value <= most:
        what = "whole number" if kind is int else "number"
        raise UsageError(
            f"{where}: {key} is {value!r}; it must be a {what} from {least:g} to {most:g}"
        )
    return value
