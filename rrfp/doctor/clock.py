"""How finely, and how fast, the clock of the trace tells the time."""

import statistics
import time
from itertools import pairwise
from pathlib import Path

from rrfp.doctor.check import Check, State

_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_NUM_READINGS = 20_000
_SLOW_NS = 1000.0
"""A task is recorded with some ten readings."""


def clock(source: Path = _SOURCE) -> Check:
    """The median time between two readings that differ: the resolution, or what a reading takes."""
    readings = sorted({time.monotonic_ns() for _ in range(_NUM_READINGS)})
    step_ns = statistics.median(later - earlier for earlier, later in pairwise(readings))
    is_slow = step_ns > _SLOW_NS
    try:
        name = source.read_text().strip()
    except OSError:
        name = "unknown"
    advice = f"from a reading to the next; the kernel's clock source is {name}"
    return Check(
        "clock",
        State.SLOW if is_slow else State.OK,
        round(step_ns),
        "ns",
        f"{advice}, boot with clocksource=tsc if this machine has it" if is_slow else advice,
    )
