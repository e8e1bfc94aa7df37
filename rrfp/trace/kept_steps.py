"""The steps that a trace keeps of a run whose records are bounded: the last ones, each on all
ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from rrfp.trace.sessions import first_step_of
from rrfp.trace.steps import EVALUATION, STEP, is_evaluation, told_step

DROPPED_STEPS = "dropped_steps"
"""In a trace's description: how many training steps of the session have gone, for room."""
FIRST_KEPT_STEP = "first_kept_step"
"""Likewise: the first training step that the trace has."""


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """What is kept: the training steps and the evaluations from these numbers on."""

    step: int
    evaluation: int

    def has(self, step: int) -> bool:
        _, number = told_step(step)
        return number >= (self.evaluation if is_evaluation(step) else self.step)

    def described(self, description: Mapping[str, Any]) -> dict[str, object]:
        """What the description of the trace says of it."""
        num_dropped = self.step - first_step_of(description)
        return {DROPPED_STEPS: num_dropped, FIRST_KEPT_STEP: self.step}


def first_kept_step(description: Mapping[str, Any]) -> int:
    """The first training step that the trace so described should have."""
    told = description.get(FIRST_KEPT_STEP)
    return told if isinstance(told, int) else first_step_of(description)


def kept_steps(ended: Sequence[Sequence[int]]) -> KeptSteps | None:
    """What is kept where these ranks have lost their first steps; `ended` are the steps that each
    still has the end of, in the order of the run. Each rank loses its own, so that what is kept
    begins with the first step that they all have. None if there is no such step: then all is."""
    if not ended:
        return None
    # What arrived early of a rank's first step was recorded with the step before, and is gone.
    shared = {*ended[0][1:]}.intersection(*(steps[1:] for steps in ended[1:]))
    kept = list(dropwhile(lambda step: step not in shared, ended[0]))
    if not kept:
        return None
    gone = ended[0][: -len(kept)]
    return KeptSteps(*(_first_of(sort, kept, gone) for sort in (STEP, EVALUATION)))


def _first_of(sort: str, kept: Iterable[int], gone: Iterable[int]) -> int:
    """The first number of a sort of step that is kept."""

    def numbers(steps: Iterable[int]) -> Iterator[int]:
        return (number for told, number in map(told_step, steps) if told == sort)

    first = min(numbers(kept), default=None)
    return max(numbers(gone), default=-1) + 1 if first is None else first
