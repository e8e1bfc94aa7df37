"""The policy of the steps of one shape, and its consequences for the order of their tasks."""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from rrfp.errors import UsageError
from rrfp.schedule.hints import Order, WeightGradients
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted, order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.simulate.memory_budgets import unbounded, unfilled

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceFigures:
    """How the policy of a step was chosen."""

    num_candidates: int
    predicted_s: float
    kept_s: float
    """The predicted time of a step under the policy before it."""

    def described(self) -> dict[str, object]:
        """Return the fields of a line of `metrics.jsonl`."""
        return {
            "candidates": self.num_candidates,
            "predicted_s": self.predicted_s,
            "kept_s": self.kept_s,
        }


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The policy of the steps of one shape."""

    shape: Shape
    policy: Policy
    """Fitted to this shape, with its order."""
    keeps_microbatch_order: bool
    """True if every stage runs each kind of task in microbatch order, whatever the timing: each
    rank prefers the smallest ready microbatch, and first-in-first-out links keep that order."""
    is_the_same_on_replicas: bool
    """True if data-parallel replicas run the backwards of a stage in the same order, and the last
    ones from the largest chunk down: a microbatch returns through the larger chunks first."""

    choice: ChoiceFigures | None = None
    """How it was chosen; None except in the step in which it was."""

    @property
    def hint_name(self) -> str:
        return self.policy.hint.name


class StepPolicies:
    """The policies of a run's steps, one for each shape, fitted once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._by_shape: dict[tuple[Shape, bool], StepPolicy] = {}
        self._has_warned = False

    def warn_once(self, shape: Shape) -> None:
        """Warn if a bound cannot fill the pipeline of this shape, or about the memory that it takes
        without one. Only the first call checks, at the first training step."""
        if not self._has_warned:
            self._has_warned = True
            found = unfilled(self._policy, shape)
            warning = unbounded(self._policy, shape) if found is None else found.describe()
            if warning is not None:
                _log.warning("%s", warning)

    def of(self, shape: Shape, *, forward_only: bool) -> StepPolicy:
        """Return the policy of steps of this shape, fitted once for each shape. Raises as
        `step_policy` does."""
        key = (shape, forward_only)
        if key not in self._by_shape:
            self._by_shape[key] = step_policy(self._policy, shape, forward_only=forward_only)
        return self._by_shape[key]


def step_policy(policy: Policy, shape: Shape, *, forward_only: bool) -> StepPolicy:
    """Fit a policy to steps of this shape, and derive what it guarantees about the order of tasks;
    the shape's kinds are ignored. With `forward_only`, the order has the forwards only, and no
    weight gradients are ranked.

    Raises UsageError for a hint that does not fit the shape or the bounds.
    """
    policy, shape = fitted(policy, shape)
    order = policy.order
    assert order is not None
    if forward_only:
        shape, order = replace(shape, kinds=FORWARD_ONLY), order.forwards()
        hint = order if isinstance(policy.hint, Order) else policy.hint
        # Without backwards there are no weight gradients to rank.
        policy = replace(policy, hint=hint, order=order, w=WeightGradients.IDLE)
    keeps_microbatch_order = _keeps_microbatch_order(order)
    is_the_same_on_replicas = keeps_microbatch_order or policy.dispatch is Dispatch.FIXED
    return StepPolicy(shape, policy, keeps_microbatch_order, is_the_same_on_replicas)


def hints_in_order(shape: Shape) -> list[str]:
    """Return the names of the hints under which every stage runs its microbatches in sequence.
    Hints that do not fit the shape are left out."""
    found = []
    for name in HINTS:
        with suppress(UsageError):  # it does not fit the shape
            if _keeps_microbatch_order(order_of(hint_named(name).for_shape(shape), shape)):
                found.append(name)
    return found


def _keeps_microbatch_order(order: Order) -> bool:
    """Return whether every stage runs each kind of task in ascending order of microbatches."""
    tasks = (task for row in order.rows for task in sorted(row, key=lambda task: task[:2]))
    return all(
        before.microbatch < after.microbatch
        for before, after in pairwise(tasks)
        if before[:2] == after[:2]
    )
