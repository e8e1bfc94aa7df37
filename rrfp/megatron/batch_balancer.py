"""How a real step's global batch is dealt to the data-parallel replicas, agreed on by all ranks.

Every replica's first rank weighs the items that the data give it. The first replica's gathers these
weights, deals, and tells the others; each of them tells its own replica.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.adapters.groups import data_parallel_group
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.planning.collectives import exchanged, told_by_first
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import Admission, admission_order
from rrfp.schedule.balance import Dealing, Hands, ListedDealings, deal, even_times

_UNDECIDED = -1

Weigh = Callable[[], Sequence[float]]


def agreed_hands(
    dealing: Dealing,
    admission: Admission,
    step: int,
    weigh: Weigh,
    num_microbatches: int,
    groups: Any,
    replicas: Any,
    device: torch.device,
) -> list[list[int]]:
    """The items that each replica gets in a step, in the order in which they enter.

    `weigh` gives the weights of this replica's own items; it is called on the first rank of each,
    unless a file says who gets what.
    `groups` are the step's process groups, and `replicas` that of the ranks with this one's place
    in all replicas. If a first rank cannot weigh its items it raises that error, and all others
    raise PeerLostError. Raises UsageError for a file that deals to others.
    """

    def decide() -> torch.Tensor:
        is_listed = isinstance(dealing, ListedDealings)
        own = (lambda: [0.0] * num_microbatches) if is_listed else weigh
        weights = _gathered(own, num_microbatches, replicas, device)
        return _told_by_first_replica(
            lambda: _dealt(dealing, admission, step, weights, groups.pp.size()),
            weights,
            replicas,
            device,
        )

    like = torch.empty(replicas.size(), num_microbatches, dtype=torch.int64)
    told = told_by_first(decide, like, groups, device, "deal the step's microbatches")
    hands: list[list[int]] = told.tolist()
    return hands


def _dealt(
    dealing: Dealing, admission: Admission, step: int, weights: torch.Tensor, num_ranks: int
) -> Hands:
    num_replicas, num_microbatches = weights.shape
    if isinstance(dealing, ListedDealings):
        return dealing.of_step(step, num_replicas, num_microbatches)
    of_items = weights.flatten().tolist()

    def entering(hand: Sequence[int]) -> list[int]:
        own = [of_items[number] for number in hand]
        return [hand[index] for index in admission_order(admission, step, len(hand), lambda: own)]

    return [entering(hand) for hand in deal(even_times(of_items, num_ranks), num_replicas)]


def _gathered(
    weigh: Weigh, num_microbatches: int, replicas: Any, device: torch.device
) -> torch.Tensor:
    """The weights of all items, a row per replica. All first ranks call this together, whether or
    not they can weigh theirs."""
    own = torch.full((num_microbatches,), math.nan, dtype=torch.float64)
    failure: Exception | None = None
    try:
        weights = weigh()
        _check_weights(weights)
        own = torch.tensor(weights, dtype=torch.float64)
    except Exception as error:
        failure = error
    rows = [torch.empty_like(own, device=device) for _ in range(replicas.size())]
    dist.all_gather(rows, own.to(device), group=replicas)
    if failure is not None:
        raise failure
    for replica, row in enumerate(rows):
        if row.isnan().any():
            raise PeerLostError(
                f"the first rank of replica {replica} could not weigh the step's microbatches; its "
                "own error says why"
            )
    return torch.stack(rows).cpu()


def _check_weights(weights: Sequence[float]) -> None:
    lightest = min(weights)
    if lightest < 0:
        raise UsageError(
            f"the cost of a microbatch is {lightest:g}, and --admit-across adds costs up; give "
            "numbers from 0 on"
        )


def _told_by_first_replica(
    decide: Callable[[], Hands], weights: torch.Tensor, replicas: Any, device: torch.device
) -> torch.Tensor:
    told = torch.full(weights.shape, _UNDECIDED)
    failure: Exception | None = None
    if replicas.rank() == 0:
        try:
            told = torch.tensor(decide())
        except Exception as error:
            failure = error
    told = told.to(device)
    dist.broadcast(told, dist.get_global_rank(replicas, 0), group=replicas)
    if failure is not None:
        raise failure
    if told[0, 0] == _UNDECIDED:
        raise PeerLostError(
            "the first rank of the first replica could not deal the step's microbatches; its own "
            "error says why"
        )
    return told.cpu()


# Deals each step's items in a Megatron job, whose loader gives every replica its own.


class Dealer:
    """Deals the steps of one run. All ranks of all replicas call `order` together."""

    def __init__(self, dealing: Dealing, admission: Admission) -> None:
        self._dealing = dealing
        self._admission = admission
        self.hands: Hands | None = None
        """What each replica was dealt in the step that began last, as it entered."""

    def order(
        self,
        step: int,
        data: StepData,
        weigh: Callable[[], Sequence[float]],
        num_microbatches: int,
        groups: Any,
        device: torch.device,
    ) -> Sequence[int]:
        """Give this rank's chunks the items that its replica is dealt; returns the order in which
        they enter, which is their own.

        `weigh` gives the weights of the items of this replica's loader, on its first rank. Raises
        as `agreed_hands` and `exchanged` do.
        """
        replicas = data_parallel_group(groups)
        if replicas.size() == 1:
            raise UsageError(
                "admit_across deals to data-parallel replicas and there is 1; leave it out"
            )
        self.hands = agreed_hands(
            *(self._dealing, self._admission, step, weigh, num_microbatches),
            *(groups, replicas, device),
        )
        given = {chunk: data.first(chunk, num_microbatches) for chunk in data.drawing_chunks}
        for chunk, own_items in exchanged(given, self.hands, replicas, device).items():
            data.replace(chunk, own_items)
        return range(num_microbatches)
