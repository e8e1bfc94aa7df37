"""The bytes that activations keep, from the sums that a rank's tasks were recorded with.

In a step, F adds what a microbatch keeps on a chunk. B leaves what is owed to W, and W gives back
that. So the change from one task to the next tells every size exactly. A dispatcher's sizes never
grow from F to W; measured ones may, where W needs more than F kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rrfp.schedule.tasks import Kind
from rrfp.trace.records import TaskRecord


class KeptChange(NamedTuple):
    """What one task changed."""

    task: TaskRecord
    change: int
    """In bytes."""
    kept: int
    """What the microbatch still keeps on this chunk; negative if the sums do not add up."""


def are_known(tasks: Iterable[TaskRecord]) -> bool:
    """Whether the sizes of any of these tasks are known."""
    return any(task.held_bytes for task in tasks)


def kept_changes(tasks: Iterable[TaskRecord]) -> Iterator[KeptChange]:
    """The changes of one rank's tasks, in the order in which they ran. Steps begin with nothing."""
    step: int | None = None
    held = 0
    kept: dict[tuple[int, int], int] = {}
    for task in tasks:
        if task.step != step:
            step, held = task.step, 0
            kept = {}
        change = task.held_bytes - held
        held = task.held_bytes
        key = task.stage, task.microbatch
        kept[key] = kept.get(key, 0) + change
        yield KeptChange(task, change, kept[key])


def held_for_w(tasks: Sequence[TaskRecord]) -> list[int]:
    """By task, the bytes that wait for weight gradients alone once it has been chosen."""
    step: int | None = None
    total = 0
    found = []
    for task, change, kept in kept_changes(tasks):
        if task.step != step:
            step, total = task.step, 0
        if task.kind == Kind.B:
            total += kept
        elif task.kind == Kind.W:
            total += change
        found.append(total)
    return found


def wrong_changes(tasks: Iterable[TaskRecord]) -> list[TaskRecord]:
    """The tasks of one rank whose sums do not add up: an F that gives bytes back, a W that takes
    some, a B or W that gives back more than were kept, and a last task of a microbatch on a chunk
    after which some are left. `tasks` are of whole steps."""
    wrong = []
    left: dict[tuple[int, int, int], tuple[TaskRecord, int]] = {}
    for task, change, kept in kept_changes(tasks):
        is_wrong_way = change < 0 if task.kind == Kind.F else task.kind == Kind.W and change > 0
        if is_wrong_way or kept < 0:
            wrong.append(task)
        left[task.step, task.stage, task.microbatch] = task, kept
    return wrong + [task for task, kept in left.values() if kept > 0]
