"""What the items of a training step tell before any of them is used: the order in which they enter,
and what their sizes depend on.

The first rank of a replica looks, and the others are told. So it does not matter if some ranks get
no data, if a function returns other numbers elsewhere, or if another host has a different file of
the same name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rrfp.errors import UsageError
from rrfp.inputs.admission_files import resolve_admission
from rrfp.megatron.admission import agreed_order, told_by_first
from rrfp.megatron.item_costs import resolve_cost, resolve_features
from rrfp.megatron.memory.features import Features, features_of
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.schedule.admission import Admit, admission_order
from rrfp.schedule.hold import described_hold

_MOST_FEATURES = 32


class LookAhead:
    """Looks at the items of one run's steps. All ranks of a replica call the same methods
    together."""

    def __init__(self, settings: DispatchSettings) -> None:
        """Raises UsageError for a function that cannot be imported."""
        self._settings = settings
        self._admission = resolve_admission(settings.admit)
        self._cost = resolve_cost(settings.admit_cost)
        self._features = resolve_features(settings.hold_features)

    @property
    def admits_given(self) -> bool:
        return self._admission is Admit.GIVEN

    @property
    def reason(self) -> str:
        """The setting for which items are drawn before they are used."""
        if self.admits_given:
            return f"hold {described_hold(self._settings.policy.hold)}"
        return f"admit '{self._settings.admit}'"

    def order(
        self, step: int, data: StepData, num_microbatches: int, groups: Any, device: torch.device
    ) -> list[int]:
        """The order in which the items become the step's microbatches."""

        def decide() -> Sequence[int]:
            items = self._items(data, num_microbatches, f"admit '{self._settings.admit}' orders")
            return admission_order(
                self._admission, step, num_microbatches, lambda: self._cost.weigh(items())
            )

        return agreed_order(decide, num_microbatches, groups, device)

    def features(
        self, data: StepData, order: Sequence[int], groups: Any, device: torch.device
    ) -> list[Features]:
        """What the size of each microbatch depends on, in admission order."""

        def decide() -> torch.Tensor:
            items = self._items(data, len(order), "a hold in bytes measures")()
            rows = [features_of(item, self._features) for item in items]
            if len({len(row) for row in rows}) > 1 or len(rows[0]) > _MOST_FEATURES:
                raise UsageError(
                    f"hold_features gives {len(rows[0]) - 1} numbers for the first microbatch; "
                    f"give as many for each, at most {_MOST_FEATURES - 1}"
                )
            table = torch.zeros(1 + len(rows), _MOST_FEATURES, dtype=torch.float64)
            table[0, 0] = len(rows[0])
            table[1:, : len(rows[0])] = torch.tensor(rows, dtype=torch.float64)
            return table

        like = torch.empty(1 + len(order), _MOST_FEATURES, dtype=torch.float64)
        told = told_by_first(decide, like, groups, device, "measure the step's microbatches")
        num_features = int(told[0, 0])
        rows = told[1:, :num_features].tolist()
        return [tuple(rows[number]) for number in order]

    def _items(
        self, data: StepData, num_microbatches: int, what: str
    ) -> Callable[[], Sequence[Any]]:
        if data.given(0) is None:
            raise UsageError(
                f"{what} the step's items and the first rank of this replica has no data "
                "iterator; pass one there or leave it out"
            )
        return lambda: data.first(0, num_microbatches)
