"""What the size of a microbatch may depend on, read from its item of the data iterator.

Imports no torch, like `item_costs`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rrfp.errors import UsageError, first_line

Features = tuple[float, ...]
"""Numbers of 0 or more, the first of them 1; a size is taken as a sum of multiples of them."""

_TOKENS = ("tokens", "input_ids", "text")
_BOUNDS = ("cu_seqlens_padded", "cu_seqlens", "cu_seqlens_q")
"""Where packed sequences begin and end in a row."""
_IMAGES = ("images", "imgs", "pixel_values")


def features_of(item: Any, function: Callable[[Any], Any] | None = None) -> Features:
    """The features of an item: those that the user's function gives, a number or several, or else
    the item's own.

    These are the places of the sequence; their squares by row, and by packed sequence; patches,
    their square, and their squares by image; and images. Raises UsageError for an item without
    tokens, and if the function fails or gives anything but finite numbers of 0 or more.
    """
    if function is not None:
        return (1.0, *_given(item, function))
    key = next((key for key in _TOKENS if key in item), None) if isinstance(item, Mapping) else None
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
    """The features of a microbatch whose experts also get tokens of other replicas: its own, and
    the sums over all replicas that share the experts."""
    return (*own, *(math.fsum(values) for values in list(zip(*members, strict=True))[1:]))


def _squares_between(bounds: Any) -> float:
    flat = [*map(float, bounds.reshape(-1))]
    # A fixed number of bounds is filled up with the last one, or with negative numbers.
    return sum(max(end - start, 0.0) ** 2 for start, end in itertools.pairwise(flat))


def _given(item: Any, function: Callable[[Any], Any]) -> list[float]:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        found = function(item)
        found = found.tolist() if hasattr(found, "tolist") else found
        numbers = [*found] if isinstance(found, list | tuple) else [found]
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the size function {name} raised {type(error).__name__}: {first_line(str(error))}; "
            "correct the function"
        ) from error
    for number in numbers:
        if not _is_size(number):
            raise UsageError(
                f"the size function {name} gave {number!r:.50}; give finite numbers of 0 or more"
            )
    return [*map(float, numbers)]


def _is_size(number: object) -> bool:
    try:
        return isinstance(number, Real) and 0 <= float(number) < math.inf
    except OverflowError:
        return False
