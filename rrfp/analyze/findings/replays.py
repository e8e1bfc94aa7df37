"""What a run would have taken otherwise, for its report: a sample of its steps, replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rrfp.analyze.findings import Finding
from rrfp.analyze.frames import Frames, recording_of
from rrfp.errors import RrfpError, UsageError
from rrfp.replay.recorded import RecordedRun
from rrfp.replay.step_sample import StepSample
from rrfp.replay.whatif import Change, WhatIf, what_if

_SAMPLE = StepSample(num_tasks=6_000, most_tasks_of_a_step=10_000)


@dataclass(frozen=True, slots=True)
class Replays:
    """What a run would have taken otherwise, if it can be replayed."""

    savings: dict[str, tuple[str, float]]
    """By finding (`Finding.what`): its remedy in words, and the share of a step that this saves."""
    usual: WhatIf | None
    """The run with each of the sensible changes; None when it was not replayed."""
    num_steps: int
    why_not: str
    """Why the run was not replayed, in a sentence; empty when it was."""


def replays(frames: Frames, find: Callable[[], Sequence[Finding]]) -> Replays:
    """Replay a sample of a run's steps: with the usual changes, and with the remedies of what
    `find` finds. What it raises also says why nothing was replayed."""
    remedied: list[Finding] = []

    def remedies(run: RecordedRun) -> list[Change]:
        changes = []
        for finding in find():
            change = finding.remedy(run) if finding.remedy else None
            if change is not None and _is_possible(change, run):
                remedied.append(finding)
                changes.append(change)
        return changes

    try:
        finished = frames.windows["step"].to_list()
        chosen = _SAMPLE.choose(finished, frames.tasks.height / max(1, len(frames.steps)))
        recording = recording_of(frames.of_steps(chosen))
        usual = what_if(recording)
        rows = what_if(recording, remedies).rows
    except RrfpError as error:
        return Replays({}, None, 0, str(error))
    savings = {
        finding.what: (row.what, row.saving) for finding, row in zip(remedied, rows, strict=True)
    }
    return Replays(savings, usual, len(usual.run.steps), "")


def _is_possible(change: Change, run: RecordedRun) -> bool:
    """Whether the run can have a change at all."""
    try:
        change.policy(run)
    except UsageError:
        return False
    return True
