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
from rrfp.inputs.dealing_files import resolve_dealing
from rrfp.megatron.adapters.group_collections import replicas_of
from rrfp.megatron.admission import agreed_order, told_by_first
from rrfp.megatron.dealing.dealer import Dealer
from rrfp.megatron.item_costs import resolve_cost, resolve_features
from rrfp.megatron.memory.features import Features, features_of
from rrfp.megatron.planning.measured import MeasuredTasks
from rrfp.megatron.planning.next_items import AheadIterator
from rrfp.megatron.planning.planner import EntryPlanner
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.megatron.step_policy import StepPolicy
from rrfp.schedule.admission import Admit, ListedOrders, admission_order, check_replicas
from rrfp.schedule.dealing import AdmitAcross, Hands
from rrfp.schedule.hold import described_hold
from rrfp.trace.records import Record

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
        dealing = resolve_dealing(settings.admit_across)
        self._dealer = None if dealing is AdmitAcross.NONE else Dealer(dealing, self._admission)

    @property
    def plans(self) -> bool:
        """Whether orders are planned."""
        return self._admission is Admit.PLAN

    @property
    def admits_given(self) -> bool:
        return self._admission is Admit.GIVEN and self._dealer is None

    @property
    def hands(self) -> Hands | None:
        """What each replica was dealt in the step that began last; None if nothing is dealt."""
        return None if self._dealer is None else self._dealer.hands

    @property
    def reason(self) -> str:
        """The setting for which items are drawn before they are used."""
        if self.admits_given:
            return f"hold {described_hold(self._settings.policy.hold)}"
        if self._dealer is not None:
            return f"admit_across '{self._settings.admit_across}'"
        return f"admit '{self._settings.admit}'"

    def planner(self, record: Callable[[Record], None]) -> EntryPlanner:
        """A planner of one layout's steps, whose records it sees before `record` does."""
        settings = self._settings
        measured = MeasuredTasks(record)
        cost = None if settings.admit_cost is None else self._cost
        return EntryPlanner(
            measured, record, cost, plan_ms=settings.plan_ms, features=self._features
        )

    def order(
        self, step: int, data: StepData, num_microbatches: int, groups: Any, device: torch.device
    ) -> Sequence[int]:
        """The order in which the items become the step's microbatches."""

        def items() -> Callable[[], Sequence[Any]]:
            return self._items(data, num_microbatches, f"{self.reason} looks at")

        def weigh() -> Sequence[float]:
            return self._cost.weigh(items()())

        if self._dealer is not None:
            return self._dealer.order(step, data, weigh, num_microbatches, groups, device)

        def decide() -> Sequence[int]:
            items()  # What is missing is said before all else.
            replica = 0
            if isinstance(self._admission, ListedOrders) and self._admission.num_replicas > 1:
                replicas = replicas_of(groups)
                check_replicas(self._admission, replicas.size())
                replica = replicas.rank()
            return admission_order(self._admission, step, num_microbatches, weigh, replica)

        return agreed_order(decide, num_microbatches, groups, device)

    def planned_order(
        self,
        planner: EntryPlanner,
        step: int,
        steering: StepPolicy,
        data: StepData,
        groups: Any,
        device: torch.device,
    ) -> list[int]:
        """Likewise, as it was planned."""
        items = _DataItems(self, data, steering.shape.num_microbatches)
        return planner.order(step, steering.shape, steering.policy, items, groups, device)

    def items_to_order(self, data: StepData, num_microbatches: int) -> Sequence[Any]:
        """A step's items before any is used. Raises UsageError if the replica's first rank, which
        calls it, has none."""
        return self._items(data, num_microbatches, f"{self.reason} looks at")()

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


class _DataItems:
    """A `StepItems` of a step's data."""

    def __init__(self, look_ahead: LookAhead, data: StepData, num_microbatches: int) -> None:
        self._look_ahead = look_ahead
        self._data = data
        self._num = num_microbatches

    def items(self) -> Sequence[Any]:
        return self._look_ahead.items_to_order(self._data, self._num)

    def next_items(self) -> Sequence[Any] | None:
        given = self._data.given(0)
        # All of this step's are drawn by now, or they could not be in sequence.
        self.items()
        return given.look(self._num) if isinstance(given, AheadIterator) else None
