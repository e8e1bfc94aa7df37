"""What the process does that chooses the hint of a real run: it simulates the steps that the run
has measured under all candidates, once for each question.

Imports no torch.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rrfp.errors import RrfpError
from rrfp.planning.candidates import (
    Candidate,
    KnownSteps,
    MakeWorld,
    candidates_of,
    choose,
    patient,
)
from rrfp.planning.forecast import Numbers
from rrfp.planning.process_pool import Requests, answer
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions, TaskTimes

NUM_STEPS = 8
"""Steps that a choice is made by; where fewer were measured, others are mixed from them."""
_MOST_S = 60.0
"""After this long, what is known by then decides."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a run may choose from. Equal ones give equal lists, in every process."""

    asked: Policy
    shape: Shape
    splits: bool | None
    """Whether the backward must be split, or must not; None: both will do."""
    may_bind: bool

    def as_asked(self) -> list[Candidate]:
        """Those that wait no longer than asked for, the one to begin with first."""
        return candidates_of(self.asked, self.shape, splits=self.splits, may_bind=self.may_bind)

    def all(self) -> list[Candidate]:
        """These, and then those that wait."""
        found = self.as_asked()
        return [*found, *patient(found)]


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """A question."""

    choices: Choices
    current: int
    """The index of the candidate that steers the run."""
    measured: Sequence[Numbers]
    """Steps, `[row][stage][microbatch]` with the rows of `rrfp.planning.forecast`; a
    backward that was not split stands in two parts."""
    budgets: tuple[int, ...]
    """Bounds in bytes by pipeline rank; empty without any."""
    num_members: int
    key: int
    """Of the draws by which steps are mixed."""


def main() -> None:
    requests = Requests()
    for request in requests:
        try:
            answer(_chosen(request, requests))
        except (RrfpError, ValueError, ArithmeticError) as error:
            answer({"error": str(error)})


def _chosen(request: ChoiceRequest, requests: Requests) -> dict[str, object]:
    until_s = time.monotonic() + _MOST_S
    every = request.choices.all()
    # Those that wait come in as the others have shown what they are worth.
    begun = request.choices.as_asked()
    steps = [_tables(request, number) for number in range(NUM_STEPS)]
    known = KnownSteps([[_maker(table, request)] for table in steps], request.budgets)
    choice = choose(
        begun,
        known.play,
        len(known),
        every[request.current],
        lambda: requests.is_over() or time.monotonic() >= until_s,
    )
    if choice is None:
        raise RrfpError("no hint fits the memory of the steps that were measured")
    names = [each.name for each in every]
    return {
        "index": names.index(choice.chosen.candidate.name),
        "predicted_ns": choice.chosen.mean_ns,
        "kept_ns": choice.chosen.mean_ns if choice.kept is None else choice.kept.mean_ns,
        "candidates": choice.num_candidates,
    }


def _tables(request: ChoiceRequest, number: int) -> Numbers:
    """A step that was measured or, after these, one that has at each place the microbatch that one
    of them had there: so the order in which light and heavy ones enter stays what it is."""
    measured = request.measured
    if number < len(measured):
        return measured[number]
    draw = random.Random(f"{request.key} {number}")
    num_microbatches = measured[0].shape[2]
    columns = [measured[int(draw.random() * len(measured))] for _ in range(num_microbatches)]
    return np.stack([table[:, :, place] for place, table in enumerate(columns)], axis=2)


def _maker(table: Numbers, request: ChoiceRequest) -> MakeWorld:
    forward, input_gradient, weight_gradient, kept, owed = np.rint(np.float64(table)).astype(
        np.int64
    )
    times = TaskTimes(
        np.maximum(forward, 1).tolist(), input_gradient.tolist(), weight_gradient.tolist()
    )
    sizes = ActivationSizes(kept.tolist(), np.minimum(owed, kept).tolist()) if kept.any() else None
    world = StepConditions(
        times, num_members=request.num_members, sizes=sizes, budgets=request.budgets
    )
    # A world without jitter has no state.
    return lambda _: replace(world)
