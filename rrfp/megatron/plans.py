"""What steers a step: its shape, its hint, and what is known of the order in which tasks run."""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from rrfp.errors import UsageError
from rrfp.hint_files import resolve_hint
from rrfp.megatron.dispatching import DispatchSettings
from rrfp.schedule.dispatcher import Dispatch, check_weight_gradients
from rrfp.schedule.hints import HINT_NAMES, Hint, hint_named, kinds_of
from rrfp.schedule.order import Order
from rrfp.schedule.rehearsal import check_binding, order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What steers the steps of one shape."""

    shape: Shape
    hint: Hint
    order: Order
    keeps_microbatch_order: bool
    """On every stage, tasks of a kind run in microbatch order whatever the timing: each rank
    prefers the smallest one that is there, and first-in-first-out links keep that order."""
    is_the_same_on_replicas: bool
    """Data-parallel replicas run the backwards of a stage in one order, and their last ones from
    the largest chunk down: a microbatch comes back through the larger chunks first."""


def make_plan(settings: DispatchSettings, shape: Shape, *, forward_only: bool) -> Plan:
    """Work out the hint and the order that it gives, checked where it binds.

    The kinds of `shape` are the hint's to say, but for a step without backward. Raises UsageError
    for an unknown hint, or one that does not go with the shape or the bounds.
    """
    hint = resolve_hint(settings.hint, shape)
    check_weight_gradients(settings.w, hint)
    whole = replace(shape, kinds=kinds_of(hint))
    order = order_of(hint, whole)
    is_fixed = settings.dispatch is Dispatch.FIXED
    if is_fixed:
        check_binding(order, settings.limit, settings.hold_slots(shape.num_chunks))
    if forward_only:
        whole = replace(shape, kinds=FORWARD_ONLY)
        order = order.forwards()
    keeps_microbatch_order = _keeps_microbatch_order(order)
    return Plan(
        whole,
        order if isinstance(hint, Order) else hint,
        order,
        keeps_microbatch_order,
        keeps_microbatch_order or is_fixed,
    )


def hints_in_order(shape: Shape) -> list[str]:
    """The hints under which every stage takes its microbatches in the order in which they come."""
    found = []
    for name in HINT_NAMES:
        with suppress(UsageError):  # it does not go with the shape
            if _keeps_microbatch_order(order_of(hint_named(name, shape), shape)):
                found.append(name)
    return found


def _keeps_microbatch_order(order: Order) -> bool:
    tasks = (task for row in order.rows for task in sorted(row, key=lambda task: task[:2]))
    return all(
        before.microbatch < after.microbatch
        for before, after in pairwise(tasks)
        if before[:2] == after[:2]
    )
