"""How the drop-in dispatches tasks, as its user says it. Imports no torch."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rrfp.errors import UsageError
from rrfp.inputs.hint_files import resolve_hint
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints.hint import Hint, WeightGradients
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
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

    hint: str | Hint = "bf"
    """A hint, its name, or the path of an order file."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """D at which forwards are withheld. None: the usual one under `ready` dispatch without `hold`,
    unchecked in `fixed`."""
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
    policy: Policy = field(init=False, repr=False, compare=False)
    """What steers the dispatcher, of the fields above."""

    def __post_init__(self) -> None:
        """Raises UsageError for a name that is none and for bounds that cannot be."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} is '{value}'; choose one of {', '.join(choices)}")
            object.__setattr__(self, name, type(choices[0])(value))
        hint = resolve_hint(self.hint) if isinstance(self.hint, str) else self.hint
        policy = Policy.with_usual_limit(
            hint, self.dispatch, self.limit, self.hold, self.w, self.agreement
        )
        object.__setattr__(self, "policy", policy)
        for name in ("connect_s", "stall_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"{name} is {value!r}; it must be a number of seconds above 0")
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


_CHOICES: dict[str, list[StrEnum]] = {
    "dispatch": [Dispatch.READY, Dispatch.FIXED],
    "w": [*WeightGradients],
    "agreement": [*AgreementRule],
    "grad_order": [*GradOrder],
    "placement": [*Placement],
}
