"""Compares two runs: which one is faster, by how much, and which causes of idle time changed.

Figures are medians over steps with 95% bootstrap intervals: the steps of each run are resampled
with replacement, and the figure is recomputed (Efron and Tibshirani 1993). A ratio whose interval
contains 1, or a difference whose interval contains 0, is noise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rrfp.analyze.bubbles import CAUSES, divide
from rrfp.analyze.frames import Frames, run_settings
from rrfp.analyze.memory import peak_bytes
from rrfp.analyze.table import RATIO, TEXT, Column, Table, Times, Unit, format_time
from rrfp.errors import RrfpError
from rrfp.schedule.policy import format_bytes
from rrfp.simulate.jitter import uniforms_in_parts
from rrfp.trace.records import NS_PER_S, step_name

Differences = dict[str, dict[str, tuple[Any, Any]]]
"""The settings that differ, each with its two values, by `model`, `data`, `layout` or `times`."""

_SETTINGS = {
    "model": (
        *("model", "layers", "hidden", "heads", "experts", "tie_embeddings", "dropout", "dtype"),
        *("recompute", "device"),
    ),
    "data": (
        *("data", "text_key", "tokenizer", "microbatches", "micro_batch_size", "seq_length"),
        *("variable_lengths", "max_images", "image_size", "patch_size", "blank_images", "seed"),
    ),
    "layout": ("pp", "tp", "cp", "dp", "ep", "chunks", "placement", "sequence_parallel"),
    "times": ("costs", "pace", "jitter"),
}
_MOST_LETTERS = 40


def differences(first: Frames, second: Frames) -> Differences:
    """Return the settings in which the runs differ, besides those of the schedule.

    Only settings that both traces have count. Different numbers of microbatches, stages and ranks
    in the records are added unless a differing setting explains them.
    """
    a, b = run_settings(first), run_settings(second)
    found: Differences = {
        what: {
            name: (a[name], b[name])
            for name in names
            if name in a and name in b and a[name] != b[name]
        }
        for what, names in _SETTINGS.items()
    }
    for what, name, values in _recorded(first, second):
        known = {"stages": ("pp", "chunks"), "ranks": ("pp", "tp", "cp", "dp")}.get(name, (name,))
        if values[0] != values[1] and not any(each in found[what] for each in known):
            found[what][name] = values
    return {what: settings for what, settings in found.items() if settings}


def warning(found: Differences) -> str:
    """Return a sentence about the settings in which the runs also differ; empty if there are
    none."""
    if not found:
        return ""
    listed = []
    for what, settings in found.items():
        values = [
            f"{name} {_shortened(a)} and {_shortened(b)}" for name, (a, b) in settings.items()
        ]
        listed.append(f"{what} ({', '.join(values)})")
    return (
        f"A and B also differ in {' and in '.join(listed)}, so the schedule is not the only cause."
    )


def _recorded(first: Frames, second: Frames) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield group, name and both values of the numbers of microbatches, stages and ranks in the
    records."""
    both = (first, second)

    def counts(column: str) -> tuple[int, int]:
        a, b = (frames.tasks[column].n_unique() for frames in both)
        return a, b

    yield "data", "microbatches", counts("microbatch")
    yield "layout", "stages", counts("stage")
    yield "layout", "ranks", (first.run.height, second.run.height)


def _shortened(value: object) -> str:
    """Format a value, as JSON unless it is text, and cut it after 40 characters."""
    words = value if isinstance(value, str) else json.dumps(value)
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."


_NUM_RESAMPLES = 2000
_DRAWS_AT_ONCE = 1 << 18
"""The number of draws at a time, which bounds the memory for long runs."""
_TAIL_PERCENT = 2.5

