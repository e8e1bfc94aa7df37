"""In which order the microbatches of a real step are admitted, the same on every rank of a replica.

The first rank of a replica decides, and the others take its order. So it does not matter that some
ranks are given no data, that a cost function gives other numbers elsewhere, or that another host
has another file of the same name. At a pace every rank works the order out from the same costs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rrfp.admission_files import resolve_admission
from rrfp.megatron.groups import step_groups
from rrfp.megatron.item_costs import resolve_cost
from rrfp.megatron.settings import TrainSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import Admit, admission_order

if TYPE_CHECKING:
    from rrfp.megatron.pacing import StepPacer

_UNDECIDED = -1

RunOrder = Callable[[int, Sequence[Any]], Sequence[int]]
"""The order in which microbatches are admitted, from a step's number and its batches."""


def run_order(settings: TrainSettings, pace: "StepPacer | None" = None) -> RunOrder:
    """The admission order of a run's steps. Where tasks have a model, its costs decide.

    Raises UsageError for an order or a cost that does not exist.
    """
    if pace is not None and pace.has_costs:
        return lambda step, _: pace.order(step)
    admission = resolve_admission(settings.admit, settings.microbatches)
    cost = resolve_cost(settings.admit_cost)

    def order(step: int, batches: Sequence[Any]) -> Sequence[int]:
        if admission is Admit.GIVEN:
            return range(len(batches))

        def decide() -> Sequence[int]:
            return admission_order(admission, step, len(batches), lambda: cost.weigh(batches))

        return agreed_order(decide, len(batches), step_groups(None, None), torch.device("cpu"))

    return order


def agreed_order(
    decide: Callable[[], Sequence[int]], num_microbatches: int, groups: Any, device: torch.device
) -> list[int]:
    """The order that `decide` gives the replica's first rank, on all of its ranks.

    `groups` are the step's process groups; all of their ranks call it together. Raises on the first
    rank what `decide` raises, and PeerLostError on the others then.
    """
    order = torch.full((num_microbatches,), _UNDECIDED)
    failure: Exception | None = None
    if all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)):
        try:
            order = torch.tensor(decide())
        except Exception as error:
            failure = error
    order = order.to(device)
    # On the ranks of the first stage, and from each of them down its pipeline.
    sharing = (groups.cp, groups.tp) if groups.pp.rank() == 0 else ()
    for group in (*sharing, groups.pp):
        if group.size() > 1:
            dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    found: list[int] = order.tolist()
    if found[0] == _UNDECIDED:
        raise PeerLostError(
            "the first rank of this replica could not order the step's microbatches; its own error "
            "says why"
        )
    return found
