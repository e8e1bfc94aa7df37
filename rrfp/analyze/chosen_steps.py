"""The steps that a report covers, and how long one takes: those that train, or the evaluations.

A pipeline does different things in the two, so no figure covers both. Traces of earlier versions
number evaluations among the steps that train; what they ran tells them apart. Unless steps are
asked for, the first ones are left out if they were slow (`warm_up_of`).
"""

from collections.abc import Collection
from itertools import takewhile
from statistics import median

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import EVALUATION, counted, is_evaluation, split_step

NOT_REPLAYED = "evaluations have no backward, and only steps that train are replayed"
"""Why evaluations have no structural part."""
_MOST_WARM_UP = 3
_MOST_OF_A_RUN = 4
"""At most every fourth step is warm-up."""
_FAR = 5.0
"""The deviations by which warm-up takes longer than the later steps."""
_DEVIATION = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""
_LEAST_EXCESS = 0.2
"""Warm-up takes at least so much longer, as a share, however alike the later steps are."""
_SIMULATED = "simulated"
"""The host of simulated ranks, which have nothing to warm up."""


def choose(
    frames: Frames,
    steps: range | None = None,
    *,
    evaluations: bool = False,
    with_warm_up: bool = False,
) -> Frames:
    """The tables of the steps that train, or of the evaluations. `steps` chooses among these by
    number; None takes all but those of `warm_up_of`, or with `with_warm_up` all.

    A run without any backward is taken as it is. Raises UsageError when nothing is left.
    """
    tested = evaluations_of(frames)
    trained = sorted(set(frames.steps).difference(tested))
    if evaluations and not tested:
        raise UsageError("the trace has no evaluations; leave out --evaluations")
    if tested and not trained and not evaluations:
        raise UsageError(
            f"the trace has {counted(len(tested), EVALUATION)} and no step that trains; 'rrfp "
            "analyze bubbles --evaluations' looks at evaluations"
        )
    found = frames
    if tested:
        found = frames.of_steps(tested if evaluations else trained)
        found.num_left_out = 0 if evaluations else len(tested)
    if steps is None:
        return found if with_warm_up else _without_warm_up(found)
    asked = [step for step in found.steps if split_step(step)[1] in steps]
    # Files of tables are filtered faster by a range than by a list.
    return found.of_steps(asked if evaluations and asked else steps)


def warm_up_of(frames: Frames) -> tuple[int, ...]:
    """The first steps of a run that took far longer than the later ones, because memory was
    allocated, code compiled and caches filled in them.

    They are the longest row of steps from the first one on, three and a quarter of the run at most,
    of which each took more than the later steps' median plus five of their deviations, and 20%
    more than that median. The deviation is the median absolute one, scaled to that of normal
    noise: a later step that is slow for itself does not hide the warm-up. Runs of fewer than four
    steps, and simulated ones, have none.
    """
    if _SIMULATED in frames.run["host"]:
        return ()
    in_time = frames.windows.sort("start_ns").select(
        "step", (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    )
    most = min(_MOST_WARM_UP, in_time.height // _MOST_OF_A_RUN)
    if not most:
        return ()
    later_ns = in_time["ns"][most:].to_list()
    usual_ns = median(later_ns)
    deviation_ns = _DEVIATION * median(abs(ns - usual_ns) for ns in later_ns)
    bound_ns = usual_ns + max(_FAR * deviation_ns, _LEAST_EXCESS * usual_ns)
    first = takewhile(lambda row: row[1] > bound_ns, in_time.head(most).iter_rows())
    return tuple(step for step, _ in first)


def step_time_ns(frames: Frames, steps: Collection[int] | None = None) -> float:
    """How long a step takes, as all reports on these steps tell it: the mean over those that every
    rank finished. `steps` takes only these. Raises RrfpError without any."""
    whole = frames.windows
    if steps is not None:
        whole = whole.filter(pl.col("step").is_in(list(steps)))
    if whole.is_empty():
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    return float((whole["end_ns"] - whole["start_ns"]).mean())  # type: ignore[arg-type]


def _without_warm_up(frames: Frames) -> Frames:
    slow = warm_up_of(frames)
    if not slow:
        return frames
    rest = [step for step in frames.steps if step not in slow]
    is_behind = max(slow) < min(rest)
    found = frames.of_steps(range(min(rest), max(rest) + 1) if is_behind else rest)
    found.warm_up = slow
    return found


def evaluations_of(frames: Frames) -> list[int]:
    """The steps of a run that are evaluations, in order."""
    told = [step for step in frames.steps if is_evaluation(step)]
    if told:
        return told
    ran = (
        frames.scan("task")
        .group_by("step")
        .agg(
            (pl.col("kind") == Kind.F).any().alias("forwards"),
            (pl.col("kind") != Kind.F).any().alias("others"),
        )
        .collect(engine="streaming")
    )
    if not ran["others"].any():
        return []
    # A step that some rank did not finish may have lost its backwards.
    tested = ran.filter(pl.col("forwards") & ~pl.col("others"))["step"]
    return sorted(set(tested) & set(frames.windows["step"]))
