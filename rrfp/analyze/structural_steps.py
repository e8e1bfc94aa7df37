"""The structural part of a run's bubble, from its tables.

`rrfp.replay.structural` computes it. Here the steps to replay are chosen: of a long run a sample,
whose share is taken for all of its steps.
"""

import polars as pl

from rrfp.analyze.chosen import NOT_REPLAYED
from rrfp.analyze.frames import Frames, recording_of
from rrfp.errors import RrfpError
from rrfp.replay.measured import measure
from rrfp.replay.recorded import read_run
from rrfp.replay.step_sample import StepSample
from rrfp.replay.structural import Structural, structural
from rrfp.trace.steps import is_evaluation, step_name

_SAMPLE = StepSample(num_tasks=10_000, most_tasks_of_a_step=40_000)
"""About a second's work. A larger step would take longer to replay than the trace to read."""


def structural_of(frames: Frames) -> Structural:
    """Divide the bubble of a run's steps, or of a sample of them.

    Raises RrfpError when the run cannot be replayed.
    """
    finished = frames.windows["step"].to_list()
    if not finished:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    finished = [step for step in finished if not is_evaluation(step)]
    if not finished:
        raise RrfpError(NOT_REPLAYED)
    num_tasks = frames.scan("task").select(pl.len()).collect().item()
    chosen = _SAMPLE.choose(finished, num_tasks / len(frames.steps))
    run = read_run(recording_of(frames.of_steps(chosen)))
    if run.left_out:
        raise RrfpError(
            f"{step_name(run.left_out[0])} lacks some of its tasks; see 'rrfp trace check', and "
            "choose other steps with --steps"
        )
    return structural(run, measure(run))


def structural_shares(frames: Frames) -> list[float]:
    """The structural part of the bubble by pipeline rank, as shares of the window; empty when the
    run cannot be replayed."""
    try:
        return [part.structural for part in structural_of(frames).ranks]
    except RrfpError:
        return []
