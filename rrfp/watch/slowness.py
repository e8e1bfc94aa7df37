"""Which place of a run has become slow: the statistics, without files, clocks or words.

A **sample** is the mean logarithm of the times that a place took in one step, on a grid of replica
x place x member: the tasks of a rank (data parallel x pipeline x tensor parallel) or the messages
of a link. A factor on all of its times is then a shift of the sample, by the factor's logarithm.

What is common is taken out first, because data are no fault of a place: lengths of microbatches
move all stages of their replica alike. A place is compared in three ways:

- **members**: a tensor-parallel rank with the median of its peers, which run the same tasks;
- **peers**: a place with the median of the same place in the other replicas, less what the other
  places of its replica have of that. What all places of a replica share is a late replica;
- **past**: a place with its own usual sample (the median of up to 50 steps before the last 10),
  less how the other places of its replica have moved since. If the place moved in every replica, it
  is the stage, not the rank. At least a third of the shift must be a rise of the place's own.

Each comparison is one number a step. A place is slow when over the last 10 steps
- the median of that number is a rise above 8% and above 4 standard errors (6 when 10 steps are all
  that is known). The noise is taken from successive differences and from the scatter in the past,
  and is at least that of the median place;
- at least 8 of the 10 are above half of that rise, so that a few long steps raise no alarm;
- mending it would spare the place at least 1% of a step: a link whose messages take no time, or a
  stage that hardly works, is nobody's trouble.

The first slow step is the change point: from where on the sum of what lies above half the rise is
largest, each step counted with at most that half.
A slow place has recovered when 8 of the last 10 steps are below that half and so is their median.
A place that has most work from the first step on is no anomaly in time, and never reported here.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import expm1, log

import numpy as np
from numpy.typing import NDArray

WINDOW = 10
"""Steps that are looked at together."""
_NEEDED = 8
"""Of the window, for a place to be slow or to have recovered."""
_LEAST_PAST, _MOST_PAST = 5, 50
_LEAST_RISE = log(1.08)
_NUM_ERRORS = 4.0
_FEW = 5
"""Noise that is known from so few steps is known half as well."""
_LEAST_COST = 0.01
"""Share of a step."""
_OWN_SHARE, _OWN_SHARE_BESIDE = 1 / 3, 1 / 2
"""Of a rise, that must be the place's own: against its past, and beside its peers."""
_OF_MEDIAN = 1.2533
"""The standard error of a median, in those of a mean."""
_OF_MAD = 1.4826
"""The standard deviation of a normal distribution, in its median absolute deviations."""

Array = NDArray[np.float64]


class Baseline(StrEnum):
    """What a place is compared with."""

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
        """Whether the two share a place of the grid."""
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
    """How much longer it takes, as a share: 0.3 is 30% longer."""
    since: int
    """The number of the sample from which on it is slow."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a sample has shown."""

    slow: tuple[Slowdown, ...] = ()
    recovered: tuple[Slowdown, ...] = ()


@dataclass(frozen=True, slots=True)
class _Comparison:
    """How the places are compared: it makes one number a step for each part of the grid."""

    against: Baseline
    is_of_replicas: bool = False
    base: Array | None = None
    """For the past: the usual samples, replicas x places."""

    def values(self, samples: Array) -> tuple[Array, Array]:
        """The numbers, and how far the parts themselves have moved; both steps x parts."""
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
        return GridPart(part[0], None) if self.is_of_replicas else GridPart(*part)


class _Found:
    """A comparison over the steps so far."""

    def __init__(self, comparison: _Comparison, samples: Array, work: Array) -> None:
        """`work` is the share of a step that each place of the grid works."""
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
        """The standard deviation of a step's numbers. A shift within the steps does not count."""
        steps = np.diff(self._values, axis=0) / np.sqrt(2)
        noise = np.sqrt(np.mean(steps[-WINDOW + 1 :] ** 2, axis=0))
        noise = np.maximum(noise, _OF_MAD * np.median(np.abs(steps), axis=0))
        if self.comparison.against is Baseline.PAST:
            scattered = np.abs(self._values[:-WINDOW] - self.usual)
            noise = np.maximum(noise, _OF_MAD * np.median(scattered, axis=0))
        return np.asarray(np.maximum(noise, np.median(noise)))

    def most(self, allowed: NDArray[np.bool_]) -> tuple[float, tuple[int, ...]]:
        """The largest rise among the parts that are allowed, and its part; 0 if there is none."""
        rise = np.where(allowed, self.rise, 0.0)
        part = tuple(int(each) for each in np.unravel_index(np.argmax(rise), rise.shape))
        return float(rise[part]), part

    def since(self, part: tuple[int, ...]) -> int:
        """The index of the first slow step."""
        values = _column(self._values, part)
        half = self.rise[part] / 2
        # No single step, such as the first of the run, weighs more than another.
        above = np.clip(values - self.usual[part] - half, -half, half)
        return int(np.argmax(np.cumsum(above[::-1])[::-1]))


