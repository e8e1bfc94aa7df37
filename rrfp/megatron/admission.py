"""What the first rank of a replica decides about a real step's data, on all of its ranks: the
admission order, for one.

The first rank decides, and the others take over what it says. So it does not matter if some ranks
get no data, if a user's function returns other numbers elsewhere, or if another host has a
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
    """The admission order that `decide` returns on the replica's first rank, on all of its ranks.

    Raises as `told_by_first` does.
    """
    told = told_by_first(
        lambda: torch.tensor(decide()),
        torch.empty(num_microbatches, dtype=torch.int64),
        groups,
        device,
        "order the step's microbatches",
    )
    order: list[int] = told.tolist()
    return order


def told_by_first(
    decide: Callable[[], torch.Tensor],
    like: torch.Tensor,
    groups: Any,
    device: torch.device,
    task: str,
) -> torch.Tensor:
    """What `decide` returns on the replica's first rank, on all of its ranks: a tensor of the shape
    and type of `like`, whose first entry is not negative.

    `groups` are the step's process groups; all of their ranks call this together. If `decide`
    raises, so does the first rank, and the others raise PeerLostError: it could not do its `task`.
    """
    told = torch.full_like(like, _UNDECIDED)
    failure: Exception | None = None
    if all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)):
        try:
            told = decide()
        except Exception as error:
            failure = error
    told = told.to(device)
    # First to the ranks of the first stage, then from each of them down its pipeline.
    sharing = (groups.cp, groups.tp) if groups.pp.rank() == 0 else ()
    for group in (*sharing, groups.pp):
        if group.size() > 1:
            dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if told.flatten()[0] == _UNDECIDED:
        raise PeerLostError(
            f"the first rank of this replica could not {task}; its own error says why"
        )
    return told.cpu()
