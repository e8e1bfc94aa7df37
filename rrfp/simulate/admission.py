"""The admission order of a simulated step, by what its microbatches are known to cost."""

from collections.abc import Sequence

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admission, Admit, admission_order
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.world import TaskTimes


def admitted(costs: StepCosts, admission: Admission, step: int, replica: int = 0) -> StepCosts:
    """The costs of the same step, with its microbatches in admission order.

    Raises UsageError as `order_by_costs` does.
    """
    if admission is Admit.GIVEN:
        return costs
    return costs.permuted(order_by_costs(costs, admission, step, replica))


def order_by_costs(
    costs: StepCosts, admission: Admission, step: int, replica: int = 0
) -> Sequence[int]:
    """The order in which the microbatches of step `step` (from 0) of a replica are admitted. What
    is to be planned is given the pyramid, from which plans begin.

    Raises UsageError if they would be sorted by costs that are not known before the step, or if the
    listed order has another number of microbatches.
    """
    if admission in (Admit.PYRAMID, Admit.PLAN) and not costs.is_known:
        does = "sorts" if admission is Admit.PYRAMID else "plans"
        raise UsageError(
            f"--admit {admission} {does} by what is known before the step, and these costs are "
            "drawn task by task; choose --admit given or other costs"
        )
    num_microbatches = len(costs.times.forward[0])
    return admission_order(
        admission, step, num_microbatches, lambda: weights_ns(costs.times), replica
    )


def weights_ns(times: TaskTimes) -> list[int]:
    """The time of each microbatch, summed over all stages."""
    rows = (*times.forward, *times.input_gradient, *times.weight_gradient)
    return [sum(of_microbatch) for of_microbatch in zip(*rows, strict=True)]
