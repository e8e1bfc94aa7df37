"""Two runs side by side: which one is faster, by how much, and which causes of idle time moved.

Medians over steps, each with the interval that holds 95 of 100 bootstrap medians: the steps of
each run are drawn anew, with replacement, and the figure is worked out again (Efron and Tibshirani
1993). A ratio whose interval holds 1, and a difference whose interval holds 0, are noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from rrfp.analyze.bubbles import CAUSES, divide
from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError
from rrfp.simulate.draws import uniforms
from rrfp.trace.records import NS_PER_S

_NUM_RESAMPLES = 2000
_TAIL_PERCENT = 2.5

WORK = "work"
"""Beside the causes: time in F, B and W."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and the interval that its bootstrap gives."""

    median: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    def leaves_out(self, value: float) -> bool:
        """Whether the interval is all on one side of a value: what is off from it is no noise."""
        return not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Comparison:
    """A second run against a first one."""

    num_steps: tuple[int, int]
    step_s: tuple[float, float]
    """The median length of a step of each."""
    step_time_ratio: Estimate
    """The second one's step time over the first one's."""
    causes_s: dict[str, Estimate]
    """By how many seconds a step, the mean over ranks, the second one has more of each; `work`
    first, then the causes that either of them has."""

    @property
    def frame(self) -> pl.DataFrame:
        """A row for the ratio of step times, and one for the seconds of each cause."""
        estimates = {"step_time_ratio": self.step_time_ratio, **self.causes_s}
        return pl.DataFrame(
            [(what, each.median, each.low, each.high) for what, each in estimates.items()],
            schema=["what", "median", "low", "high"],
            orient="row",
        )

    def as_json(self) -> dict[str, object]:
        """The object that `rrfp analyze compare --format json` prints."""
        return {
            "step_time_ratio": self.step_time_ratio.as_json(),
            "causes": {cause: each.as_json() for cause, each in self.causes_s.items()},
            "step_s": list(self.step_s),
            "steps": list(self.num_steps),
        }


def compare(first: Frames, second: Frames, stage: int | None = None) -> Comparison:
    """Compare the finished steps of two runs; of a stage, the work and idle time of its ranks.

    Raises UsageError for a stage that a run does not have, and RrfpError when one of them finished
    fewer than two.
    """
    times_a, times_b = _times(first, stage), _times(second, stage)
    if len(times_a["length"]) < 2 or len(times_b["length"]) < 2:
        raise RrfpError(
            f"the runs have {len(times_a['length'])} and {len(times_b['length'])} whole steps, and "
            "it takes 2 of each to tell a difference from noise; record more steps"
        )
    names = [name for name in (WORK, *CAUSES) if times_a[name].any() or times_b[name].any()]
    return Comparison(
        (len(times_a["length"]), len(times_b["length"])),
        (float(np.median(times_a["length"])), float(np.median(times_b["length"]))),
        estimate(times_a["length"], times_b["length"], lambda a, b: b / a),
        {name: estimate(times_a[name], times_b[name], lambda a, b: b - a) for name in names},
    )


def _times(frames: Frames, stage: int | None) -> dict[str, Floats]:
    """Seconds of each whole step: its length, and of work and each cause the mean over ranks."""
    divided = divide(frames)
    if stage is not None:
        holders = frames.run.filter(pl.col("pp_rank") == frames.rank_of(stage))["rank"]
        divided = divided.filter(pl.col("rank").is_in(holders.to_list()))
    means = (
        divided.rename({"window_ns": "length", "busy_ns": WORK})
        .group_by("step", maintain_order=True)
        .agg(pl.col("length", WORK, *CAUSES).mean())
    )
    return {name: means[name].to_numpy() / NS_PER_S for name in ("length", WORK, *CAUSES)}


def estimate(a: Floats, b: Floats, relate: Callable[[Floats, Floats], Floats]) -> Estimate:
    """What `relate` makes of the two medians, and of those of resampled steps."""
    medians = [
        np.median(times[(draws * len(times)).astype(np.int64)], axis=1)
        for times, draws in (
            (
                times,
                uniforms(_NUM_RESAMPLES * len(times), "bootstrap", which).reshape(-1, len(times)),
            )
            for which, times in enumerate((a, b))
        )
    ]
    related = relate(*medians)
    low, high = np.percentile(related, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    both = relate(np.median(a, keepdims=True), np.median(b, keepdims=True))
    return Estimate(float(both[0]), float(low), float(high))
