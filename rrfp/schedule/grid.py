"""The rank-by-time grid of a rehearsed order as text: a row per rank, a column per unit of time."""

from itertools import zip_longest

from rrfp.schedule.rehearsal import Blocked, Rehearsal
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import format_task

IDLE = "."
BLOCKED = "!"
"""Marks the task at which a rank deadlocks."""


def format_grid(rehearsal: Rehearsal, width: int) -> str:
    """The grid, wrapped into blocks of columns that fit `width` characters.

    A cell is a task, `.` where the rank was idle, and `!` before a task at which it deadlocks.
    """
    rows = _rows(rehearsal)
    labels = ["time", *(f"rank {rank}" for rank in range(len(rows)))]
    label_width = max(map(len, labels))
    # Each column has its time, then what each rank ran then.
    columns = list(zip_longest(map(str, range(max(map(len, rows)))), *rows, fillvalue=""))
    cell_width = 1 + max(len(cell) for column in columns for cell in column)
    num_columns = max(1, (width - label_width) // cell_width)
    blocks = []
    for first in range(0, len(columns), num_columns):
        lines = zip(labels, *columns[first : first + num_columns], strict=True)
        blocks.append("\n".join(_line(line, label_width, cell_width) for line in lines))
    return "\n\n".join(blocks)


def format_blocked(shape: Shape, blocked: Blocked) -> str:
    """A sentence: the task at which a rank is stuck, and what that task lacks."""
    split = shape.splits_backward
    lacks = " and ".join(
        f"{format_task(task, split=split)} of {_whose(shape.rank_of(task.stage), blocked.rank)}"
        for task in blocked.lacks
    )
    return f"rank {blocked.rank} stands at {format_task(blocked.task, split=split)}, lacks {lacks}"


def _whose(rank: int, here: int) -> str:
    return "its own, further on in the row" if rank == here else f"rank {rank}"


def _rows(rehearsal: Rehearsal) -> list[list[str]]:
    """Each rank's cells, up to the end of the step or to where it deadlocks."""
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
    label, *rest = cells
    return (label.ljust(label_width) + "".join(cell.rjust(cell_width) for cell in rest)).rstrip()
