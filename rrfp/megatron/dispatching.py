"""How the drop-in dispatches tasks, as its user says it. Imports no torch."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admit
from rrfp.schedule.dispatcher import DEFAULT_LIMIT, AgreementRule, Dispatch, WeightGradients
from rrfp.schedule.shape import Placement


class GradOrder(StrEnum):
    """In which order the gradients of the microbatches are added up."""

    CANONICAL = "canonical"
    """In microbatch order: gradients are the same to the bit, whatever ran when."""
    ARRIVAL = "arrival"
    """As they come: nothing is set apart, and the last bits follow the timing."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How tasks are dispatched; the defaults are the paper's. Names are taken as text too."""

    hint: str = "bf"
    """A hint's name or the path of an order file."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """D at which forwards are withheld. None: `DEFAULT_LIMIT` under `ready` dispatch without
    `hold`, unchecked in `fixed`."""
    hold: int | None = None
    """Most activations kept on a rank from F until W, in microbatches of the whole rank; it takes
    the limit's place."""
    w: WeightGradients = WeightGradients.IDLE
    """When a hint that is an order runs the weight gradients it splits off."""
    agreement: AgreementRule = AgreementRule.INTERSECTION
    """What the ranks that share a collective inside a task run, given what each has ready."""
    grad_order: GradOrder = GradOrder.CANONICAL
    admit: str = Admit.GIVEN
    """The order in which the items of a step that trains become its microbatches: a name, or the
    path of an admission file."""
    admit_cost: str | Callable[[Any], Any] | None = None
    """What an item weighs in a pyramid: a function of it that gives a number, by itself, as
    MODULE:FUNCTION, or one of `CostName`; None is `CostName.WORK`."""
    placement: Placement = Placement.LOOP
    """Which stages the model chunks of a rank are."""
    connect_s: float = 60.0
    """How long the ranks may take to meet at their first step."""
    stall_s: float = 600.0
    """How long a rank may wait with nothing arriving before it gives up."""

    def __post_init__(self) -> None:
        """Raises UsageError for a name that is none and for bounds that cannot be."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in list(choices):
                raise UsageError(f"{name} is '{value}'; choose one of {', '.join(choices)}")
            object.__setattr__(self, name, choices(value))
        for name in ("limit", "hold"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"the {name} is {value!r}; it must be a whole number from 1 on")
        for name in ("connect_s", "stall_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"{name} is {value!r}; it must be a number of seconds above 0")
        if self.limit is not None and self.hold is not None:
            raise UsageError(
                f"a limit of {self.limit} and a hold of {self.hold} exclude each other; "
                "choose one of the two"
            )
        if not isinstance(self.admit, str):
            raise UsageError(f"admit is {self.admit!r}; it must be a name or a path, as text")
        cost = self.admit_cost
        is_function = callable(cost) and isinstance(cost, Hashable)
        if not (cost is None or isinstance(cost, str) or is_function):
            raise UsageError(
                f"admit_cost is {cost!r:.50}; it must be a name, or a function of an item that can "
                "be hashed"
            )
        if cost is not None and self.admit != Admit.PYRAMID:
            raise UsageError(
                f"an admit_cost weighs microbatches and admit '{self.admit}' sorts none; choose "
                "admit 'pyramid' or leave admit_cost out"
            )

    @property
    def effective_limit(self) -> int | None:
        """The limit that withholds forwards, if any does."""
        if self.dispatch is Dispatch.FIXED or self.hold is not None:
            return None
        return DEFAULT_LIMIT if self.limit is None else self.limit

    def hold_slots(self, num_chunks: int) -> int | None:
        """The hold as the dispatcher counts it, in activations of one chunk."""
        return None if self.hold is None else self.hold * num_chunks

    def num_credits(self, num_microbatches: int, num_chunks: int, *, forward_only: bool) -> int:
        """Messages that a link must hold so that a full one never binds a decision.

        An activation that waits on a link counts in its sender's D and held slots, a gradient in
        its receiver's: neither kind can exceed their bound. With one chunk a rank a link carries
        one of the two kinds; with several it may carry both.
        """
        bound = num_microbatches * num_chunks
        if self.dispatch is Dispatch.READY and not forward_only:
            slots = self.hold_slots(num_chunks)
            limit = self.effective_limit
            # D passes the limit by one activation a chunk while a rank drains.
            bound = min(bound, limit + num_chunks if limit is not None else slots or bound)
        return bound if num_chunks == 1 else 2 * bound


_CHOICES: dict[str, type[StrEnum]] = {
    "dispatch": Dispatch,
    "w": WeightGradients,
    "agreement": AgreementRule,
    "grad_order": GradOrder,
    "placement": Placement,
}
