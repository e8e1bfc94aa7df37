"""A step rehearsed in lockstep, where every task takes one unit of time and messages take none; and
the policy of a step, which is completed for the step's shape by the order of a rehearsal.

A rehearsal turns a round-based hint into an order, the one it produces "when all times are equal".
A task's `hint_position` is its position in that order, and `fixed` dispatch binds to it. A
rehearsal also shows whether a binding order can run at all, and where it deadlocks if not.
Durations do not matter for that: a message arrives under every timing or under none.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest

from rrfp.errors import UsageError
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import Hint, Order, WeightGradients, kinds_of
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import ComputeIdle, InputArrived, RunTask, Task, Value, format_task

Timeline = tuple[tuple[Task | None, ...], ...]
"""The task of each rank in each unit of time, or None where it was idle, `[rank][unit]`."""


@dataclass(frozen=True, slots=True)
class Blocked(Value):
    """A rank that is stuck in a deadlock, and the task that it cannot run."""

    rank: int
    task: Task
    """The next task of its row."""
    lacks: tuple[Task, ...]
    """The prerequisites that never run. Prerequisites on this rank come later in its row."""


@dataclass(frozen=True, slots=True)
class Rehearsal(Value):
    """The result of running a binding order in lockstep, to its end or until it deadlocks."""

    order: Order
    timeline: Timeline

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """The ranks that could not finish, each with the first task of its row that never ran and
        the prerequisites that this lacks; empty if the order can run."""
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
        """Units of time from the start of the first task to the end of the last."""
        return len(self.timeline[0])

    @property
    def num_idle(self) -> int:
        """The units of time in which a rank ran nothing, summed over all ranks."""
        return sum(row.count(None) for row in self.timeline)


def order_of(hint: Hint, shape: Shape) -> Order:
    """Return the order that a hint produces when all times are equal, by playing a step in
    lockstep. For an order it is the order itself.

    The hint says whether the backward is split; the kinds of `shape` are ignored. Raises UsageError
    for a shape that the hint does not support.
    """
    hint = hint.for_shape(shape)
    if isinstance(hint, Order):
        return hint
    shape = replace(shape, kinds=kinds_of(hint))
    policy = Policy(hint)
    timeline = _play([Dispatcher(shape, rank, policy) for rank in range(shape.num_ranks)])
    rows = tuple(tuple(task for task in row if task is not None) for row in timeline)
    return Order(hint.name, shape, rows)


def rehearse(order: Order) -> Rehearsal:
    """Run an order in lockstep as `fixed` dispatch does, to its end or until it deadlocks; a
    deadlock raises nothing."""
    policy = Policy(order, dispatch=Dispatch.FIXED)
    ranks = range(order.shape.num_ranks)
    return Rehearsal(order, _play([Dispatcher(order.shape, rank, policy) for rank in ranks]))


def fitted(policy: Policy, shape: Shape, *, counts_places: bool = True) -> tuple[Policy, Shape]:
    """Complete a policy for steps of this shape; also return the shape with the kinds of its hint.

    The policy gets the hint for the shape, the hint's order and, if it `limits_by_shape`, the usual
    limit. With `counts_places=False` a policy that does not bind gets no order unless its hint is
    one: for a million tasks, making one takes as long as the step. Raises UsageError for a shape
    that the hint does not support, and for a binding order that deadlocks or exceeds a bound.
    """
    hint = policy.hint.for_shape(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    binds = policy.dispatch is not Dispatch.READY
    order = order_of(hint, shape) if binds or counts_places else None
    if binds:
        assert order is not None
        check_binding(order, policy)
    return replace(policy, hint=hint, order=order).of_shape(shape), shape


def check_binding(order: Order, policy: Policy) -> None:
    """Raise UsageError if an order, run under fixed dispatch, deadlocks or exceeds the limit or
    hold of the policy. A hold in bytes is not checked."""
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
    """Format a sentence about a deadlock: the order, where each rank is stuck, and the remedy."""
    split = order.shape.splits_backward
    places = ", ".join(f"rank {b.rank} at {format_task(b.task, split=split)}" for b in blocked)
    return (
        f"order {order.name} deadlocks as a fixed order, with {places}; "
        "reorder the lines or use it with --dispatch ready"
    )


def _play(dispatchers: list[Dispatcher]) -> Timeline:
    """Run all dispatchers unit of time by unit until no rank starts a task, because all are done or
    stuck; return what each rank ran. Messages arrive at the end of the unit in which they are
    sent."""
    shape = dispatchers[0].shape
    units: list[list[Task | None]] = []
    while True:
        # All messages of the last unit were delivered below; now every rank decides.
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
    """Let a rank decide, and return the task that it starts in this unit; None if it starts
    none."""
    for instruction in dispatcher.handle(now, ComputeIdle()):
        if isinstance(instruction, RunTask):
            return instruction.task
    return None


# The policy of a step, completed for the step's shape, and its consequences for the order of tasks.


@dataclass(frozen=True, slots=True)
class ChoiceFigures(Value):
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
class StepPolicy(Value):
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
    """Return the names of the hints under which, if all times are equal, every stage runs its
    microbatches in sequence. Hints that do not fit the shape are left out."""
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


# The rank-by-time grid of a rehearsed order as text: a row per rank, a column per unit of time.


IDLE = "."
BLOCKED = "!"
"""The mark before the task at which a rank deadlocks."""


def format_grid(rehearsal: Rehearsal, width: int) -> str:
    """Format a rehearsal as text: a row per rank and a column per unit of time, wrapped into blocks
    of columns that fit `width` characters.

    A cell is a task, `.` where the rank was idle, and `!` before a task at which it deadlocks.
    """
    rows = _rows(rehearsal)
    labels = ["time", *(f"rank {rank}" for rank in range(len(rows)))]
    label_width = max(map(len, labels))
    # A column has its time, then the cell of each rank.
    columns = list(zip_longest(map(str, range(max(map(len, rows)))), *rows, fillvalue=""))
    cell_width = 1 + max(len(cell) for column in columns for cell in column)
    num_columns = max(1, (width - label_width) // cell_width)
    blocks = []
    for first in range(0, len(columns), num_columns):
        lines = zip(labels, *columns[first : first + num_columns], strict=True)
        blocks.append("\n".join(_line(line, label_width, cell_width) for line in lines))
    return "\n\n".join(blocks)


def format_blocked(shape: Shape, blocked: Blocked) -> str:
    """Format a phrase about a stuck rank: its task, and the prerequisites that the task lacks, each
    with the rank that runs it."""
    split = shape.splits_backward
    lacks = " and ".join(
        f"{format_task(task, split=split)} of {_owner(shape.rank_of(task.stage), blocked.rank)}"
        for task in blocked.lacks
    )
    return f"rank {blocked.rank} stands at {format_task(blocked.task, split=split)}, lacks {lacks}"


def _owner(rank: int, here: int) -> str:
    """Format the rank of a prerequisite: `rank 2`, or that it stands later in the stuck rank's own
    row."""
    return "its own, further on in the row" if rank == here else f"rank {rank}"


def _rows(rehearsal: Rehearsal) -> list[list[str]]:
    """Return the cells of each rank as text, up to the end of the step or to its deadlock, where
    the blocked task follows instead of idle units."""
    split = rehearsal.order.shape.splits_backward
    rows = [
        [IDLE if task is None else format_task(task, split=split) for task in row]
        for row in rehearsal.timeline
    ]
    for blocked in rehearsal.blocked:
        row = rows[blocked.rank]
        while row and row[-1] == IDLE:
            row.pop()
        row.append(BLOCKED + format_task(blocked.task, split=split))
    return rows


def _line(cells: tuple[str, ...], label_width: int, cell_width: int) -> str:
    """Format a line of the grid: the label to the left, the other cells aligned to the right,
    without trailing spaces."""
    label, *rest = cells
    return (label.ljust(label_width) + "".join(cell.rjust(cell_width) for cell in rest)).rstrip()
