"""The drop-in's settings. Imports no torch."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rrfp.errors import UsageError
from rrfp.inputs import admission_file, dealing_file, resolve_hint
from rrfp.runtime.net import tls
from rrfp.runtime.planes.registry import DEFAULT_OUTBOX_MB, MOST_OUTBOX_MB, TransportName
from rrfp.schedule.admission import Admit
from rrfp.schedule.balance import AdmitAcross
from rrfp.schedule.hints import Hint, WeightGradients
from rrfp.schedule.knobs import (
    IMPATIENT,
    AutoPatience,
    Hold,
    Patience,
    check_is_absolute,
    counts_microbatches,
    parse_hold,
    parse_patience,
)
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.shape import Placement
from rrfp.schedule.tasks import plain_integer, plain_real


class GradOrder(StrEnum):
    """The order in which microbatches' gradients are summed."""

    CANONICAL = "canonical"
    """Microbatch order: gradients are the same to the bit, whatever the order of tasks."""
    ARRIVAL = "arrival"
    """As they come: nothing is held back, and the last bits depend on timing."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How tasks are dispatched; the defaults are the paper's. Names may be given as text."""

    hint: str | Hint = "bf"
    """A hint, its name, or the path of an order file."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """The D at which forwards are withheld. None: what fills the pipeline, at least the paper's 32,
    under `ready` dispatch without `hold`; unchecked under `fixed`."""
    hold: Hold | str | None = None
    """The most activations kept on a rank from F until W: a number of microbatches of the whole
    rank, a size such as 40GiB, or `auto`; it replaces the limit."""
    hold_features: str | Callable[[Any], Any] | None = None
    """What the size of a microbatch grows with, for a hold in bytes: a function from an item to a
    number or several, or MODULE:FUNCTION. None: tokens, patches, images and their squares."""
    measure_memory: bool = False
    """Measure what activations take, in every step; a hold in bytes does so while it must."""
    w: WeightGradients = WeightGradients.IDLE
    """When a hint that is an order runs the weight gradients that it splits off."""
    agreement: AgreementRule = AgreementRule.INTERSECTION
    """How ranks that share a collective inside a task settle on the next one."""
    patience: Patience | str = IMPATIENT
    """How long a free rank waits for a better task that another rank has announced: in ns, or a
    text such as `auto` or 5ms."""
    grad_order: GradOrder = GradOrder.CANONICAL
    admit: str = Admit.GIVEN
    """The order in which the items of a training step become its microbatches: a name, or the path
    of an admission file."""
    admit_cost: str | Callable[[Any], Any] | None = None
    """An item's weight in a pyramid: a function from an item to a number, MODULE:FUNCTION, or one
    of `CostName`; None means `CostName.WORK`."""
    plan_ms: float | None = None
    """With admit `plan`: how long a step is planned, in ms; None: a tenth of the last step's
    time."""
    admit_across: str = AdmitAcross.NONE
    """Whether the items of a training step are dealt to the data-parallel replicas by cost before
    they enter: `none`, `replicas`, or the path of a file of dealings."""
    transport: TransportName = TransportName.AUTO
    """What carries the tensors of messages."""
    outbox_mb: int = DEFAULT_OUTBOX_MB
    """The memory, in MiB, in which a rank's large messages wait for their receivers."""
    tls: bool = False
    """Whether messages to ranks on other hosts are encrypted."""
    placement: Placement = Placement.LOOP
    """Which stages a rank's model chunks are."""
    connect_s: float | None = None
    """How long ranks may take to connect at their first step. None: as long as the pipeline's
    process group waits."""
    silence_s: float = 20.0
    """How long nothing may be heard of a neighbour, not even a heartbeat, before it is given up."""
    stall_s: float | None = None
    """How long a rank may wait with nothing arriving before it gives up. None: as long as the
    pipeline's process group waits, and at least 600 s."""
    policy: Policy = field(init=False, repr=False, compare=False)
    """The dispatcher's policy, made from the fields above."""

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown name and for invalid bounds."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} is '{value}'; choose one of {', '.join(choices)}")
            object.__setattr__(self, name, type(choices[0])(value))
        for name in ("limit", "hold", "patience", "outbox_mb"):
            object.__setattr__(self, name, plain_integer(getattr(self, name)))
        for name in ("plan_ms", "connect_s", "silence_s", "stall_s"):
            object.__setattr__(self, name, plain_real(getattr(self, name)))
        hold = parse_hold(self.hold) if isinstance(self.hold, str) else self.hold
        object.__setattr__(self, "hold", hold)
        check_is_absolute(hold)
        patience = self.patience
        if isinstance(patience, str) and not isinstance(patience, AutoPatience):
            patience = parse_patience(patience)
        object.__setattr__(self, "patience", patience)
        hint = resolve_hint(self.hint, auto=True) if isinstance(self.hint, str) else self.hint
        policy = Policy.with_usual_limit(
            *(hint, self.dispatch, self.limit, hold, self.w, self.agreement),
            patience=patience,
        )
        object.__setattr__(self, "policy", policy)
        for name in ("connect_s", "silence_s", "stall_s"):
            value = getattr(self, name)
            if value is None and name != "silence_s":
                continue
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"{name} is {value!r}; it must be a number of seconds above 0")
        outbox_mb: object = self.outbox_mb
        if not isinstance(outbox_mb, int) or not 1 <= outbox_mb <= MOST_OUTBOX_MB:
            raise UsageError(
                f"outbox_mb is {outbox_mb!r}; it must be a number of MiB from 1 to {MOST_OUTBOX_MB}"
            )
        if not isinstance(self.tls, bool):
            raise UsageError(f"tls is {self.tls!r}; it must be True or False")
        if self.tls and not tls.is_installed():
            raise UsageError(
                f"tls needs the package cryptography, which is not installed; {tls.HOW_TO_INSTALL}"
            )
        if not isinstance(self.admit, str):
            raise UsageError(f"admit is {self.admit!r}; it must be a name or a path, as text")
        if (file := admission_file(self.admit)) is not None:
            # It is read at the first step, and a script may change the directory before.
            object.__setattr__(self, "admit", str(file.absolute()))
        for name in ("admit_cost", "hold_features"):
            value = getattr(self, name)
            is_function = callable(value) and isinstance(value, Hashable)
            if not (value is None or isinstance(value, str) or is_function):
                raise UsageError(
                    f"{name} is {value!r:.50}; it must be a name, or a function of an item that "
                    "can be hashed"
                )
        is_measured = self.admit == Admit.PLAN or not counts_microbatches(self.policy.hold)
        if self.hold_features is not None and not is_measured:
            raise UsageError(
                "hold_features say what bytes grow with and there is no hold in bytes; set hold to "
                "a size such as 40GiB, or leave hold_features out"
            )
        check_auto(hint, self.grad_order)
        self._check_dealing()
        cost, sorts = self.admit_cost, self.admit in (Admit.PYRAMID, Admit.PLAN)
        if cost is not None and not sorts and self.admit_across != AdmitAcross.REPLICAS:
            raise UsageError(
                f"an admit_cost weighs microbatches and admit '{self.admit}' does not sort them; "
                "choose admit 'pyramid' or leave admit_cost out"
            )
        plan_ms: object = self.plan_ms
        if plan_ms is not None:
            if not isinstance(plan_ms, int | float) or not 0 < plan_ms < math.inf:
                raise UsageError(f"plan_ms is {plan_ms!r}; it must be a number above 0")
            if self.admit != Admit.PLAN:
                raise UsageError(
                    f"plan_ms says how long to plan and admit '{self.admit}' plans nothing; choose "
                    "admit 'plan' or leave plan_ms out"
                )

    def _check_dealing(self) -> None:
        across = self.admit_across
        if not isinstance(across, str):
            raise UsageError(f"admit_across is {across!r}; it must be a name or a path, as text")
        if (file := dealing_file(across)) is not None:
            object.__setattr__(self, "admit_across", str(file.absolute()))
            if self.admit != Admit.GIVEN:
                raise UsageError(
                    f"the file of admit_across '{across}' says in which order microbatches enter; "
                    f"leave admit '{self.admit}' out"
                )
        elif across == AdmitAcross.REPLICAS and self.admit not in (Admit.GIVEN, Admit.PYRAMID):
            raise UsageError(
                f"admit_across '{across}' deals a replica other microbatches than admit "
                f"'{self.admit}' orders; choose admit 'pyramid'"
            )


_CHOICES: dict[str, list[StrEnum]] = {
    "dispatch": [Dispatch.READY, Dispatch.FIXED],
    "w": [*WeightGradients],
    "agreement": [*AgreementRule],
    "grad_order": [*GradOrder],
    "placement": [*Placement],
    "transport": [*TransportName],
}


def check_auto(hint: Hint, grad_order: GradOrder) -> None:
    """Raise UsageError if a choice of hints would change what is trained."""
    if isinstance(hint, AutoHint) and grad_order is not GradOrder.CANONICAL:
        raise UsageError(
            f"a grad_order of {grad_order} lets the sums of gradients depend on the order of "
            "tasks, and hint auto changes it while the run goes on; choose canonical, or name a "
            "hint"
        )
