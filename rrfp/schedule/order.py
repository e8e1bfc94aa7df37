"""Orders: explicit sequences of tasks, a row a pipeline rank, as generators and as CSV.

An order file is torch.distributed.pipelining's CSV: one line a rank, one task a cell in its
letters (``2F0``), empty cells ignored.
"""

import csv
from dataclasses import dataclass, replace

from rrfp.errors import UsageError
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task, format_task, parse_task


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank runs, in sequence; as a hint it ranks, under fixed dispatch it binds."""

    name: str
    shape: Shape
    rows: tuple[tuple[Task, ...], ...]

    def peak_depth(self, rank: int) -> int:
        """The largest D (chunk-forwards minus chunk-backwards run) that this order reaches."""
        depth = peak = 0
        for task in self.rows[rank]:
            depth += {Kind.F: 1, Kind.B: -1, Kind.W: 0}[task.kind]
            peak = max(peak, depth)
        return peak

    def forwards(self) -> "Order":
        """This order in a step without backward: its forwards alone."""
        rows = tuple(tuple(task for task in row if task.kind is Kind.F) for row in self.rows)
        return Order(self.name, replace(self.shape, kinds=FORWARD_ONLY), rows)


def one_forward_one_backward(shape: Shape) -> Order:
    """1F1B (PipeDream-flush; Narayanan et al. 2021) for one chunk a rank, as Megatron runs it."""
    _refuse_chunks("1f1b", shape)
    if shape.splits_backward:
        raise UsageError("order 1f1b has no weight gradients of their own; choose another hint")
    num = shape.num_microbatches
    rows = []
    for rank in range(shape.num_ranks):
        num_warmup = min(shape.num_ranks - rank - 1, num)
        row = [Task(rank, Kind.F, i) for i in range(num_warmup)]
        for i in range(num - num_warmup):
            row += [Task(rank, Kind.F, i + num_warmup), Task(rank, Kind.B, i)]
        row += [Task(rank, Kind.B, i) for i in range(num - num_warmup, num)]
        rows.append(tuple(row))
    order = Order("1f1b", replace(shape, kinds=WHOLE_BACKWARD), tuple(rows))
    return order.forwards() if shape.kinds == FORWARD_ONLY else order


def gpipe(shape: Shape) -> Order:
    """GPipe (Huang et al. 2019): every forward, then every backward, both in microbatch order."""
    _refuse_chunks("gpipe", shape)
    return Order(
        "gpipe",
        shape,
        tuple(tuple(shape.tasks_of(rank)) for rank in range(shape.num_ranks)),
    )


def _refuse_chunks(name: str, shape: Shape) -> None:
    if shape.num_chunks > 1:
        raise UsageError(
            f"order {name} is for one chunk a rank, not {shape.num_chunks}; choose another hint"
        )


def parse_order(text: str, shape: Shape, name: str) -> Order:
    """Read an order file for a pipeline of this shape, whose backward is split as the file says.

    Raises UsageError with the line when a cell is no task, stands on the wrong rank's line or
    stands twice, when a task is missing, and when the text is no CSV.
    """
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        lines = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise UsageError(f"{name}, line {reader.line_num}: {error}; write plain CSV") from None
    while lines and not any(lines[-1]):
        lines.pop()
    if len(lines) != shape.num_ranks:
        raise UsageError(
            f"{name} has {len(lines)} lines for {shape.num_ranks} pipeline ranks; "
            "an order file has one line a rank"
        )
    splits = [_splits(cells) for cells in lines]
    kinds = SPLIT_BACKWARD if any(splits) else WHOLE_BACKWARD
    shape = replace(shape, kinds=kinds)
    rows = tuple(
        _parse_row(cells, shape, rank, f"{name}, line {rank + 1}")
        for rank, cells in enumerate(lines)
    )
    return Order(name, shape, rows)


def _splits(cells: list[str]) -> bool:
    return any("I" in cell or "W" in cell for cell in cells)


def _parse_row(cells: list[str], shape: Shape, rank: int, where: str) -> tuple[Task, ...]:
    row = []
    seen = set()
    for cell in filter(None, cells):
        try:
            task, split = parse_task(cell)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        if task.kind is Kind.B and split != shape.splits_backward:
            raise UsageError(
                f"{where}: {cell} is a whole backward in an order that splits others; "
                "write it as I and W"
            )
        if not shape.holds(rank, task):
            raise UsageError(
                f"{where}: {cell} is not a task of rank {rank}, which has stages "
                f"{', '.join(map(str, shape.stages_of(rank)))} and microbatches "
                f"0 to {shape.num_microbatches - 1}"
            )
        if task in seen:
            raise UsageError(f"{where}: {cell} stands twice; a task runs once")
        seen.add(task)
        row.append(task)
    for task in shape.tasks_of(rank):
        if task not in seen:
            missing = format_task(task, split=shape.splits_backward)
            raise UsageError(f"{where}: {missing} is missing; add it to the line")
    return tuple(row)


def format_order(order: Order) -> str:
    """Write an order as CSV, which `parse_order` reads back."""
    split = order.shape.splits_backward
    lines = (",".join(format_task(task, split=split) for task in row) for row in order.rows)
    return "".join(f"{line}\n" for line in lines)
