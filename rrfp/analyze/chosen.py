"""The steps that a report is of: those that train, or the run's evaluations.

In the steps that train and in the evaluations a pipeline does other things, so that no figure is of
both. A trace of an earlier version numbers evaluations among the others: there it is what they ran
that tells.
"""

import polars as pl

from rrfp.analyze.frames import Frames, windows
from rrfp.errors import UsageError
from rrfp.schedule.tasks import Kind
from rrfp.trace.steps import EVALUATION, counted, is_evaluation, told_step

NOT_REPLAYED = "evaluations have no backward, and only steps that train are replayed"
"""Why evaluations have no structural part."""


def choose(frames: Frames, steps: range | None = None, *, evaluations: bool = False) -> Frames:
    """The tables of the steps that train, or of the evaluations; of these, those asked for by their
    numbers, None being all.

    A run without any backward is taken as it is. Raises UsageError when the run has none of those.
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
    # A range is read from the files of a trace faster than a list.
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
    # Of a step that some rank did not finish, the backwards may be lost.
    tested = ran.filter(pl.col("forwards") & ~pl.col("others"))["step"]
    return sorted(set(tested) & set(windows(frames)["step"]))
