"""What a run may choose from while its chunks, their placement and its memory stay as they are."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rrfp.errors import UsageError
from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.hints.orders import ORDERS
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.hold import counts_microbatches
from rrfp.schedule.patience.setting import AutoPatience
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape

_RULES = ("bf", "bfw", "bf-deep", "bfw-deep", "b-first")
_ORDERS = ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half", "v-min")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy, fitted to a shape, and the shape with its kinds of task."""

    policy: Policy
    shape: Shape

    @property
    def name(self) -> tuple[object, ...]:
        """What tells it apart from the other candidates of a run."""
        policy = self.policy
        return (policy.hint.name, policy.dispatch, policy.w, policy.patience)


def in_words(policy: Policy) -> str:
    """What a choice decides of a policy, as `zb-v ready ranked`."""
    words = [policy.hint.name, str(policy.dispatch)]
    if policy.w is WeightGradients.RANKED:
        words.append(str(policy.w))
    if policy.patience:
        words.append("patient")
    return " ".join(words)


def candidates_of(
    asked: Policy,
    shape: Shape,
    *,
    splits: bool | None = None,
    may_bind: bool = True,
) -> list[Candidate]:
    """The policies that fit a shape and stay within the bounds of `asked`, the one to begin with
    first. With `splits`, those alone that split the backward, or that do not; without `may_bind`,
    none that binds an order. A binding order is among them if it keeps no more microbatches than a
    bound that counts them allows; in bytes, what an order keeps differs from step to step
    (`rrfp.simulate.choice.known.fits`)."""
    found: list[Candidate] = []

    def offer(policy: Policy) -> None:
        with suppress(UsageError):  # It does not fit the shape or the bounds.
            found.append(Candidate(*fitted(policy, shape, counts_places=False)))

    first = asked.hint.on(shape)
    names = [first.name, *(name for name in (*_RULES, *_ORDERS) if name != first.name)]
    hints = [HINTS[name] for name in names]
    for hint in hints:
        if splits not in (None, hint.splits_backward):
            continue
        if shape.num_chunks == 1 and hint.name.endswith("-deep"):
            continue  # the same as without it
        ready = replace(asked, hint=hint, order=None)
        offer(ready)
        if hint.ranks_weight_gradients:
            offer(replace(ready, w=WeightGradients.RANKED))
        if may_bind and hint.name in ORDERS and asked.agreement is AgreementRule.INTERSECTION:
            limit = None if asked.limits_by_shape else asked.limit
            hold = asked.hold if counts_microbatches(asked.hold) else None
            offer(Policy(hint, None, Dispatch.FIXED, limit, hold))
    return found


def unbound_of(policy: Policy, asked: Policy) -> Policy:
    """A policy that binds an order, with that order as a mere hint and the bounds of `asked`."""
    ready = replace(asked, hint=policy.hint, order=policy.order)
    return replace(ready, w=WeightGradients.RANKED) if policy.hint.ranks_weight_gradients else ready


def patient(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that can wait for what is announced, waiting."""
    return [
        replace(each, policy=replace(each.policy, patience=AutoPatience.AUTO))
        for each in candidates
        if each.policy.dispatch is Dispatch.READY and not each.policy.patience
    ]
