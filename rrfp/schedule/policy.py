"""The policy: everything that steers a dispatcher, validated here and nowhere else."""

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Self

from rrfp.errors import UsageError
from rrfp.schedule.hints import Hint, WeightGradients
from rrfp.schedule.knobs import (
    IMPATIENT,
    Bytes,
    Hold,
    Patience,
    check_hold,
    check_patience,
    counts_microbatches,
    described_hold,
    described_patience,
)
from rrfp.schedule.named_hints import Alternation, AutoHint
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import plain_integer

PAPER_LIMIT = 32
"""The paper's limit on D (its App. C): the least that is usual, and what earlier versions took."""


class Dispatch(StrEnum):
    """Who decides what a rank runs next."""

    READY = "ready"
    """The dispatcher picks the best ready task by the hint."""
    FIXED = "fixed"
    """The hint's order binds."""
    MEGATRON = "megatron"
    """Megatron-Core's own schedule function, with its blocking transfers."""


class AgreementRule(StrEnum):
    """What a group runs next, given what is ready at each member."""

    INTERSECTION = "intersection"
    """The best of the tasks that are ready at all members."""
    UNANIMOUS = "unanimous"
    """What each member would pick by itself, if all pick the same (paper section 4.2)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What steers every rank of a step: the effective policy, in which a bound of None withholds
    nothing. Raises UsageError for parts that do not fit together."""

    hint: Hint
    order: Order | None = None
    """The hint's order for one shape (`rrfp.schedule.rehearsal.fitted`). Positions and deviations
    are counted against it, and `fixed` dispatch requires it. A hint that is an `Order` serves as
    its own."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """The D (chunk-forwards minus chunk-backwards run) at which `ready` dispatch withholds
    forwards. A binding order is checked against it when it is chosen."""
    hold: Hold | None = None
    """The most activations that `ready` dispatch keeps on a rank from F until W, in microbatches of
    the whole rank or in bytes. It replaces the limit."""
    w: WeightGradients = WeightGradients.IDLE
    """When a hint that is an order runs the weight gradients that it splits off."""
    agreement: AgreementRule = AgreementRule.INTERSECTION
    """How ranks that share a collective inside a task settle on the next one."""
    patience: Patience = IMPATIENT
    """How long a free rank of `ready` dispatch waits for a better task that was announced to it."""
    limits_by_shape: bool = False
    """Whether the limit is `usual_limit`, which `of_shape` puts in."""

    def __post_init__(self) -> None:
        for name in ("limit", "hold", "patience"):
            object.__setattr__(self, name, plain_integer(getattr(self, name)))
        if self.limit is not None and self.hold is not None:
            raise UsageError(
                f"a limit of {self.limit} and a hold of {self.hold} exclude each other; keep the "
                "hold, which is exact, or the limit"
            )
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise UsageError(f"the limit is {self.limit!r}; it must be a whole number, at least 1")
        check_hold(self.hold)
        if self.dispatch is not Dispatch.READY and not counts_microbatches(self.hold):
            raise UsageError(
                f"a hold of {self.hold} withholds forwards by their size, and --dispatch "
                f"{self.dispatch} runs them where its order has them; give the hold in "
                "microbatches, or use --dispatch ready"
            )
        if self.w is WeightGradients.RANKED and not self.hint.ranks_weight_gradients:
            raise UsageError(
                f"--w ranked needs an order that places the weight gradients, and {self.hint.name} "
                "does not; leave --w out or choose an order such as zb-h1"
            )
        check_patience(self.patience)
        if isinstance(self.hint, AutoHint) and self.dispatch is not Dispatch.READY:
            raise UsageError(
                f"--hint auto chooses what binds as well, and --dispatch {self.dispatch} decides "
                "it; leave --dispatch out, or name a hint"
            )
        if self.dispatch is not Dispatch.READY:
            if self.patience != IMPATIENT:
                raise UsageError(
                    f"--dispatch {self.dispatch} waits for the next task of its order as long as "
                    "it takes; leave --patience out, or use --dispatch ready"
                )
            if self.agreement is not AgreementRule.INTERSECTION:
                raise UsageError(
                    f"--dispatch {self.dispatch} has one order and nothing to agree on; leave "
                    "--agreement out"
                )
            if self.w is not WeightGradients.IDLE:
                raise UsageError(
                    f"--dispatch {self.dispatch} runs weight gradients where its order has them; "
                    "leave --w out"
                )
        if isinstance(self.hint, Order):
            object.__setattr__(self, "order", self.hint)

    @classmethod
    def with_usual_limit(
        cls,
        hint: Hint,
        dispatch: Dispatch = Dispatch.READY,
        limit: int | None = None,
        hold: Hold | None = None,
        w: WeightGradients = WeightGradients.IDLE,
        agreement: AgreementRule = AgreementRule.INTERSECTION,
        patience: Patience = IMPATIENT,
    ) -> Self:
        """A policy as a user asks for it: `ready` dispatch without a bound gets the usual limit."""
        by_shape = limit is None and hold is None and dispatch is Dispatch.READY
        return cls(hint, None, dispatch, limit, hold, w, agreement, patience, by_shape)

    def of_shape(self, shape: Shape) -> Self:
        """This policy with the limit for steps of this shape, if it has the usual one. Raises
        UsageError for a shape that the hint does not support."""
        if not self.limits_by_shape:
            return self
        return replace(self, limit=usual_limit(self.hint.on(shape), shape))

    def hold_slots(self, num_chunks: int) -> int | None:
        """The hold in slots of one chunk and one microbatch, as the dispatcher counts it. Raises
        ValueError for a fraction that is no whole number of slots. None without a hold that counts
        microbatches."""
        if not isinstance(self.hold, int | Fraction):
            return None
        if isinstance(self.hold, int):
            return self.hold * num_chunks
        slots = self.hold * num_chunks
        if slots.denominator > 1:
            raise ValueError(f"a hold of {self.hold} on {num_chunks} chunks is {slots} slots")
        return int(slots)

    @property
    def hold_bytes(self) -> int | None:
        """The hold in bytes; None where it is not in bytes."""
        return self.hold.num if isinstance(self.hold, Bytes) else None

    def num_in_flight(self, num_microbatches: int, num_chunks: int, *, forward_only: bool) -> int:
        """How many messages of a step a link must be able to hold at once, so that a full link
        never constrains a decision.

        An activation waiting on a link counts in its sender's D and held slots, a gradient in its
        receiver's, so neither can exceed the bound. With one chunk per rank a link carries only one
        of the two; with several it may carry both.
        """
        bound = num_microbatches * num_chunks
        if self.dispatch is Dispatch.READY and not forward_only:
            slots = self.hold_slots(num_chunks)
            if slots is not None:
                bound = min(bound, slots)
            elif self.limit is not None:
                # While a rank drains, D exceeds the limit by up to one activation per chunk.
                bound = min(bound, self.limit + num_chunks)
        return bound if num_chunks == 1 else 2 * bound

    def described(self) -> dict[str, object]:
        """The policy keyed by flag name, as `run.json` and traces state it; a null bound withholds
        nothing."""
        return {
            "hint": self.hint.name,
            "dispatch": str(self.dispatch),
            "limit": self.limit,
            "hold": described_hold(self.hold),
            "w": str(self.w),
            "agreement": str(self.agreement),
            "patience": described_patience(self.patience),
        }


def usual_limit(hint: Hint, shape: Shape) -> int | None:
    """The limit of `ready` dispatch for who sets no bound: the paper's, or what fills the pipeline,
    if that is more. None withholds nothing. `hint` is fitted to the shape."""
    filling = filling_limit(hint, shape)
    return None if filling is None else max(PAPER_LIMIT, filling)


def filling_limit(hint: Hint, shape: Shape) -> int | None:
    """A limit under which steps of equal tasks are no slower than 1F1B's of the same chunks, by
    simulation (docs/decisions/0036-usual-limit.md). None: no number suffices for all steps."""
    if shape.num_chunks == 1:
        return 2 * shape.num_ranks
    if isinstance(hint, Order):
        return 2 * max(map(hint.peak_depth, range(shape.num_ranks)))
    if isinstance(hint, Alternation) and not hint.deep:
        # It runs the first chunks far ahead, and a rank that drains runs microbatches one by one.
        return None
    return 3 * shape.num_stages
