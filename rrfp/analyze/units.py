"""Times as people read them: in the unit that leaves few digits before the decimal point."""

from enum import Enum

from rrfp.trace.records import NS_PER_S


class Unit(Enum):
    """The units of time, the largest first; a unit's value is its length in nanoseconds."""

    S = NS_PER_S
    MS = 1_000_000
    US = 1_000
    NS = 1

    @property
    def symbol(self) -> str:
        return "µs" if self is Unit.US else self.name.lower()

    @classmethod
    def of(cls, time_ns: float) -> "Unit":
        """The largest unit that a time reaches."""
        return next((unit for unit in cls if abs(time_ns) >= unit.value), cls.NS)


def tell(time_ns: float) -> str:
    """`1.23 s`, `45.6 ms`: three significant digits."""
    unit = Unit.of(time_ns)
    value = time_ns / unit.value
    return f"{value:.0f} {unit.symbol}" if value >= 100 else f"{value:#.3g} {unit.symbol}"
