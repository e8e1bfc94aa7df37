"""What steers a dispatcher: one type, checked here and nowhere else."""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Self

from rrfp.errors import UsageError
from rrfp.schedule.hints.hint import Hint, WeightGradients
from rrfp.schedule.order import Order

DEFAULT_LIMIT = 32
"""The paper's limit on D (its App. C), for `ready` dispatch without a bound of its own."""


class Dispatch(StrEnum):
    """Who decides what a rank runs next."""

    READY = "ready"
    """The dispatcher: the hint ranks the tasks that are ready."""
    FIXED = "fixed"
    """The hint's order, which binds."""
    MEGATRON = "megatron"
    """Megatron-Core's own schedule function, with its blocking transfers."""


class AgreementRule(StrEnum):
    """What a group runs, given what is ready at each of its members."""

    INTERSECTION = "intersection"
    """The best of the tasks that are ready at all of them."""
    UNANIMOUS = "unanimous"
    """What each member would pick by itself, if all pick the same (paper section 4.2)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What steers every rank of a step. Raises UsageError for parts that do not go together.

    It is the effective policy: a bound that is None withholds nothing.
    """

    hint: Hint
    order: Order | None = None
    """The order that the hint gives, of one shape (`rrfp.schedule.rehearsal.fitted`). Places and
    deviations are counted against it, and `fixed` dispatch needs it. A hint that is an order is its
    own."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """D, the chunk-forwards minus the chunk-backwards run, at which `ready` dispatch withholds
    forwards. A binding order is held to it when it is chosen."""
    hold: int | Fraction | None = None
    """Most activations that `ready` dispatch keeps on a rank from F until W, in microbatches of the
    whole rank: of n chunks, 1/n is one chunk's. It takes the limit's place."""
    w: WeightGradients = WeightGradients.IDLE
    """When a hint that is an order runs the weight gradients that it splits off."""
    agreement: AgreementRule = AgreementRule.INTERSECTION
    """What the ranks that share a collective inside a task run."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.hold is not None:
            raise UsageError(
                f"a limit of {self.limit} and a hold of {self.hold} exclude each other; keep the "
                "hold, which is exact, or the limit"
            )
        for name, bound in (("limit", self.limit), ("hold", self.hold)):
            if bound is not None and (type(bound) not in (int, Fraction) or bound < 1):
                raise UsageError(f"the {name} is {bound!r}; it must be a whole number from 1 on")
        if self.w is WeightGradients.RANKED and not self.hint.ranks_weight_gradients:
            raise UsageError(
                f"--w ranked needs an order that ranks the weight gradients and {self.hint.name} "
                "ranks none; leave --w out or choose an order such as zb-h1"
            )
        if self.dispatch is not Dispatch.READY:
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
        hold: int | None = None,
        w: WeightGradients = WeightGradients.IDLE,
        agreement: AgreementRule = AgreementRule.INTERSECTION,
    ) -> Self:
        """A policy as its user asks for it: `ready` dispatch without a bound has the paper's."""
        if limit is None and hold is None and dispatch is Dispatch.READY:
            limit = DEFAULT_LIMIT
        return cls(hint, None, dispatch, limit, hold, w, agreement)

    def hold_slots(self, num_chunks: int) -> int | None:
        """The hold in slots of one chunk and one microbatch, as the dispatcher counts."""
        return None if self.hold is None else int(self.hold * num_chunks)

    def num_in_flight(self, num_microbatches: int, num_chunks: int, *, forward_only: bool) -> int:
        """The most messages of a step that a link has to hold at once, so that a full link
        never binds a decision.

        An activation that waits on a link counts in its sender's D and held slots, a gradient in
        its receiver's, so neither can pass their bound. With one chunk a rank a link carries one of
        the two kinds; with several it may carry both.
        """
        bound = num_microbatches * num_chunks
        if self.dispatch is Dispatch.READY and not forward_only:
            slots = self.hold_slots(num_chunks)
            if slots is not None:
                bound = min(bound, slots)
            elif self.limit is not None:
                # D passes the limit by one activation a chunk while a rank drains.
                bound = min(bound, self.limit + num_chunks)
        return bound if num_chunks == 1 else 2 * bound

    def described(self) -> dict[str, object]:
        """The policy by the names of its flags, as `run.json` and traces state it; a bound of null
        withholds nothing."""
        return {
            "hint": self.hint.name,
            "dispatch": str(self.dispatch),
            "limit": self.limit,
            "hold": None if self.hold is None else int(self.hold),
            "w": str(self.w),
            "agreement": str(self.agreement),
        }
