"""What the core's values have in common."""

from dataclasses import fields
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

from rrfp.errors import UsageError


class Value:
    """The base of frozen dataclasses. They are pickled and copied by the arguments that make them:
    compiled, they have no other way to get their fields back."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        value: Any = self
        names = [each.name for each in fields(value) if each.init]
        return type(self), tuple([getattr(self, name) for name in names])


def whole_number(value: SupportsIndex, name: str) -> int:
    """A whole number of any library, such as numpy's or a tensor, as Python's own. Raises
    UsageError, in which it is called `name`, for anything else."""
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r:.50}; it must be a whole number") from None


def plain_integer(value: Any) -> object:
    """A whole number of any library as Python's own; anything else as it is."""
    if isinstance(value, bool):  # in a conditional expression, compiled, it would be a number
        return value
    try:
        return index(value)
    except TypeError:
        return value


def plain_real(value: object) -> object:
    """A number of any library as Python's own; anything else as it is."""
    if isinstance(plain_integer(value), int) or not isinstance(value, SupportsFloat):
        return plain_integer(value)
    try:
        return float(value)
    except (TypeError, ValueError):  # several numbers
        return value
