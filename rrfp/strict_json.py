"""Strictly decodes JSON from other processes: it has the expected structure, or raises ValueError.

Input is never executed, so a process that can write to the store can at most end the run.
"""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

# Parsing of JSON from an untrusted process.


def parsed(data: bytes | str) -> Any:
    """Decode JSON. Raises ValueError if it is invalid, or nested too deep to be read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


T = TypeVar("T")


def integer(value: object) -> int:
    """Return an integer as it is. Raises ValueError for any other value, also for true and 1.0."""
    # JSON's true and false are integers in Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{_short(value)} is not an integer")
    return value


def number(value: object) -> float:
    """Return a finite number as a float. Raises ValueError for any other value, also for true, and
    for an integer beyond the range of floats."""
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        return float(integer(value))
    except OverflowError:
        raise ValueError(f"{_short(value)} is too large") from None


def text(value: object) -> str:
    """Return a string as it is. Raises ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not text")
    return value


def integers(value: object) -> tuple[int, ...]:
    """Return a list of integers as a tuple. Raises ValueError for any other value."""
    return tuple(integer(item) for item in items(value))


def items(value: object, num_items: int | None = None) -> list[object]:
    """Return a list as it is. Raises ValueError for any other value, and unless the list has
    `num_items` items (None: any number)."""
    if not isinstance(value, list) or num_items not in (None, len(value)):
        raise ValueError(f"{_short(value)} is not a list of {num_items or 'items'}")
    return value


def mapping(value: object) -> dict[str, object]:
    """Return an object (a dict) with any members as it is. Raises ValueError for any other
    value."""
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} is not an object")
    return value


def member(value: object, name: str) -> object:
    """Return the member `name` of an object. Raises ValueError if it is missing, and for a value
    that is not an object."""
    if not isinstance(value, dict) or name not in value:
        raise ValueError(f"{_short(value)} has no '{name}'")
    return value[name]


_READERS: dict[Any, Callable[[object], Any]] = {
    int: integer,
    float: number,
    str: text,
    tuple[int, ...]: integers,
}


def instance(kind: type[T], value: object) -> T:
    """Make a dataclass from an object with exactly its fields, each an int, a float, a str or a
    tuple of ints. Raises ValueError for a missing or additional member, or one of a wrong type."""
    hints = get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise ValueError(f"{_short(value)} does not have the fields of {kind.__name__}")
    return kind(**{name: _READERS[hint](value[name]) for name, hint in hints.items()})


def _short(value: object) -> str:
    """Return the repr of a value for an error, cut to 40 characters."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
