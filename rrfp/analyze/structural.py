"""How much of a run's bubble its schedule leaves by itself, and how much jitter adds.

The *structural* part is what the same tasks would leave under the same policy if each took the mean
of its stage and kind in the step; the rest is *excess*. Of a long run some steps are replayed,
spread evenly over it, and their share is taken for all.

Only the tasks' own times are averaged. Messages and the delays before tasks stay as they were, and
count as structural: much of them happens once, as a rank's late entry into the step does, and the
mean would lay it upon every message of a link.

Excess may be negative. On ranks that share cores it is so as a rule: there a task is long because
others run beside it, and short where they wait, so that the recorded times fit the recorded idling
and the means do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from rrfp.analyze.bubbles import BubbleParts
from rrfp.analyze.chosen import NOT_REPLAYED
from rrfp.analyze.frames import Frames, recording_of, windows
from rrfp.errors import RrfpError
from rrfp.simulate.measured import MeasuredStep, measure
from rrfp.simulate.recorded import RecordedRun, read_run
from rrfp.simulate.replay import replay
from rrfp.trace.steps import is_evaluation, step_name

_NUM_TASKS_REPLAYED = 10_000
"""About a second's work."""
_MOST_TASKS_OF_A_STEP = 40_000
"""A larger step is left to `whatif`: it would take longer to replay than the trace to read."""


@dataclass(frozen=True, slots=True)
class Structural:
    """The parts of the bubble, over the steps of a run."""

    ranks: tuple[BubbleParts, ...]
    """By pipeline rank, over its replicas."""

    @property
    def whole(self) -> BubbleParts:
        """Of all ranks together."""
        count = len(self.ranks)
        return BubbleParts(
            sum(rank.structural for rank in self.ranks) / count,
            sum(rank.excess for rank in self.ranks) / count,
        )


def structural_of(frames: Frames) -> Structural:
    """Divide the bubble of a run's steps, or of as many of them as are soon replayed.

    Raises RrfpError when the run cannot be replayed.
    """
    finished = windows(frames)["step"].to_list()
    if not finished:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    finished = [step for step in finished if not is_evaluation(step)]
    if not finished:
        raise RrfpError(NOT_REPLAYED)
    num_tasks = frames.scan("task").select(pl.len()).collect().item()
    of_a_step = num_tasks / len(frames.steps)
    if of_a_step > _MOST_TASKS_OF_A_STEP:
        raise RrfpError(
            f"its steps have {of_a_step:.0f} tasks, and no more than {_MOST_TASKS_OF_A_STEP} are "
            "replayed on the side; 'rrfp analyze whatif' replays them all"
        )
    num_steps = min(len(finished), max(1, int(_NUM_TASKS_REPLAYED / max(of_a_step, 1))))
    # From the middle of each part: the first step warms caches up.
    chosen = [
        finished[(2 * index + 1) * len(finished) // (2 * num_steps)] for index in range(num_steps)
    ]
    run = read_run(recording_of(frames.of_steps(chosen)))
    if run.left_out:
        raise RrfpError(
            f"{step_name(run.left_out[0])} has not all of its tasks; see 'rrfp trace check', and "
            "choose others with --steps"
        )
    return structural(run, measure(run))


def structural(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Structural:
    """Divide the bubble of these steps of a run."""
    window_ns = sum(step.window_ns for step in steps)
    smooth_ns = sum(replay(run, step.without_jitter()).makespan_ns for step in steps)
    busy_ns = [0.0] * run.shape.num_ranks
    for step in steps:
        for replica in step.replicas:
            for rank, time_ns in enumerate(replica.busy_ns(run.shape)):
                busy_ns[rank] += time_ns / len(step.replicas)
    return Structural(
        tuple(
            BubbleParts((smooth_ns - busy) / window_ns, (window_ns - smooth_ns) / window_ns)
            for busy in busy_ns
        )
    )
