"""Statistical detection of slow ranks and links.

A **sample** is the mean logarithm of the times that a place took in one step, on a grid of replica
x place x member. A place is a rank's tasks (data parallel x pipeline x tensor parallel) or a link's
messages. A factor on all times of a place shifts its sample by the factor's logarithm.

Common changes are removed first, because they come from the data: the lengths of microbatches move
all stages of their replica alike. Each place is compared in three ways:

- **members**: a tensor-parallel rank with the median of its peers, which run the same tasks;
- **peers**: a place with the median of the same place in the other replicas, minus the median
  difference of the other places in its replica. A difference that all places of a replica share
  means a slow replica;
- **past**: a place with its own usual sample (the median of up to 50 steps before the last 10),
  minus the median shift of the other places in its replica. If the place shifted in every replica,
  the stage is slow, not the rank. The place itself must have risen by at least a third of that.

Each comparison gives one number per step. A place is slow if, over the last 10 steps,
- the median of that number is a rise above 8% and above 4 standard errors (6 if only 10 steps are
  known). The noise is estimated from successive differences and from the scatter of the past, and
  is at least that of the median place;
- at least 8 of the 10 numbers are above half of that rise, so that a few long steps raise no alarm;
- removing the rise would save the place at least 1% of a step. A link with short messages, or a
  stage with little work, raises no alarm.

The first slow step is the change point: the step from which on the sum of (number - half the rise)
is largest, where each term is limited to plus or minus half the rise.
A slow place has recovered when 8 of the last 10 numbers are below half the rise.
A place that has the most work from the first step on is not reported.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import expm1, log

import numpy as np
from numpy.typing import NDArray

WINDOW = 10
"""Number of recent steps that are tested together."""
_NEEDED = 8
"""Steps of the window that must agree for a place to be slow, or to have recovered."""
_LEAST_PAST, _MOST_PAST = 5, 50
_LEAST_RISE = log(1.08)
_NUM_ERRORS = 4.0
_FEW = 5
"""With n steps known, the threshold in standard errors is multiplied by 1 + 5/n."""
_LEAST_COST = 0.01
"""Least saving, as a fraction of a step."""
_OWN_SHARE, _OWN_SHARE_BESIDE = 1 / 3, 1 / 2
"""Least fraction of a rise by which the place itself must have risen: over its past, and relative
to its peers."""
_OF_MEDIAN = 1.2533
"""Standard error of a median relative to that of a mean."""
_OF_MAD = 1.4826
"""Standard deviation of a normal distribution relative to its median absolute deviation."""

Array = NDArray[np.float64]


class Baseline(StrEnum):
    """Reference that a place is compared with."""

    MEMBERS = "members"
    PEERS = "peers"
    PAST = "past"


@dataclass(frozen=True, slots=True)
class GridPart:
    """A part of the grid; None means all of that axis."""

    replica: int | None
    place: int | None
    member: int | None = None

    def meets(self, other: "GridPart") -> bool:
        """Return whether the two parts share a place of the grid."""
        pairs = (
            (self.replica, other.replica),
            (self.place, other.place),
            (self.member, other.member),
        )
        return all(a is None or b is None or a == b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A part of the grid that is slower than it should be."""

    where: GridPart
    against: Baseline
    rise: float
    """Additional time as a fraction: 0.3 is 30% longer."""
    since: int
    """Number of the first slow step."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The parts that became slow, or recovered, with a sample."""

    slow: tuple[Slowdown, ...] = ()
    recovered: tuple[Slowdown, ...] = ()


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A comparison, which computes one number per step for each part of the grid."""

    against: Baseline
    is_of_replicas: bool = False
    base: Array | None = None
    """For `Baseline.PAST`: the usual samples, of shape (replicas, places)."""

    def values(self, samples: Array) -> tuple[Array, Array]:
        """Return how far each part is above its baseline in each step, and its shift by itself.

        Both are logarithms of shape (steps, *parts). Against PEERS and PAST, members are averaged
        and the median shift of the other places is subtracted; a replica has the median of its
        places.
        """
        if self.against is Baseline.MEMBERS:
            beside = samples - _median_of_others(samples, axis=3)
            return beside, beside
        units = samples.mean(axis=3)
        if self.base is not None:
            moved = units - self.base
            return moved - _median_of_others(moved, axis=2), moved
        beside = units - _median_of_others(units, axis=1)
        if self.is_of_replicas:
            return np.median(beside, axis=2), beside.min(axis=2)
        if units.shape[2] == 1:
            return beside, beside
        return beside - _median_of_others(beside, axis=2), beside

    def where(self, part: tuple[int, ...]) -> GridPart:
        """Return the part of the grid at an index of `values`; a whole replica if
        `is_of_replicas`."""
        return GridPart(part[0], None) if self.is_of_replicas else GridPart(*part)


class _ComparisonResult:
    """The result of a comparison over the steps so far."""

    def __init__(self, comparison: _Comparison, samples: Array, work: Array) -> None:
        """`work` is the busy fraction of each place of the grid."""
        self.comparison = comparison
        is_past = comparison.against is Baseline.PAST
        self._values, own = comparison.values(samples)
        past = self._values[:-WINDOW]
        self.usual = np.median(past, axis=0) if is_past else np.zeros(self._values.shape[1:])
        window = self._values[-WINDOW:]
        self.rise: Array = np.median(window, axis=0) - self.usual
        error = 1 / WINDOW + (1 / len(past) if is_past else 0)
        num_errors = _NUM_ERRORS * (1 + _FEW / len(self._values))
        least = num_errors * self._noise() * _OF_MEDIAN * np.sqrt(error)
        share = _OWN_SHARE if is_past else _OWN_SHARE_BESIDE
        self.is_own = np.median(own[-WINDOW:], axis=0) >= share * self.rise
        above = (window - self.usual > self.rise / 2).sum(axis=0)
        of_members = comparison.against is Baseline.MEMBERS
        work = work if of_members else work.mean(axis=2)
        work = work.max(axis=1) if comparison.is_of_replicas else work
        spared = -np.expm1(-np.maximum(self.rise, 0)) * work
        self.is_slow = (
            (self.rise > np.maximum(_LEAST_RISE, least))
            & (above >= _NEEDED)
            & self.is_own
            & (spared >= _LEAST_COST)
        )

    def _noise(self) -> Array:
        """Return the standard deviation of each part's numbers over steps.

        It is insensitive to a single shift, and at least that of the median part.
        """
        steps = np.diff(self._values, axis=0) / np.sqrt(2)
        noise = np.sqrt(np.mean(steps[-WINDOW + 1 :] ** 2, axis=0))
        noise = np.maximum(noise, _OF_MAD * np.median(np.abs(steps), axis=0))
        if self.comparison.against is Baseline.PAST:
            scattered = np.abs(self._values[:-WINDOW] - self.usual)
            noise = np.maximum(noise, _OF_MAD * np.median(scattered, axis=0))
        return np.asarray(np.maximum(noise, np.median(noise)))

    def most(self, allowed: NDArray[np.bool_]) -> tuple[float, tuple[int, ...]]:
        """Return the largest rise among the allowed parts (0 if none rose), and its part."""
        rise = np.where(allowed, self.rise, 0.0)
        part = tuple(int(each) for each in np.unravel_index(np.argmax(rise), rise.shape))
        return float(rise[part]), part

    def since(self, part: tuple[int, ...]) -> int:
        """Return the index of the first slow step of a part: the change point."""
        values = _column(self._values, part)
        half = self.rise[part] / 2
        # The clip keeps a single step, such as the first of the run, from dominating the sum.
        above = np.clip(values - self.usual[part] - half, -half, half)
        return int(np.argmax(np.cumsum(above[::-1])[::-1]))


@dataclass(frozen=True, slots=True)
class _ActiveSlowdown:
    """A part that is slow, and the comparison that showed it."""

    slow: Slowdown
    comparison: _Comparison
    part: tuple[int, ...]
    half: float
    """A step is slow if its number exceeds this: the usual number plus half the rise."""

    def has_recovered(self, samples: Array) -> bool:
        """Return whether at least 8 of the last 10 numbers are below `half`."""
        values, _ = self.comparison.values(samples[-WINDOW:])
        return bool((_column(values, self.part) < self.half).sum() >= _NEEDED)


class Detector:
    """Detects parts of a grid that become slow and that recover, from one sample per step."""

    def __init__(self, num_replicas: int, num_places: int, num_members: int) -> None:
        self._shape = num_replicas, num_places, num_members
        self._samples: deque[Array] = deque(maxlen=WINDOW + _MOST_PAST)
        self._numbers: deque[int] = deque(maxlen=WINDOW + _MOST_PAST)
        self._work: deque[Array] = deque(maxlen=WINDOW)
        self._active: list[_ActiveSlowdown] = []
        self.leading: Slowdown | None = None
        """The part with the largest rise, even if it does not count as slow."""

    @property
    def active(self) -> list[Slowdown]:
        """Parts that are slow now, in the order of detection."""
        return [each.slow for each in self._active]

    def add_sample(self, number: int, sample: Array, work: Array) -> Changes:
        """Add the sample and the busy fractions of step `number`; return what changed.

        Both have the shape (replicas, places, members). NaN marks a missing entry, which is filled
        with the median of the others at its place. Fewer than 10 samples change nothing; a recovery
        drops all but the last 10.
        """
        assert sample.shape == work.shape == self._shape
        self._samples.append(_filled(sample))
        self._work.append(np.nan_to_num(work))
        self._numbers.append(number)
        self.leading = None
        if len(self._samples) < WINDOW:
            return Changes()
        samples = np.stack(self._samples)
        recovered = [each for each in self._active if each.has_recovered(samples)]
        self._active = [each for each in self._active if each not in recovered]
        slow = self._newly_slow(samples)
        if recovered:
            # The slow steps must not count as the usual sample.
            self._samples = deque(list(self._samples)[-WINDOW:], self._samples.maxlen)
            self._numbers = deque(list(self._numbers)[-WINDOW:], self._numbers.maxlen)
        return Changes(slow, tuple(each.slow for each in recovered))

    def _newly_slow(self, samples: Array) -> tuple[Slowdown, ...]:
        """Activate and return the largest slowdown not yet known, at most one; set `leading`.

        `leading` may be a known slowdown, or below the threshold; None without a rise.
        """
        work = np.median(np.stack(self._work), axis=0)
        found = [_ComparisonResult(each, samples, work) for each in self._comparisons(samples)]
        if not found:
            return ()
        leading = max(found, key=lambda each: each.most(each.is_own)[0])
        rise, part = leading.most(leading.is_own)
        self.leading = self._slowdown(leading, part) if rise > 0 else None
        best = max(found, key=lambda each: each.most(self._is_new(each))[0])
        rise, part = best.most(self._is_new(best))
        if rise <= 0:
            return ()
        slow = self._slowdown(best, part)
        half = float(best.usual[part]) + rise / 2
        self._active.append(_ActiveSlowdown(slow, best.comparison, part, half))
        return (slow,)

    def _comparisons(self, samples: Array) -> list[_Comparison]:
        """Return the comparisons that are possible with this grid and number of steps.

        MEMBERS needs several members, PEERS several replicas, and PAST several places and 15 steps;
        whole replicas are compared if there are several of both.
        """
        num_replicas, num_places, num_members = self._shape
        found = []
        if num_members > 1:
            found.append(_Comparison(Baseline.MEMBERS))
        if num_replicas > 1:
            found.append(_Comparison(Baseline.PEERS))
            if num_places > 1:
                found.append(_Comparison(Baseline.PEERS, is_of_replicas=True))
        if num_places > 1 and len(samples) >= WINDOW + _LEAST_PAST:
            base = np.median(samples[:-WINDOW].mean(axis=3), axis=0)
            found.append(_Comparison(Baseline.PAST, base=base))
        return found

    def _is_new(self, found: _ComparisonResult) -> NDArray[np.bool_]:
        """Return a mask of the slow parts that share no place with an active slowdown."""
        new: NDArray[np.bool_] = found.is_slow.copy()
        for part in map(tuple, np.argwhere(new).tolist()):
            where = found.comparison.where(part)
            new[part] = not any(where.meets(known.slow.where) for known in self._active)
        return new

    def _slowdown(self, found: _ComparisonResult, part: tuple[int, ...]) -> Slowdown:
        """Make the slowdown of a part, with the rise as a fraction.

        Against the past, it is of the whole stage if all replicas rose by more than half as much.
        """
        rise, where = float(found.rise[part]), found.comparison.where(part)
        is_past = found.comparison.against is Baseline.PAST
        if is_past and np.all(found.rise[:, part[1]] > rise / 2):
            where = GridPart(None, part[1])
        since = self._numbers[found.since(part)]
        return Slowdown(where, found.comparison.against, expm1(rise), since)


def _column(values: Array, part: tuple[int, ...]) -> Array:
    """Return the numbers of one part, one per step."""
    return values.reshape(len(values), -1)[:, np.ravel_multi_index(part, values.shape[1:])]


def _median_of_others(values: Array, axis: int) -> Array:
    """Return for each entry along an axis the median of the other entries; without others, the
    entry."""
    num_others = values.shape[axis] - 1
    if num_others == 0:
        return values
    order = np.argsort(values, axis=axis)
    rank = np.argsort(order, axis=axis)
    ordered = np.take_along_axis(values, order, axis)

    def other(index: int) -> Array:
        """For each entry, the entry at `index` among the others in sorted order."""
        return np.take_along_axis(ordered, np.where(rank <= index, index + 1, index), axis)

    return np.asarray((other((num_others - 1) // 2) + other(num_others // 2)) / 2)


def _filled(sample: Array) -> Array:
    """Return the sample with NaN replaced by the median of the place, or of all places, or else
    0."""
    if not np.isnan(sample).any():
        return sample
    filled = sample.copy()
    everywhere = np.nanmedian(sample) if not np.isnan(sample).all() else 0.0
    for place in range(sample.shape[1]):
        of_place = filled[:, place]
        missing = np.isnan(of_place)
        of_place[missing] = everywhere if missing.all() else np.median(of_place[~missing])
    return filled
