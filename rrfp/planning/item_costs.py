"""The weight of an item of the data, which sorts microbatches, and its features, by which times and
sizes are predicted.

Imports no torch: names and functions are checked before any process is started.
"""

import importlib
import itertools
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
    """The named weights of an item, a mapping of tensors."""

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
        """Return the items' weights. Raises UsageError if one has no finite weight."""
        return [self._weigh(item, number) for number, item in enumerate(items)]

    def _weigh(self, item: Any, number: int) -> float:
        """Return the weight of item `number` of the step. Raises UsageError if the function fails,
        or gives anything but a finite number."""
        try:
            found = self.function(item)
            # Unpack a tensor or an array of one number.
            weight = found.item() if hasattr(found, "item") else found
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the cost {self.name} of microbatch {number} raised {_described(error)}; correct "
                "the function"
            ) from error
        if not _is_finite(weight):
            value = f"{weight!r:.50}" if isinstance(weight, Real) else f"a {type(weight).__name__}"
            raise UsageError(
                f"the cost {self.name} of microbatch {number} is {value}; give a finite number"
            )
        return float(weight)


def resolve_cost(cost: str | Callable[[Any], Any] | None) -> ItemCost:
    """Return the cost of that name, or the function that the user passes or names as
    MODULE:FUNCTION; None means `CostName.WORK`.

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
    return ItemCost(cost, _import_function(cost, "cost"))


def resolve_features(features: str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return the function from an item to its features that the user passes or names as
    MODULE:FUNCTION, or None without one. Raises UsageError for another text, and a function that
    cannot be imported."""
    if not isinstance(features, str):
        return features
    if not _FUNCTION_NAME.fullmatch(features):
        raise UsageError(f"hold_features is '{features}'; write MODULE:FUNCTION")
    return _import_function(features, "hold's features")


_FUNCTION_NAME = re.compile(r"[\w.]+:\w+")


def _import_function(name: str, what: str) -> Callable[[Any], Any]:
    """Import the function MODULE:FUNCTION, also from the current directory; errors call it `what`.
    Raises UsageError if the module cannot be imported or has no such callable."""
    module_name, _, function_name = name.partition(":")
    try:
        with _current_directory_importable():
            function = getattr(importlib.import_module(module_name), function_name, None)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the module of the {what} {name} cannot be imported: {_described(error)}; correct it "
            "or name another one"
        ) from None
    if not callable(function):
        raise UsageError(
            f"{module_name} has no function '{function_name}'; name one that takes an item"
        )
    found: Callable[[Any], Any] = function
    return found


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Search modules in the current directory during the block, as `python -m` does."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _described(error: BaseException) -> str:
    """Format an error as its type and its first line."""
    return f"{type(error).__name__}: {first_line(str(error))}"


def _is_finite(number: object) -> bool:
    """True for a real number that a finite float can represent."""
    try:
        return isinstance(number, Real) and math.isfinite(number)
    except OverflowError:
        return False


_TOKENS = ("tokens", "input_ids", "text")
"""Keys under which an item may have its tokens, in Megatron's loops and elsewhere."""


def _work(item: Any) -> int:
    """Count the positions of an item, image patches included, and add the patches once more: each
    also passes through image layers. Raises UsageError for an item without tokens."""
    return _num_places(item) + _num_patches(item)


def _tokens(item: Any) -> int:
    """Count the positions of an item that are not image patches. Raises UsageError for an item
    without tokens."""
    return _num_places(item) - _num_patches(item)


def _patches(item: Any) -> int:
    """Count the image patches of an item. Raises UsageError for an item without an entry
    `patches`."""
    if not isinstance(item, Mapping) or "patches" not in item:
        raise UsageError(
            f"an item of the data iterator, a {type(item).__name__}, has no 'patches' to count; "
            "choose another admission cost"
        )
    return _num_patches(item)


_COUNTS: dict[CostName, Callable[[Any], int]] = {
    CostName.WORK: _work,
    CostName.TOKENS: _tokens,
    CostName.PATCHES: _patches,
}