WORK = "work"
"""Time in F, B and W, listed with the causes."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    def leaves_out(self, value: float) -> bool:
        """Return whether the interval lies on one side of a value, so that the difference
        counts."""
        return not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a second run with a first run."""

    num_steps: tuple[int, int]
    step_s: tuple[float, float]
    """The median step time of each."""
    same_work_ratio: Estimate | None
    """The ratio of step time per second of work, which compares the schedules and not the speed of
    tasks. None if a run has no work, and for some ranks only."""
    step_time_ratio: Estimate
    """The second run's step time over the first run's."""
    work_ratio: Estimate | None
    """The second run's work over the first run's; None like `same_work_ratio`."""
    causes_s: dict[str, Estimate]
    """The seconds per step of each cause in the second run minus the first, as means over ranks.
    `work` comes first, then the causes that occur in either run."""
    stage: int | None = None
    """The stage whose ranks `causes_s` and `peak_held_bytes` describe; None means all ranks."""
    peak_held_bytes: tuple[int | None, int | None] = (None, None)
    """The largest activation bytes of any rank of each run; None if unknown."""

    @property
    def memory_sentence(self) -> str:
        """Sentence about the peak memory of both runs; empty if neither trace has bytes."""
        a, b = (
            "not known" if each is None else format_bytes(each) for each in self.peak_held_bytes
        )
        if a == b == "not known":
            return ""
        return f"The most that a rank held is {a} in A and {b} in B."

    @property
    def ratios(self) -> dict[str, Estimate]:
        """Known ratios of B over A, the ratio at equal work first."""
        named = {
            "same_work_ratio": self.same_work_ratio,
            "step_time_ratio": self.step_time_ratio,
            "work_ratio": self.work_ratio,
        }
        return {name: each for name, each in named.items() if each is not None}

    def as_json(self) -> dict[str, object]:
        """Return the object that `rrfp analyze compare --format json` prints."""
        return {
            "same_work_ratio": self.same_work_ratio and self.same_work_ratio.as_json(),
            "step_time_ratio": self.step_time_ratio.as_json(),
            "work_ratio": self.work_ratio and self.work_ratio.as_json(),
            "causes": {cause: each.as_json() for cause, each in self.causes_s.items()},
            "step_s": list(self.step_s),
            "steps": list(self.num_steps),
            "peak_held_bytes": list(self.peak_held_bytes),
        }


def compare(first: Frames, second: Frames, stage: int | None = None) -> Comparison:
    """Compare the finished steps of two runs; `stage` limits work, waits and memory to its ranks.

    With `stage` there are no ratios of work. Raises UsageError for a stage that a run does not
    have, and RrfpError if a run finished fewer than two steps or has a step of zero length.
    """
    times_a, times_b = _times(first, stage), _times(second, stage)
    if len(times_a["length"]) < 2 or len(times_b["length"]) < 2:
        raise RrfpError(
            f"the runs have {len(times_a['length'])} and {len(times_b['length'])} whole steps, and "
            "it takes 2 of each to tell a difference from noise; record more steps"
        )
    # All ranks determine the step time, so it is not divided by the work of some.
    both_work = stage is None and all(times[WORK].min() > 0 for times in (times_a, times_b))
    names = [name for name in (WORK, *CAUSES) if times_a[name].any() or times_b[name].any()]
    a, b = (
        resampled_medians({name: times[name] for name in ("length", *names)}, which)
        for which, times in enumerate((times_a, times_b))
    )
    return Comparison(
        (len(times_a["length"]), len(times_b["length"])),
        (float(a["length"][0]), float(b["length"][0])),
        estimate(b["length"] / b[WORK] / (a["length"] / a[WORK])) if both_work else None,
        estimate(b["length"] / a["length"]),
        estimate(b[WORK] / a[WORK]) if both_work else None,
        {name: estimate(b[name] - a[name]) for name in names},
        stage,
        (_peak(first, stage), _peak(second, stage)),
    )


def _peak(frames: Frames, stage: int | None) -> int | None:
    """Return the largest activation bytes of any rank, or of the ranks that hold `stage`; None if
    unknown."""
    return peak_bytes(frames if stage is None else frames.of_stage(stage))


def _times(frames: Frames, stage: int | None) -> dict[str, Floats]:
    """Return seconds by finished step: `length`, and means over ranks of work and each cause.

    With `stage` only its ranks count. Raises UsageError for an unknown stage, and RrfpError for a
    step of zero length.
    """
    divided = divide(frames)
    if stage is not None:
        holders = frames.run.filter(pl.col("pp_rank") == frames.rank_of(stage))["rank"]
        divided = divided.filter(pl.col("rank").is_in(holders.to_list()))
    means = (
        divided.rename({"window_ns": "length", "busy_ns": WORK})
        .group_by("step", maintain_order=True)
        .agg(pl.col("length", WORK, *CAUSES).mean())
    )
    broken = means.filter(pl.col("length") <= 0)["step"]
    if not broken.is_empty():
        raise RrfpError(
            f"{step_name(broken[0])} takes no time in one of the traces; leave it out with "
            "--steps, or see 'rrfp trace check'"
        )
    return {name: means[name].to_numpy() / NS_PER_S for name in ("length", WORK, *CAUSES)}


