"""The admission order of a real step, the same on every rank of a replica.

The first rank of a replica decides, and the others take over its order. So it does not matter if
some ranks get no data, if a cost function returns other numbers elsewhere, or if another host has a
different file of the same name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rrfp.runtime.protocols import PeerLostError

_UNDECIDED = -1


def agreed_order(
    decide: Callable[[], Sequence[int]], num_microbatches: int, groups: Any, device: torch.device
) -> list[int]:
    """The order that `decide` returns on the replica's first rank, on all of its ranks.

    `groups` are the step's process groups; all of their ranks call this together. If `decide`
    raises, so does the first rank, and the others raise PeerLostError.
    """
    order = torch.full((num_microbatches,), _UNDECIDED)
    failure: Exception | None = None
    if all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)):
        try:
            order = torch.tensor(decide())
        except Exception as error:
            failure = error
    order = order.to(device)
    # First to the ranks of the first stage, then from each of them down its pipeline.
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
