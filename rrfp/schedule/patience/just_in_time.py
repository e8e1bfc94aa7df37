"""When a rank whose device runs a task decides on the next one.

A device works beside its host, which takes a while to launch a task on it. A decision that is made
when the running task is launched knows too little of what will have come by its end; one that is
made at its end leaves the device idle for the launch. So the rank decides as late as it dares: once
the chance that the running task ends within the time of a launch from now exceeds `RISK`, given how
long such tasks take, by how much their times vary, and that it is still running. A launch that
takes no time is thus waited with to the end, and tasks that take what is expected of them are
launched upon just in time.
"""

from collections import deque
from math import erf, exp, log, sqrt
from typing import Final

from rrfp.schedule.patience.punctuality import Durations
from rrfp.schedule.tasks import Kind

RISK: Final = 0.05
"""Simulated steps of several hints lost the least with 0.03 to 0.08 (docs/performance.md)."""

_STEPS: Final = 64
"""In which an expected time is searched."""
_LEAST_NOISE: Final = 1e-3
_MOST_NOISE: Final = 2.0
_WEIGHT_OF_LATEST: Final = 0.02
"""Of the noise, in the long run; until then all tasks count alike."""
_NUM_LAUNCHES: Final = 9
"""So many of a kind's latest launches are remembered."""


class JustInTime:
    """What one rank knows of how long its tasks run, and how long they take to launch."""

    def __init__(self, risk: float = RISK) -> None:
        """With a `risk` of 0 it decides at once, with one above 1 at the end."""
        self._risk = risk
        self._runs = Durations()
        self._latest_ns: dict[tuple[Kind, int], deque[int]] = {}
        """The latest launches of each kind and chunk."""
        self._num_seen = 0
        self._square_noise = 0.0

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of what tasks take over what was expected."""
        return min(_MOST_NOISE, max(_LEAST_NOISE, sqrt(self._square_noise)))

    @property
    def launch_ns(self) -> int:
        """How long a launch may take: the most of any kind, because it is not known yet which it
        will be. Of each it is the second longest of the latest: few take longer and leave the
        device idle, and one that compiles a kernel, as the first often does, does not count."""
        return max(
            (sorted(each)[max(0, len(each) - 2)] for each in self._latest_ns.values()), default=0
        )

    def launched(self, kind: Kind, chunk: int, taken_ns: int) -> None:
        """The host has launched a task."""
        latest_ns = self._latest_ns.setdefault((kind, chunk), deque(maxlen=_NUM_LAUNCHES))
        latest_ns.append(taken_ns)

    def ran(self, kind: Kind, chunk: int, taken_ns: int, known_ns: int | None = None) -> None:
        """The device has run a task, of which `known_ns` was expected beforehand."""
        expected_ns = self._expected_ns(kind, chunk, known_ns)
        self._runs.took(kind, chunk, taken_ns)
        if not expected_ns or taken_ns <= 0:
            return
        self._num_seen += 1
        weight = max(1 / self._num_seen, _WEIGHT_OF_LATEST)
        off = log(taken_ns / expected_ns)
        self._square_noise += (off * off - self._square_noise) * weight

    def due_ns(
        self, kind: Kind, chunk: int, start_ns: int, known_ns: int | None = None
    ) -> int | None:
        """When to decide on what follows a task that began at `start_ns`, should it still run then;
        None: at its end. `known_ns` is what is known of it beforehand. At once where nothing is
        known of such tasks."""
        expected_ns = self._expected_ns(kind, chunk, known_ns)
        launch_ns = self.launch_ns
        if not expected_ns:
            return None if self._risk > 1 else start_ns
        after_ns = _daring_ns(expected_ns, self.noise, launch_ns, self._risk)
        return None if after_ns is None else start_ns + int(after_ns)

    def _expected_ns(self, kind: Kind, chunk: int, known_ns: int | None) -> float:
        if known_ns is not None:
            return float(known_ns)
        return self._runs.expected_ns(kind, chunk) or 0.0


def _daring_ns(expected_ns: float, noise: float, launch_ns: int, risk: float) -> float | None:
    """How long a task of this expected time, lognormal with this noise, may run before the chance
    that it ends within a launch exceeds the risk; None if it never does."""
    if launch_ns <= 0:
        return None
    location = log(expected_ns) - noise * noise / 2
    scale = 1 / (noise * sqrt(2.0))
    after_ns, most_ns = 0.0, expected_ns * exp(2 * noise)
    while after_ns <= most_ns:
        ended = _chance(after_ns, location, scale)
        if ended >= 1:
            break
        if _chance(after_ns + launch_ns, location, scale) - ended >= risk * (1 - ended):
            return after_ns
        after_ns += expected_ns / _STEPS
    return None


def _chance(time_ns: float, location: float, scale: float) -> float:
    """Of a lognormal time to be shorter than this one."""
    return (1 + erf((log(time_ns) - location) * scale)) / 2 if time_ns > 0 else 0.0
