"""`rrfp hint check`: whether an order can bind."""

from typing import Annotated

import typer

from rrfp.cli.completion import hint_names
from rrfp.cli.hint.rehearsed import Chunks, Microbatches, PlacementOption, Pp, grid_of, rehearsal_of
from rrfp.errors import RrfpError
from rrfp.schedule.order import Order
from rrfp.schedule.rehearsal import deadlock_sentence
from rrfp.schedule.shape import Placement


def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="An order file, or a hint's name.", autocompletion=hint_names
        ),
    ],
    pp: Pp,
    microbatches: Microbatches,
    chunks: Chunks = 1,
    placement: PlacementOption = Placement.LOOP,
) -> None:
    """Check that an order has every task once, and that it can run as a fixed order.

    Tells the memory that it takes, and where it deadlocks if it does.
    Exits with 1 then, and with 2 if it is no order for this pipeline.
    """
    rehearsal = rehearsal_of(file, pp, microbatches, chunks, placement)
    order, blocked = rehearsal.order, rehearsal.blocked
    print(f"{file} has each of the {order.shape.num_tasks_of_a_rank} tasks of every rank once")
    _print_peaks(order)
    if blocked:
        print(grid_of(rehearsal))
        raise RrfpError(deadlock_sentence(order, blocked))
    print(f"As a fixed order it runs to its end, in {rehearsal.num_units} units of time")


def _print_peaks(order: Order) -> None:
    from rich import box
    from rich.table import Table

    from rrfp.cli.terminal.console import console

    print("The most at once, in activations of one chunk and microbatch:")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rank", "stages", "D", "held"):
        table.add_column(heading, justify="right")
    for rank in range(order.shape.num_ranks):
        stages = " ".join(map(str, order.shape.stages_of(rank)))
        table.add_row(str(rank), stages, str(order.peak_depth(rank)), str(order.peak_held(rank)))
    console().print(table)
