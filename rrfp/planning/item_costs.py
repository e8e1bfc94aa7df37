"""Estimated costs of a step's items, by which microbatches are sorted.

Imports no torch: names and functions are checked before any process is started.
"""

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from pathlib import Path
from typing import Any

from rrfp.errors import UsageError, first_line


class CostName(StrEnum):
    """What to count in an item, a mapping of tensors."""

    WORK = "work"
    """Places in the sequence, padding included, plus patches of images: each passes through the
    layers of its stages."""
    TOKENS = "tokens"
    """Places in the sequence that are not patches."""
    PATCHES = "patches"


@dataclass(frozen=True, slots=True)
class ItemCost:
    """A function of an item, with the name that its user knows."""

    name: str
    function: Callable[[Any], Any]

    def weigh(self, items: Sequence[Any]) -> list[float]:
        """The items' weights. Raises UsageError if one has no finite weight."""
        return [self._weigh(item, number) for number, item in enumerate(items)]

    def _weigh(self, item: Any, number: int) -> float:
        try:
            found = self.function(item)
            # Unpack a tensor or an array of one number.
            weight = found.item() if hasattr(found, "item") else found
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the cost {self.name} of microbatch {number} raised {_told(error)}; correct the "
                "function"
            ) from error
        if not isinstance(weight, Real) or not _is_finite(weight):
            told = f"{weight!r:.50}" if isinstance(weight, Real) else f"a {type(weight).__name__}"
            raise UsageError(
                f"the cost {self.name} of microbatch {number} is {told}; give a finite number"
            )
        return float(weight)


def resolve_cost(cost: str | Callable[[Any], Any] | None) -> ItemCost:
    """The cost of that name, or the function that the user passes or names as MODULE:FUNCTION; None
    means `CostName.WORK`.

    Raises UsageError for an unknown name and a function that cannot be imported.
    """
    if cost is None:
        cost = CostName.WORK
    if not isinstance(cost, str):
        return ItemCost(getattr(cost, "__name__", type(cost).__name__), cost)
    if cost in list(CostName):
        return ItemCost(cost, _COUNTS[CostName(cost)])
    if not _FUNCTION_NAME.fullmatch(cost):
        raise UsageError(
            f"'{cost}' is not a microbatch's cost; choose {', '.join(CostName)}, or MODULE:FUNCTION"
        )
    return ItemCost(cost, _imported(cost, "cost"))


def resolve_features(features: str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The function that the user passes or names as MODULE:FUNCTION, of what the size of an item's
    microbatch grows with; None if there is none. Raises UsageError for one that cannot be
    imported."""
    if not isinstance(features, str):
        return features
    if not _FUNCTION_NAME.fullmatch(features):
        raise UsageError(f"hold_features is '{features}'; write MODULE:FUNCTION")
    return _imported(features, "hold's features")


_FUNCTION_NAME = re.compile(r"[\w.]+:\w+")


def _imported(name: str, what: str) -> Callable[[Any], Any]:
    """The function MODULE:FUNCTION; `what` is what errors call it."""
    module_name, _, function_name = name.partition(":")
    try:
        with _current_directory_importable():
            function = getattr(importlib.import_module(module_name), function_name, None)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the module of the {what} {name} cannot be imported: {_told(error)}; correct it or "
            "name another one"
        ) from None
    if not callable(function):
        raise UsageError(
            f"{module_name} has no function '{function_name}'; name one that takes an item"
        )
    found: Callable[[Any], Any] = function
    return found


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Make it importable, as in a process of `python -m`."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def _is_finite(weight: Real) -> bool:
    try:
        return math.isfinite(weight)
    except OverflowError:
        return False


_TOKENS = ("tokens", "input_ids", "text")
"""Keys under which an item may have its tokens, in Megatron's loops and elsewhere."""


def _work(item: Any) -> int:
    return _num_places(item) + _num_patches(item)


def _tokens(item: Any) -> int:
    return _num_places(item) - _num_patches(item)


def _patches(item: Any) -> int:
    if not isinstance(item, Mapping) or "patches" not in item:
        raise UsageError(f"{_described(item)} no 'patches' to count; choose another admission cost")
    return _num_patches(item)


_COUNTS: dict[CostName, Callable[[Any], int]] = {
    CostName.WORK: _work,
    CostName.TOKENS: _tokens,
    CostName.PATCHES: _patches,
}


def _num_places(item: Any) -> int:
    key = next((key for key in _TOKENS if key in item), None) if isinstance(item, Mapping) else None
    if key is None:
        raise UsageError(
            f"{_described(item)} none of {', '.join(_TOKENS)}, whose size would be its weight; "
            "set admit_cost to a function that takes an item and returns a number"
        )
    return math.prod(item[key].shape)


def _num_patches(item: Mapping[str, Any]) -> int:
    """Each row of `patches` is a patch, and takes one place in the sequence."""
    return len(item["patches"]) if "patches" in item else 0


def _described(item: Any) -> str:
    return f"an item of the data iterator, a {type(item).__name__}, has"
