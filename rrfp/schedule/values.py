"""What the core's values have in common."""

from dataclasses import fields
from typing import Any


class Value:
    """The base of frozen dataclasses. They are pickled and copied by the arguments that make them:
    compiled, they have no other way to get their fields back."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        value: Any = self
        names = [each.name for each in fields(value) if each.init]
        return type(self), tuple([getattr(self, name) for name in names])
