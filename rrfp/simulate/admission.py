"""In which order the microbatches of a step are admitted, by costs known from the data."""

from enum import StrEnum

from rrfp.errors import UsageError
from rrfp.simulate.costs import StepCosts
from rrfp.simulate.world import TaskTimes


class Admit(StrEnum):
    """How a step's microbatches are ordered before anything is dispatched."""

    GIVEN = "given"
    PYRAMID = "pyramid"
    """Light microbatches at both ends of the step, heavy ones in the middle."""


def admitted(costs: StepCosts, admit: Admit) -> StepCosts:
    """The costs of the same step with its microbatches in the order in which they are admitted.

    Raises UsageError when they are to be sorted by what nobody could know.
    """
    if admit is Admit.GIVEN:
        return costs
    if not costs.is_known:
        raise UsageError(
            f"--admit {admit} sorts by what is known before the step, and these costs are drawn "
            "task by task; choose --admit given or other costs"
        )
    return costs.permuted(admission_order(costs.times, admit))


def admission_order(times: TaskTimes, admit: Admit) -> list[int]:
    """The microbatches in the order in which they are admitted.

    A microbatch weighs what it takes on all stages together. For the pyramid they are sorted by
    weight and dealt alternately to the front and to the back.
    """
    num_microbatches = len(times.forward[0])
    if admit is Admit.GIVEN:
        return list(range(num_microbatches))
    weights = [0] * num_microbatches
    for rows in (times.forward, times.input_gradient, times.weight_gradient):
        for row in rows:
            for microbatch, time_ns in enumerate(row):
                weights[microbatch] += time_ns
    lightest_first = sorted(range(num_microbatches), key=weights.__getitem__)
    return lightest_first[::2] + lightest_first[1::2][::-1]
