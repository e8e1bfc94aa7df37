"""In which order the microbatches of a real step are admitted, the same on every rank of a replica.

What a name or a file says every rank finds by itself. What depends on the data is decided once:
the first rank of a replica weighs the step's items, and the others take its weights. So it does not
matter that some ranks are given no data, or that a cost function gives other numbers elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rrfp.admission_files import resolve_admission
from rrfp.megatron.groups import step_groups
from rrfp.megatron.item_costs import resolve_cost
from rrfp.megatron.settings import TrainSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import admission_order

if TYPE_CHECKING:
    from rrfp.megatron.pacing import StepPacer

RunOrder = Callable[[int, Sequence[Any]], Sequence[int]]
"""The order in which microbatches are admitted, from a step's number and its batches."""


def run_order(settings: TrainSettings, pace: "StepPacer | None" = None) -> RunOrder:
    """The admission order of a run's steps. Where tasks have a model, its costs decide.

    Raises UsageError for an order or a cost that there is not.
    """
    if pace is not None and pace.has_costs:
        return lambda step, _: pace.order(step)
    admission = resolve_admission(settings.admit, settings.microbatches)
    cost = resolve_cost(settings.admit_cost)

    def order(step: int, batches: Sequence[Any]) -> Sequence[int]:

        def weigh() -> list[float]:
            groups, cpu = step_groups(None, None), torch.device("cpu")
            return agreed_weights(lambda: cost.weigh(batches), len(batches), groups, cpu)

        return admission_order(admission, step, len(batches), weigh)

    return order


def agreed_weights(
    weigh: Callable[[], Sequence[float]], num_microbatches: int, groups: Any, device: torch.device
) -> list[float]:
    """The weights that `weigh` gives the replica's first rank, on all of its ranks.

    `groups` are the step's process groups; all of their ranks call it together. Raises on the first
    rank what `weigh` raises, and PeerLostError on the others then.
    """
    weights = torch.full((num_microbatches,), math.nan, dtype=torch.float64)
    failure: Exception | None = None
    if all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)):
        try:
            weights = torch.tensor(weigh(), dtype=torch.float64)
        except Exception as error:
            failure = error
    weights = weights.to(device)
    # On the ranks of the first stage, and from each of them down its pipeline.
    sharing = (groups.cp, groups.tp) if groups.pp.rank() == 0 else ()
    for group in (*sharing, groups.pp):
        if group.size() > 1:
            dist.broadcast(weights, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    found: list[float] = weights.tolist()
    if math.isnan(found[0]):
        raise PeerLostError(
            "the first rank of this replica could not weigh the step's microbatches; its own error "
            "says why"
        )
    return found
