"""Figures as people read them: times with units, parts that add up, and outliers."""

from collections.abc import Iterable, Sequence
from enum import Enum
from statistics import median

from rrfp.trace.records import NS_PER_S

_FAR = 3.5
"""A modified z-score above this is an outlier (Iglewicz and Hoaglin 1993)."""
_SCALE = 0.6745
_LEAST_EXCESS = 0.1
"""An outlier exceeds the median by at least this share of it, however alike the others are."""


class TimeUnit(Enum):
    """The units of time, the largest first; a unit's value is its length in nanoseconds."""

    S = NS_PER_S
    MS = 1_000_000
    US = 1_000
    NS = 1

    @property
    def symbol(self) -> str:
        return "µs" if self is TimeUnit.US else self.name.lower()

    @classmethod
    def of(cls, time_ns: float) -> "TimeUnit":
        """Return the largest unit that a time reaches."""
        return next((unit for unit in cls if abs(time_ns) >= unit.value), cls.NS)


def format_time(time_ns: float) -> str:
    """Return `1.23 s` or `45.6 ms`: three significant digits, and more only from 1000 s on."""
    # Rounding comes first: it may reach the next unit, or one digit more before the point.
    rounded_ns = float(f"{time_ns:.3g}")
    unit = TimeUnit.of(rounded_ns)
    value = rounded_ns / unit.value
    if abs(value) < 100:
        return f"{value:#.3g} {unit.symbol}"
    return f"{time_ns / unit.value:.0f} {unit.symbol}"


def apportioned(parts: Sequence[float], total: int) -> list[int]:
    """Round parts to whole numbers that sum to `total`, those with the largest remainders up.

    All are zero where the parts are.
    """
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    exact = [part * total / whole for part in parts]
    found = [int(each // 1) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda place: (found[place] - exact[place], place))
    for place in by_rest[: total - sum(found)]:
        found[place] += 1
    return found


def format_tenths(number: int) -> str:
    """Return `12.3` for 123 tenths."""
    return f"{number / 10:.1f}"


class Times:
    """Times in the one unit that suits the longest of them, with one decimal."""

    def __init__(self, times_ns: Iterable[float]) -> None:
        # Of its own unit the longest may have less than ten, which leaves too few digits.
        self.unit = TimeUnit.of(max(map(abs, times_ns), default=0) / 10)

    def format(self, time_ns: float) -> str:
        """Return `0.6 ms`, or `0` or `<0.1 ms` for a time that one decimal does not show."""
        if not time_ns:
            return "0"
        if 0 < time_ns < self.unit.value / 20:
            return f"<0.1 {self.unit.symbol}"
        return f"{self.number(time_ns)} {self.unit.symbol}"

    def number(self, time_ns: float) -> str:
        """Return `0.6`, without the unit."""
        return f"{time_ns / self.unit.value:.1f}"


def outliers(values: Sequence[float]) -> frozenset[int]:
    """Return the places of the values that lie far above the others."""
    if len(values) < 3:
        return frozenset()
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return frozenset(
        place
        for place, value in enumerate(values)
        if _SCALE * (value - middle) > _FAR * spread and value > (1 + _LEAST_EXCESS) * middle > 0
    )
