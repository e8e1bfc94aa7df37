"""Predicts what a microbatch keeps on a chunk from what others kept there, and bounds it.

A size is taken as a sum of multiples, none negative, of the microbatch's features. Two bounds
follow, and the smaller one holds:

- With `x[j] <= r * f[j]` for all features of a measured microbatch, the size of x is at most r
  times the measured one. This needs one measurement and knows of no coefficient.
- Once enough sizes are known, the fitted sum, with a margin for what was seen of its error. It
  counts where the measured features determine it: x must lie in their span, and the margin grows
  as x moves away from them.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError, first_line

# What the size of a microbatch may depend on, read from its item of the data iterator.
#
# Imports no torch, like `item_costs`.


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


# Least squares without negative coefficients.


Numbers = npt.NDArray[np.float64]

_TOLERANCE = 1e-9


def nonnegative_least_squares(matrix: Numbers, values: Numbers) -> Numbers:
    """The coefficients of 0 or more that bring `matrix @ coefficients` nearest to `values`, by the
    active-set method of Lawson and Hanson.

    Columns should be of like size. Of columns that depend on one another, any may get the weight.
    """
    num_columns = matrix.shape[1]
    coefficients = np.zeros(num_columns)
    is_free = np.zeros(num_columns, bool)
    # Each round frees a column and lowers the residual, so that no set of columns comes twice. The
    # bound is for what rounding may do to that.
    for _ in range(3 * num_columns):
        slopes = matrix.T @ (values - matrix @ coefficients)
        slopes[is_free] = -np.inf
        column = int(np.argmax(slopes))
        if slopes[column] <= _TOLERANCE * max(float(np.linalg.norm(values)), 1.0):
            break
        is_free[column] = True
        while True:
            best = np.zeros(num_columns)
            best[is_free] = np.linalg.lstsq(matrix[:, is_free], values, rcond=None)[0]
            is_negative = is_free & (best <= 0.0)
            if not is_negative.any():
                break
            # Go towards the best as far as all stay at 0 or more; what reaches 0 is fixed there.
            start, end = coefficients[is_negative], best[is_negative]
            share = float(np.min(start / np.maximum(start - end, np.finfo(float).tiny)))
            coefficients = coefficients + share * (best - coefficients)
            is_free &= coefficients > _TOLERANCE * float(coefficients.max(initial=0.0))
            coefficients[~is_free] = 0.0
        coefficients = best
    return coefficients


_MOST_SAMPLES = 1024
"""Different features that are remembered, of each chunk."""

_LEAST_CHECKS = 3
"""Predictions that were compared with a measured size, before the margin is trusted."""

_MANY_CHECKS = 16
"""Repeated features, before they alone say how much sizes vary."""

_GROWTH = 1.25
"""The coefficients are computed again when the samples have grown by so much."""

_RANK_TOLERANCE = 1e-9
_SPAN_TOLERANCE = 1e-6


class Bound(NamedTuple):
    """The most bytes that a microbatch will keep on a chunk, as far as is known."""

    kept: int
    """From F on."""
    owed: int
    """From B until W, at most `kept`."""


class SizeModel:
    """The sizes of the microbatches of one chunk."""

    def __init__(self) -> None:
        self._kept = _Fit()
        self._owed = _Fit()
        self._num_features: int | None = None

    def take(self, features: Features, kept: int, owed: int = 0) -> None:
        """Learn from a measured microbatch. What W needs beyond what the F kept counts from F
        on. Raises UsageError if there are more or fewer features than before."""
        if self._num_features not in (None, len(features)):
            raise UsageError(
                f"a microbatch has {len(features) - 1} numbers that its size depends on, and "
                f"another had {self._num_features - 1}; let the size function give as many for each"
            )
        self._num_features = len(features)
        self._kept.take(features, max(kept, owed))
        self._owed.take(features, owed)

    def predict(self, features: Features) -> Bound:
        """The sizes to expect, without a margin; 0 before the first fit."""
        kept, owed = (round(fit.predict(features)) for fit in (self._kept, self._owed))
        return Bound(max(kept, owed), owed)

    def bound(self, features: Features) -> Bound | None:
        """The sizes to reckon with. None if nothing measured bounds them: there is no measurement,
        or none that has all of these features (images, when none were seen)."""
        kept, owed = self._kept.bound(features), self._owed.bound(features)
        if kept is None or owed is None:
            return None
        return Bound(max(kept, owed), owed)

    @property
    def is_fitted(self) -> bool:
        """Whether predictions have been compared with enough sizes."""
        return self._kept.is_trusted and self._owed.is_trusted


@dataclass(slots=True)
class _Excess:
    """By which shares sizes have exceeded their predictions. Those that fell short do not count: a
    microbatch without images may keep nothing at all."""

    num_checks: int = 0
    largest: float = 0.0
    _num: int = 0
    _squares: float = 0.0

    def take(self, predicted: float, size: float, spread: float) -> None:
        """`spread` is the factor by which the prediction's own uncertainty adds to that of a
        size."""
        self.num_checks += 1
        share = (size - predicted) / max(predicted, 1.0) / spread
        if share > 0:
            self.largest = max(self.largest, share)
            self._num += 1
            self._squares += share**2

    @property
    def margin(self) -> float:
        """The share to allow for; 0 where nothing varies.

        Where experts are chosen, sizes vary by chance. Four standard deviations are exceeded once
        in 30,000 normal draws; an estimate from few draws gets more, as it may be too small. A
        quarter above the largest is for draws with heavier tails.
        """
        if self._num == 0:
            return 0.0
        deviation = math.sqrt(self._squares / self._num)
        return max(1.25 * self.largest, 4.0 * deviation * (1.0 + 4.0 / self._num))


@dataclass(slots=True)
class _Sample:
    """What was measured for some features."""

    num: int
    mean: float
    largest: float

    @property
    def spread(self) -> float:
        """Of the mean as a prediction."""
        return math.sqrt(1.0 + 1.0 / self.num)


class _Fit:
    """One size as a function of features."""

    def __init__(self) -> None:
        self._samples: dict[Features, _Sample] = {}
        """By features, the least recently measured first."""
        self._repeats = _Excess()
        """Of sizes whose features had been measured: over the mean for them."""
        self._checks = _Excess()
        """Of other sizes, over the prediction."""
        self._num_fitted = 0
        self._known: tuple[Numbers, Numbers] | None = None
        """The measured features, and the largest size for each, measured or predicted."""
        self._coefficients: Numbers | None = None
        self._scale: Numbers = np.ones(1)
        self._span: Numbers = np.zeros((1, 1))
        self._covariance: Numbers = np.zeros((1, 1))

    def take(self, features: Features, size: int) -> None:
        sample = self._samples.pop(features, None)
        if sample is not None:
            self._repeats.take(sample.mean, size, sample.spread)
            sample.num += 1
            sample.mean += (size - sample.mean) / sample.num
            sample.largest = max(sample.largest, size)
            self._samples[features] = sample
            self._known = None
            return
        if (spread := self._spread(features)) is not None:
            self._checks.take(self.predict(features), size, spread)
        self._samples[features] = _Sample(1, float(size), float(size))
        self._known = None
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[next(iter(self._samples))]
            self._num_fitted -= 1  # What was forgotten makes room for growth.
        if len(self._samples) >= _GROWTH * self._num_fitted:
            self._compute()

    def predict(self, features: Features) -> float:
        if (sample := self._samples.get(features)) is not None:
            return sample.mean
        if self._coefficients is None:
            return 0.0
        return float(np.asarray(features) / self._scale @ self._coefficients)

    def bound(self, features: Features) -> int | None:
        if (sample := self._samples.get(features)) is not None:
            varies = self._repeats if self._repeats.num_checks >= _MANY_CHECKS else self._worst
            allowed = sample.mean * (1.0 + varies.margin * sample.spread)
            return math.ceil(max(sample.largest, allowed))
        bound = self._scaled_up(features) * (1.0 + self._worst.margin)
        spread = self._spread(features)
        if spread is not None and self._checks.num_checks >= _LEAST_CHECKS:
            predicted = self.predict(features) * (1.0 + self._checks.margin * spread)
            bound = min(bound, predicted)
        return None if math.isinf(bound) else math.ceil(bound)

    @property
    def is_trusted(self) -> bool:
        return max(self._checks.num_checks, self._repeats.num_checks) >= _LEAST_CHECKS

    @property
    def _worst(self) -> _Excess:
        return max(self._checks, self._repeats, key=lambda excess: excess.margin)

    def _scaled_up(self, features: Features) -> float:
        """The least that a measured size, times the largest ratio of the features, but at least 1,
        gives; infinite if each lacks a feature."""
        if not self._samples:
            return math.inf
        if self._known is None:
            matrix = np.array([*self._samples])
            sizes = np.array([sample.largest for sample in self._samples.values()])
            if self._coefficients is not None:
                # Not the one that was smallest by chance.
                sizes = np.maximum(sizes, matrix / self._scale @ self._coefficients)
            self._known = matrix, sizes
        known, sizes = self._known
        wanted = np.asarray(features)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(wanted > 0, wanted / known, 1.0).max(axis=1)
            return float(np.where(np.isinf(ratios), np.inf, np.maximum(ratios, 1.0) * sizes).min())

    def _compute(self) -> None:
        """Find the coefficients. Sizes count by their relative error."""
        means = np.array([max(sample.mean, 1.0) for sample in self._samples.values()])
        relative = np.array([*self._samples]) / means[:, None]
        norms = np.linalg.norm(relative, axis=0)
        self._scale = np.where(norms > 0, norms, 1.0)
        matrix = relative / self._scale
        shares = np.array([sample.mean for sample in self._samples.values()]) / means
        self._coefficients = nonnegative_least_squares(matrix, shares)
        _, singular, rows = np.linalg.svd(matrix, full_matrices=False)
        is_known = singular > _RANK_TOLERANCE * singular[0]
        known = rows[is_known]
        self._span = known.T @ known
        self._covariance = known.T @ np.diag(singular[is_known] ** -2.0) @ known
        self._num_fitted = len(self._samples)

    def _spread(self, features: Features) -> float | None:
        """By how much the relative error of a prediction exceeds that of a size, because the
        coefficients come from few; None if the samples do not determine the prediction."""
        if self._coefficients is None:
            return None
        scaled = np.asarray(features) / self._scale
        outside = scaled - self._span @ scaled
        if np.abs(outside).max() > _SPAN_TOLERANCE * np.abs(scaled).max():
            return None
        predicted = max(float(scaled @ self._coefficients), 1.0)
        variance = float(scaled @ self._covariance @ scaled) / predicted**2
        return math.sqrt(1.0 + variance)