@dataclass(frozen=True, slots=True)
class _Active:
    """A part that is known to be slow, and how it was found."""

    slow: Slowdown
    comparison: _Comparison
    part: tuple[int, ...]
    half: float
    """Above this a step is slow."""

    def has_recovered(self, samples: Array) -> bool:
        values, _ = self.comparison.values(samples[-WINDOW:])
        return bool((_column(values, self.part) < self.half).sum() >= _NEEDED)


class Detector:
    """Takes a sample a step, and tells who has become slow and who has recovered."""

    def __init__(self, num_replicas: int, num_places: int, num_members: int) -> None:
        self._shape = num_replicas, num_places, num_members
        self._samples: deque[Array] = deque(maxlen=WINDOW + _MOST_PAST)
        self._numbers: deque[int] = deque(maxlen=WINDOW + _MOST_PAST)
        self._work: deque[Array] = deque(maxlen=WINDOW)
        self._active: list[_Active] = []
        self.leading: Slowdown | None = None
        """The part that stands out most, whether or not it counts as slow."""

    @property
    def active(self) -> list[Slowdown]:
        """What is slow now, in the order in which it was found."""
        return [each.slow for each in self._active]

    def take(self, number: int, sample: Array, work: Array) -> Changes:
        """Take the sample of step `number`, and the share of the step that each place worked.

        Both have the shape (replicas, places, members). A place that is not there is NaN, and
        counts as the others do.
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
            # What was slow is not what is usual.
            self._samples = deque(list(self._samples)[-WINDOW:], self._samples.maxlen)
            self._numbers = deque(list(self._numbers)[-WINDOW:], self._numbers.maxlen)
        return Changes(slow, tuple(each.slow for each in recovered))

    def _newly_slow(self, samples: Array) -> tuple[Slowdown, ...]:
        """The part that is slower than all others and not yet known; one a step is enough."""
        work = np.median(np.stack(self._work), axis=0)
        found = [_Found(each, samples, work) for each in self._comparisons(samples)]
        if not found:
            return ()
        leading = max(found, key=lambda each: each.most(each.is_own)[0])
        rise, part = leading.most(leading.is_own)
        self.leading = self._told(leading, part) if rise > 0 else None
        best = max(found, key=lambda each: each.most(self._is_new(each))[0])
        rise, part = best.most(self._is_new(best))
        if rise <= 0:
            return ()
        slow = self._told(best, part)
        half = float(best.usual[part]) + rise / 2
        self._active.append(_Active(slow, best.comparison, part, half))
        return (slow,)

    def _comparisons(self, samples: Array) -> list[_Comparison]:
        """Those that the grid and the steps so far allow."""
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

    def _is_new(self, found: _Found) -> NDArray[np.bool_]:
        """The slow parts that share no place with what is known."""
        new: NDArray[np.bool_] = found.is_slow.copy()
        for part in map(tuple, np.argwhere(new).tolist()):
            where = found.comparison.where(part)
            new[part] = not any(where.meets(known.slow.where) for known in self._active)
        return new

    def _told(self, found: _Found, part: tuple[int, ...]) -> Slowdown:
        rise, where = float(found.rise[part]), found.comparison.where(part)
        is_past = found.comparison.against is Baseline.PAST
        if is_past and np.all(found.rise[:, part[1]] > rise / 2):
            where = GridPart(None, part[1])
        since = self._numbers[found.since(part)]
        return Slowdown(where, found.comparison.against, expm1(rise), since)


def _column(values: Array, part: tuple[int, ...]) -> Array:
    """The numbers of one part, by step."""
    return values.reshape(len(values), -1)[:, np.ravel_multi_index(part, values.shape[1:])]


def _median_of_others(values: Array, axis: int) -> Array:
    """Along an axis: for each entry the median of all others; without others, the entry itself."""
    num_others = values.shape[axis] - 1
    if num_others == 0:
        return values
    order = np.argsort(values, axis=axis)
    rank = np.argsort(order, axis=axis)
    ordered = np.take_along_axis(values, order, axis)

    def other(index: int) -> Array:
        """The others' entry at an index of their order."""
        return np.take_along_axis(ordered, np.where(rank <= index, index + 1, index), axis)

    return np.asarray((other((num_others - 1) // 2) + other(num_others // 2)) / 2)


def _filled(sample: Array) -> Array:
    """The sample with the median of its place, or of all, where one is missing."""
    if not np.isnan(sample).any():
        return sample
    filled = sample.copy()
    everywhere = np.nanmedian(sample) if not np.isnan(sample).all() else 0.0
    for place in range(sample.shape[1]):
        of_place = filled[:, place]
        missing = np.isnan(of_place)
        of_place[missing] = everywhere if missing.all() else np.median(of_place[~missing])
    return filled