def _num_places(item: Any) -> int:
    """Count the places of the item's sequences, patches included. Raises UsageError for an item
    without tokens."""
    key = _token_key(item)
    if key is None:
        raise UsageError(
            f"an item of the data iterator, a {type(item).__name__}, has none of "
            f"{', '.join(_TOKENS)}, whose size would be its weight; set admit_cost to a function "
            "that takes an item and returns a number"
        )
    return math.prod(item[key].shape)


def _token_key(item: Any) -> str | None:
    """Return the key of an item's tokens: the first of `tokens`, `input_ids` and `text` that it
    has; None if it has none or is no mapping."""
    return (
        next((key for key in _TOKENS if key in item), None) if isinstance(item, Mapping) else None
    )


def _num_patches(item: Mapping[str, Any]) -> int:
    """Count the rows of `patches`, 0 without any; each takes one place in the sequence."""
    return len(item["patches"]) if "patches" in item else 0


# The features of an item, on which the time and the size of its microbatch may depend.


Features = tuple[float, ...]
"""Numbers of 0 or more, the first of them 1. Times and sizes are predicted as sums of multiples of
them."""

_BOUNDS = ("cu_seqlens_padded", "cu_seqlens", "cu_seqlens_q")
"""Keys of the bounds of packed sequences in a row."""
_IMAGES = ("images", "imgs", "pixel_values")


def features_of(item: Any, function: Callable[[Any], Any] | None = None) -> Features:
    """Return the features of an item: the number or numbers that the user's function gives, or else
    the item's own.

    These are the places of the sequence; their squares by row, and by packed sequence; patches,
    their square, and their squares by image; and images. Raises UsageError for an item without
    tokens, and if the function fails or gives anything but finite numbers of 0 or more.
    """
    if function is not None:
        return (1.0, *_user_features(item, function))
    key = _token_key(item)
    shape = () if key is None else tuple(getattr(item[key], "shape", ()))
    if not shape:
        raise UsageError(
            f"an item of the data iterator, a {type(item).__name__}, has no tensor named "
            f"{', '.join(_TOKENS[:-1])} or {_TOKENS[-1]} whose shape says how long it is; give a "
            "function that takes an item and returns a number, or several, that its memory grows "
            "with"
        )
    *rows, length = shape
    num_rows = math.prod(rows)
    bounds = next((item[key] for key in _BOUNDS if item.get(key) is not None), None)
    patches = [*map(float, item["patch_counts"])] if "patch_counts" in item else []
    # Models run one empty patch through their layers where a microbatch has none.
    num_patches = max(len(item["patches"]) if "patches" in item else sum(patches), 1.0)
    images = next((len(item[key]) for key in _IMAGES if item.get(key) is not None), len(patches))
    by_row = float(num_rows * length**2)
    return (
        1.0,
        float(num_rows * length),
        by_row,
        by_row if bounds is None else _squares_between(bounds),
        num_patches,
        num_patches**2,
        max(sum(count**2 for count in patches), 1.0),
        float(images),
    )


def with_group(own: Features, members: Sequence[Features]) -> Features:
    """Append the sums over all replicas that share experts, `members`, to the features of a
    microbatch: its experts get tokens of these replicas, too. The constant first feature is not
    summed."""
    return (*own, *(math.fsum(values) for values in list(zip(*members, strict=True))[1:]))


def _squares_between(bounds: Any) -> float:
    """Sum the squares of the lengths of packed sequences between these bounds. Negative lengths,
    which padding makes, count as 0."""
    flat = [*map(float, bounds.reshape(-1))]
    # A fixed number of bounds is filled up with the last one, or with negative numbers.
    return sum(max(end - start, 0.0) ** 2 for start, end in itertools.pairwise(flat))


def _user_features(item: Any, function: Callable[[Any], Any]) -> list[float]:
    """Return the numbers that the user's function gives for an item, one or several. Raises
    UsageError if it fails, or gives anything but finite numbers of 0 or more."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        found = function(item)
        found = found.tolist() if hasattr(found, "tolist") else found
        numbers = [*found] if isinstance(found, list | tuple) else [found]
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the size function {name} raised {_described(error)}; correct the function"
        ) from error
    for number in numbers:
        if not _is_finite(number) or number < 0:
            raise UsageError(
                f"the size function {name} gave {number!r:.50}; give finite numbers of 0 or more"
            )
    return [*map(float, numbers)]
