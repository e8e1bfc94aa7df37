"""Predicts what a microbatch keeps on a chunk from what others kept there, and bounds it.

A size is taken as a sum of multiples, none negative, of the microbatch's features. Two bounds
follow, and the smaller one holds:

- With `x[j] <= r * f[j]` for all features of a measured microbatch, the size of x is at most r
  times the measured one. This needs one measurement and knows of no coefficient.
- Once enough sizes are known, the fitted sum, with a margin for what was seen of its error. It
  counts where the measured features determine it: x must lie in their span, and the margin grows
  as x moves away from them.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rrfp.errors import UsageError
from rrfp.megatron.memory.features import Features
from rrfp.megatron.memory.least_squares import Numbers, nonnegative_least_squares

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
