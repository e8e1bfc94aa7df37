"""A step rehearsed in lockstep: every task takes one unit of time and every message none.

It gives the order that a round-based hint makes "when all times are equal", which is where a task's
`hint_position` is counted and what `fixed` dispatch binds to; and it finds out whether a binding
order can run at all, and where it stands if not: that depends on no task's duration, for what a
rank waits for is either still to come in every timing or in none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints.hint import Hint, kinds_of
from rrfp.schedule.instructions import RunTask
from rrfp.schedule.order import Order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.stimuli import ComputeIdle, InputArrived
from rrfp.schedule.tasks import Task, format_task

Timeline = tuple[tuple[Task | None, ...], ...]
"""What each rank ran in each unit of time, None where it was idle; as long for every rank."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Where a rank stands in a deadlock."""

    rank: int
    task: Task
    """The next of its row."""
    lacks: tuple[Task, ...]
    """The tasks that must run before it and never will; on this rank, they stand behind it."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A binding order run in lockstep, to its end or to where it deadlocks."""

    order: Order
    timeline: Timeline

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """The ranks that could not finish, none if the order can run."""
        ran = set(chain.from_iterable(self.timeline))
        firsts_left = [
            (rank, next((task for task in row if task not in ran), None))
            for rank, row in enumerate(self.order.rows)
        ]
        return tuple(
            Blocked(
                rank,
                task,
                tuple(t for t in self.order.shape.prerequisites(task) if t not in ran),
            )
            for rank, task in firsts_left
            if task is not None
        )

    @property
    def num_units(self) -> int:
        """Units of time from the first task to the end of the last."""
        return len(self.timeline[0])

    @property
    def num_idle(self) -> int:
        """Units of time in which a rank ran nothing, over all ranks."""
        return sum(row.count(None) for row in self.timeline)


def order_of(hint: Hint, shape: Shape) -> Order:
    """The order that a hint gives when all times are equal; an order gives itself.

    Its backward is split as the hint says; the kinds of `shape` do not count. Raises UsageError for
    a shape that the hint is not made for.
    """
    hint = hint.on(shape)
    if isinstance(hint, Order):
        return hint
    shape = replace(shape, kinds=kinds_of(hint))
    policy = Policy(hint)
    timeline = _play([Dispatcher(shape, rank, policy) for rank in range(shape.num_ranks)])
    rows = tuple(tuple(task for task in row if task is not None) for row in timeline)
    return Order(hint.name, shape, rows)


def rehearse(order: Order) -> Rehearsal:
    """Run an order in lockstep as `fixed` dispatch does."""
    policy = Policy(order, dispatch=Dispatch.FIXED)
    ranks = range(order.shape.num_ranks)
    return Rehearsal(order, _play([Dispatcher(order.shape, rank, policy) for rank in ranks]))


def fitted(policy: Policy, shape: Shape, *, counts_places: bool = True) -> tuple[Policy, Shape]:
    """A policy for steps of this shape, and the shape with the kinds of its hint.

    Its hint is that of the shape, and it has the order that the hint gives, unless nobody counts
    places against that: of a million tasks it takes as long as a step. Raises UsageError for a
    shape that the hint is not made for, and for an order that binds and deadlocks or passes a
    bound.
    """
    hint = policy.hint.on(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    binds = policy.dispatch is not Dispatch.READY
    order = order_of(hint, shape) if binds or counts_places else None
    if binds:
        assert order is not None
        check_binding(order, policy)
    return replace(policy, hint=hint, order=order), shape


def check_binding(order: Order, policy: Policy) -> None:
    """Raise UsageError when an order, run as fixed dispatch, deadlocks or passes a bound of the
    policy."""
    blocked = rehearse(order).blocked
    if blocked:
        raise UsageError(deadlock_sentence(order, blocked))
    ranks = range(order.shape.num_ranks)
    rank = max(ranks, key=order.peak_depth)
    depth = order.peak_depth(rank)
    if policy.limit is not None and depth > policy.limit:
        raise UsageError(
            f"order {order.name} runs {depth} forwards ahead of their backwards on rank {rank}, "
            f"above the limit of {policy.limit}; raise --limit to {depth} or use --dispatch ready"
        )
    num_chunks = order.shape.num_chunks
    slots = policy.hold_slots(num_chunks)
    rank = max(ranks, key=order.peak_held)
    held = order.peak_held(rank)
    if slots is not None and held > slots:
        raise UsageError(
            f"order {order.name} keeps {held / num_chunks:g} microbatches on rank {rank}, above "
            f"the hold of {slots / num_chunks:g}; raise --hold to {-(-held // num_chunks)} or use "
            "--dispatch ready"
        )


def deadlock_sentence(order: Order, blocked: Sequence[Blocked]) -> str:
    """That an order deadlocks, where each rank stands, and what to do."""
    split = order.shape.splits_backward
    places = ", ".join(f"rank {b.rank} at {format_task(b.task, split=split)}" for b in blocked)
    return (
        f"order {order.name} deadlocks as a fixed order, with {places}; "
        "reorder the lines or use it with --dispatch ready"
    )


def _play(dispatchers: list[Dispatcher]) -> Timeline:
    """Every unit of time until nothing starts any more."""
    shape = dispatchers[0].shape
    units: list[list[Task | None]] = []
    while True:
        # All that finished by this instant has been handed in below; now every rank decides.
        unit = [_decide(dispatcher, len(units)) for dispatcher in dispatchers]
        if not any(unit):
            return tuple(zip(*units, strict=True)) or ((),) * len(dispatchers)
        units.append(unit)
        for task in filter(None, unit):
            receiver = shape.receiver(task)
            if receiver is None:
                continue
            rank = shape.rank_of(receiver.stage)
            if rank != shape.rank_of(task.stage):
                dispatchers[rank].handle(len(units), InputArrived(receiver))


def _decide(dispatcher: Dispatcher, now: int) -> Task | None:
    """What a rank starts at an instant, if anything."""
    for instruction in dispatcher.handle(now, ComputeIdle()):
        if isinstance(instruction, RunTask):
            return instruction.task
    return None
