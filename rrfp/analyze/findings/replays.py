"""What a run would have taken otherwise: a sample of its steps, replayed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rrfp.analyze.frames import Frames, recording_of
from rrfp.errors import RrfpError
from rrfp.replay.culprits import Culprit, culprits
from rrfp.replay.measured import measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.replay.replayed import replay
from rrfp.replay.step_sample import StepSample
from rrfp.replay.whatif import WhatIf, what_if

_SAMPLE = StepSample(num_tasks=4_000, most_tasks_of_a_step=10_000)


@dataclass(frozen=True, slots=True)
class Replays:
    """What a run would have taken otherwise, if it can be replayed."""

    run: RecordedRun | None
    """None when it was not replayed."""
    culprits: Sequence[Culprit]
    """What is worth mending, the largest saving first."""
    usual: WhatIf | None
    """The run with each of the sensible changes, where that was asked for."""
    why_not: str
    """Why the run was not replayed, in a sentence; empty when it was."""
    num_steps: int = 0
    """Replayed."""
    error: float = 0.0
    """How far the replay of a step as it was is off what was measured, either way, as a share of
    it; the median."""


def replays(frames: Frames, *, with_usual: bool = False) -> Replays:
    """Replay a sample of a run's steps, with each suspect mended and, if asked for, with the usual
    changes."""
    try:
        finished = frames.windows["step"].to_list()
        chosen = _SAMPLE.choose(finished, frames.tasks.height / max(1, len(frames.steps)))
        recording = recording_of(frames.of_steps(chosen))
        run = read_run(recording)
        steps = measure(run)
        found = culprits(run, steps)
        error = median(
            abs(replay(run, step).makespan_ns - step.window_ns) / step.window_ns for step in steps
        )
        usual = what_if(recording) if with_usual else None
        return Replays(run, found, usual, "", len(steps), error)
    except RrfpError as error:
        return Replays(None, (), None, str(error))
