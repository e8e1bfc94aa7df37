"""The steps that a report covers: those that train, or the run's evaluations.

A pipeline does different things in the two, so no figure covers both. Traces of earlier versions
number evaluations among the steps that train; what they ran tells them apart.
"""

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.errors import UsageError
from rrfp.schedule.tasks import Kind
from rrfp.trace.steps import EVALUATION, counted, is_evaluation, told_step

NOT_REPLAYED = "evaluations have no backward, and only steps that train are replayed"
"""Why evaluations have no structural part."""


def choose(frames: Frames, steps: range | None = None, *, evaluations: bool = False) -> Frames:
    """The tables of the steps that train, or of the evaluations. `steps` chooses among these by
    number; None takes all.

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
        return found
    asked = [step for step in found.steps if told_step(step)[1] in steps]
    # Files of tables are filtered faster by a range than by a list.
    return found.of_steps(asked if evaluations and asked else steps)


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
