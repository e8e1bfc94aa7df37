"""Strictly decodes JSON from other processes: it has the expected structure, or raises ValueError.

Input is never executed, so a process that can write to the store can at most end the run.
"""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

# Parsing of JSON from an untrusted process.


def parsed(data: bytes | str) -> Any:
    """The value. Raises ValueError for what is no JSON, and for what is nested too deep to be
    read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


T = TypeVar("T")


def integer(value: object) -> int:
    # JSON's true and false are integers in Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{_short(value)} is not an integer")
    return value


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, float) and math.isfinite(value):
        return value
    return float(integer(value))


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not text")
    return value


def integers(value: object) -> tuple[int, ...]:
    return tuple(integer(item) for item in items(value))


def items(value: object, num_items: int | None = None) -> list[object]:
    """A list, of `num_items` items if given."""
    if not isinstance(value, list) or num_items not in (None, len(value)):
        raise ValueError(f"{_short(value)} is not a list of {num_items or 'items'}")
    return value


def mapping(value: object) -> dict[str, object]:
    """An object with any members."""
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} is not an object")
    return value


def member(value: object, name: str) -> object:
    """An object's member of this name."""
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
    """A dataclass of such values, from an object with exactly its fields."""
    hints = get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise ValueError(f"{_short(value)} does not have the fields of {kind.__name__}")
    return kind(**{name: _READERS[hint](value[name]) for name, hint in hints.items()})


def _short(value: object) -> str:
    told = repr(value)
    return told if len(told) <= 40 else f"{told[:37]}..."
