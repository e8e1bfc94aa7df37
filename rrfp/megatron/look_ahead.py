"""What the items of a training step tell before any of them is used: the order in which they enter,
and what their sizes depend on.

The first rank of a replica looks, and the others are told. So it does not matter if some ranks get
no data, if a function returns other numbers elsewhere, or if another host has a different file of
the same name.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rrfp.errors import UsageError
from rrfp.inputs import resolve_admission, resolve_dealing
from rrfp.megatron.adapters.groups import replica_group
from rrfp.megatron.batch_balancer import Dealer
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import LoopRandomStates, StepData, is_iterator, shared
from rrfp.planning.collectives import agreed_order, told_by_first
from rrfp.planning.forecast import MeasuredTasks
from rrfp.planning.item_costs import resolve_cost, resolve_features
from rrfp.planning.memory_model import Features, features_of
from rrfp.planning.order_planner import EntryPlanner
from rrfp.planning.step_policy import StepPolicy
from rrfp.schedule.admission import Admit, ListedOrders, admission_order, check_replicas
from rrfp.schedule.balance import AdmitAcross, Hands
from rrfp.schedule.knobs import described_hold
from rrfp.trace.records import Record

# The items of the next step, drawn from a training loop's iterator before that step begins.
#
# Drawn items wait in their iterator's stead, and go to the next step in the loop's own sequence. So
# training sees the same data as without a look ahead, with two exceptions that are watched for: an
# iterator whose draws advance the loop's random states is not looked at any further, and one that
# the loop gives up keeps what was drawn from it, in case it comes back.


_log = logging.getLogger(__name__)


class AheadIterator:
    """An iterator whose next items can be looked at."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.waiting: deque[Any] = deque()
        """Items that were looked at and not taken."""
        self._failure: BaseException | None = None
        self._is_random = False

    def __iter__(self) -> "AheadIterator":
        return self

    def __next__(self) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        if self._failure is not None:
            # What the look ahead met, where the loop would have met it.
            failure, self._failure = self._failure, None
            raise failure
        return next(self.source)

    def look(self, num: int) -> list[Any] | None:
        """The next items, without taking them; None if there are not as many, or if drawing them
        moves random states that the loop may use."""
        if self._failure is not None or self._is_random:
            return None
        before = LoopRandomStates()
        while len(self.waiting) < num:
            try:
                self.waiting.append(next(self.source))
            except Exception as error:
                self._failure = error
                return None
            if LoopRandomStates() != before:
                self._is_random = True
                return None
        return [*self.waiting][:num]


class AheadIterators:
    """The iterators of a training loop that were looked at."""

    def __init__(self) -> None:
        self._known: dict[int, AheadIterator] = {}
        """By the id of the loop's own iterator, which they keep alive."""
        self._has_warned = False

    def put_in(self, given: Sequence[Any]) -> list[Any]:
        """A step's data objects, by chunk, with the first chunk's in a form that can be looked
        at. One that other chunks draw from too, or that is no iterator, stays as it is."""
        first = given[0]
        if not is_iterator(first) or shared(given):
            return [*given]
        ahead = self._known.get(id(first))
        if ahead is None:
            left = {key: each for key, each in self._known.items() if each.waiting}
            if left and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "--admit plan: the training loop came with another data iterator, and %d items "
                    "that were drawn ahead wait for the one before; give one iterator for the "
                    "whole run, or choose --admit pyramid",
                    sum(len(each.waiting) for each in left.values()),
                )
            ahead = AheadIterator(first)
            self._known = left | {id(first): ahead}
        return [ahead, *given[1:]]


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
                replicas = replica_group(groups)
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