def resampled_medians(times: Mapping[str, Floats], which: int) -> dict[str, Floats]:
    """Return each figure's median over steps, followed by 2000 medians over resampled steps.

    All figures use the same draws, which are the same in each call; `which` (0 or 1) selects the
    run's random stream.
    """
    num_steps = len(times["length"])
    draw = uniforms_in_parts("bootstrap", which)
    medians = {name: [np.median(each, keepdims=True)] for name, each in times.items()}
    num_at_once = max(1, _DRAWS_AT_ONCE // num_steps)
    for first in range(0, _NUM_RESAMPLES, num_at_once):
        num = min(num_at_once, _NUM_RESAMPLES - first)
        steps = (draw(num * num_steps).reshape(num, num_steps) * num_steps).astype(np.int64)
        for name, each in times.items():
            medians[name].append(np.median(each[steps], axis=1))
    return {name: np.concatenate(parts) for name, parts in medians.items()}


def estimate(found: Floats) -> Estimate:
    """Make a median with its 95% interval from an output of `resampled_medians`."""
    low, high = np.percentile(found[1:], [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return Estimate(float(found[0]), float(low), float(high))


def verdict(report: Comparison, a_step: str = "A step") -> list[str]:
    """Return sentences on the ratios: at equal work, of the tasks, and of the step times.

    The second is left out unless significant, and the first two if the ratios are unknown. `a_step`
    begins the last.
    """
    sentences = []
    if report.same_work_ratio is not None:
        sentences.append(f"For the same work {_speed(report.same_work_ratio)}.")
    if report.work_ratio is not None and report.work_ratio.leaves_out(1):
        longer = "longer" if report.work_ratio.median > 1 else "less time"
        sentences.append(f"The tasks of B take {_percent(report.work_ratio)} {longer}.")
    a, b = (format_time(seconds * NS_PER_S) for seconds in report.step_s)
    sentences.append(
        f"{a_step} takes {a} in A and {b} in B (median): {_speed(report.step_time_ratio)}."
    )
    return sentences


def _speed(ratio: Estimate) -> str:
    """State whether B is faster or slower than A and by how much, or that the ratio is not
    significant."""
    if not ratio.leaves_out(1):
        return "there is no significant difference"
    return f"B is {'faster' if ratio.median < 1 else 'slower'}, by {_percent(ratio)}"


def _percent(ratio: Estimate) -> str:
    """Format how far a ratio's median is from 1, without sign, as `12.3%`."""
    return f"{abs(1 - ratio.median):.1%}"


# The tables of a comparison.

_RATIOS = {
    "same_work_ratio": "step time, for the same work",
    "step_time_ratio": "step time",
    "work_ratio": "work",
}
_NOT_NOISE = "significant: the 95% bootstrap interval is on one side"


def comparison_tables(report: Comparison, conclusions: Sequence[str]) -> list[Table]:
    """Make the tables of ratios of B over A, and of seconds per cause of B minus A.

    The conclusions are below the second. Both have the same columns for programs; the first has the
    JSON document.
    """
    a, b = report.num_steps
    causes = report.causes_s
    names = Column("", [_RATIOS[name] for name in report.ratios], TEXT)
    keys = Column(None, list(report.ratios), key="what")
    has_clear_cause = any(each.leaves_out(0.0) for each in causes.values())
    times = Times(s * NS_PER_S for each in causes.values() for s in (each.low, each.high))
    ranks = "ranks" if report.stage is None else f"the ranks that hold stage {report.stage}"
    return [
        Table(
            f"B over A, medians of {a} and {b} steps",
            [names, keys, *_estimates("B over A", report.ratios, RATIO, 1.0)],
            # The meaning of marks is printed once, below the last table with marks.
            mark_meaning="" if has_clear_cause else _NOT_NOISE,
            facts=report.as_json(),
        ),
        Table(
            f"Seconds per step that B spends beyond A, mean over {ranks}",
            [
                Column("", list(causes), TEXT, "what"),
                *_estimates("B less A", causes, Unit(partial(_signed, times)), 0.0),
            ],
            conclusions,
            mark_meaning=_NOT_NOISE,
        ),
    ]


def _estimates(
    heading: str, estimates: Mapping[str, Estimate], unit: Unit, nothing: float
) -> Iterator[Column]:
    """Yield columns of medians and of both ends of their intervals; marks those that leave out
    `nothing`."""
    found = list(estimates.values())
    clear = [row for row, each in enumerate(found) if each.leaves_out(nothing)]
    yield Column(heading, [each.median for each in found], unit, "median", marked=clear)
    yield Column("from", [each.low for each in found], unit, "low")
    yield Column("to", [each.high for each in found], unit, "high")


def _signed(times: Times, seconds: float) -> str:
    """Format seconds with a sign in the common unit; `0` and `<0.1 ms` have none."""
    size = times.format(abs(seconds) * NS_PER_S)
    if size == "0" or size.startswith("<"):
        return size
    return f"{'-' if seconds < 0 else '+'}{size}"
