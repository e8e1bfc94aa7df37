"""Deals each step's items in a Megatron job, whose loader gives every replica its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rrfp.errors import UsageError
from rrfp.megatron.adapters.group_collections import data_parallel_of
from rrfp.megatron.dealing.agreed import agreed_hands
from rrfp.megatron.dealing.exchange import exchanged
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.schedule.admission import Admission
from rrfp.schedule.dealing import Dealing, Hands


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
        replicas = data_parallel_of(groups)
        if replicas.size() == 1:
            raise UsageError(
                "admit_across deals to data-parallel replicas and there is 1; leave it out"
            )
        self.hands = agreed_hands(
            *(self._dealing, self._admission, step, weigh, num_microbatches),
            *(groups, replicas, device),
        )
        given = {chunk: data.first(chunk, num_microbatches) for chunk in data.drawing_chunks}
        for chunk, items in exchanged(given, self.hands, replicas, device).items():
            data.replace(chunk, items)
        return range(num_microbatches)
