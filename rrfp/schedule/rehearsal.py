"""A step rehearsed in lockstep: every task takes one unit of time and every message none.

It gives the order that a round-based hint makes "when all times are equal", which is where a task's
`hint_position` is counted and what `fixed` dispatch binds to; and it finds out whether a binding
order can run at all.
"""

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import ComputeIdle, Dispatch, Dispatcher, InputArrived, RunTask
from rrfp.schedule.hints import Hint
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task, format_task


def order_of(hint: Hint, shape: Shape) -> Order:
    """The order that a hint gives when all times are equal; an order gives itself."""
    if isinstance(hint, Order):
        return hint
    rows, _ = _rehearse([Dispatcher(shape, rank, hint) for rank in range(shape.num_ranks)])
    return Order(hint.name, shape, rows)


def check_binding(order: Order, limit: int | None = None) -> None:
    """Raise UsageError when an order, run as fixed dispatch, deadlocks or its D passes a limit."""
    shape = order.shape
    rows, is_whole = _rehearse(
        [Dispatcher(shape, rank, order, dispatch=Dispatch.FIXED) for rank in range(shape.num_ranks)]
    )
    if not is_whole:
        blocked = ", ".join(
            f"rank {rank} at {format_task(row[len(done)], split=shape.splits_backward)}"
            for rank, (row, done) in enumerate(zip(order.rows, rows, strict=True))
            if len(done) < len(row)
        )
        raise UsageError(
            f"order {order.name} deadlocks as a fixed order, with {blocked}; "
            "reorder the lines or use it with --dispatch ready"
        )
    for rank in range(shape.num_ranks):
        peak = order.peak_depth(rank)
        if limit is not None and peak > limit:
            raise UsageError(
                f"order {order.name} runs {peak} forwards ahead of their backwards on rank {rank}, "
                f"above the limit of {limit}; raise --limit or use --dispatch ready"
            )


def _rehearse(dispatchers: list[Dispatcher]) -> tuple[tuple[tuple[Task, ...], ...], bool]:
    """What each rank ran, in its sequence, and whether that was the whole step."""
    shape = dispatchers[0].shape
    rows: list[list[Task]] = [[] for _ in dispatchers]
    now = 0
    while True:
        # All that finished by this instant has been handed in below; now every rank decides.
        started = []
        for dispatcher, row in zip(dispatchers, rows, strict=True):
            for instruction in dispatcher.handle(now, ComputeIdle()):
                if isinstance(instruction, RunTask):
                    row.append(instruction.task)
                    started.append(instruction.task)
        if not started:
            is_whole = all(len(row) == shape.num_tasks_of_a_rank for row in rows)
            return tuple(tuple(row) for row in rows), is_whole
        now += 1
        for task in started:
            receiver = shape.receiver(task)
            if receiver is None:
                continue
            rank = shape.rank_of(receiver.stage)
            if rank != shape.rank_of(task.stage):
                dispatchers[rank].handle(now, InputArrived(receiver))
