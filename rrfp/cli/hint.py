"""`rrfp hint`: print the order of a hint, and check an order file."""

import shutil
import sys
from typing import Annotated

import typer

from rrfp.analyze.table import Column, Table
from rrfp.cli.console import print_tables
from rrfp.cli.declared_options import hint_names
from rrfp.cli.options import Command
from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import resolve_hint
from rrfp.schedule.hints import Order, format_order
from rrfp.schedule.rehearsal import (
    Rehearsal,
    deadlock_sentence,
    format_blocked,
    format_grid,
    order_of,
    rehearse,
)
from rrfp.schedule.shape import Placement, Shape

_MAX_FORWARDS = 2**16
"""The largest number of forwards, whose rehearsal takes some seconds."""

Pp = Annotated[int, typer.Option(min=1, help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches per step.")]
Chunks = Annotated[int, typer.Option(min=1, help="Model chunks per rank.")]
PlacementOption = Annotated[
    Placement, typer.Option("--placement", help="How chunks are placed: Megatron's loop, or a V.")
]


def rehearsal_of(
    hint: str, pp: int, microbatches: int, chunks: int, placement: Placement
) -> Rehearsal:
    """Rehearse the order of a hint for this pipeline, with tasks of one unit of time. Raises
    UsageError for more than 65,536 forwards, and for a hint that is unknown or does not fit."""
    if pp * chunks * microbatches > _MAX_FORWARDS:
        raise UsageError(
            f"--pp {pp}, --chunks {chunks} and --microbatches {microbatches} make "
            f"{pp * chunks * microbatches} forwards, more than the {_MAX_FORWARDS} that are "
            "rehearsed; choose smaller ones"
        )
    shape = Shape(pp, microbatches, chunks, placement)
    return rehearse(order_of(resolve_hint(hint).for_shape(shape), shape))


def grid_of(rehearsal: Rehearsal) -> str:
    """Format the rehearsal's grid over time to the terminal's width, and below it the blocked tasks
    if it deadlocks."""
    places = (format_blocked(rehearsal.order.shape, blocked) for blocked in rehearsal.blocked)
    grid = format_grid(rehearsal, shutil.get_terminal_size().columns)
    return "\n\n".join(filter(None, [grid, "\n".join(places)]))


def show(
    hint: Annotated[
        str,
        typer.Argument(
            metavar="HINT", help="A hint's name, or an order file.", autocompletion=hint_names
        ),
    ],
    pp: Pp,
    microbatches: Microbatches,
    chunks: Chunks = 1,
    placement: PlacementOption = Placement.LOOP,
) -> None:
    """Print a hint's order: an order file on stdout, and on stderr a grid over time.

    In the grid every task takes one unit of time and messages take none. For bf
    and fb, which alternate, it is the order that they produce in this case.
    """
    rehearsal = rehearsal_of(hint, pp, microbatches, chunks, placement)
    sys.stdout.write(format_order(rehearsal.order))
    sys.stdout.flush()
    share = rehearsal.num_idle / (pp * rehearsal.num_units) if rehearsal.num_units else 0
    ends = "deadlocks after" if rehearsal.blocked else "takes"
    typer.echo(
        f"\n{hint} {ends} {rehearsal.num_units} units of time, {share:.0%} idle\n\n"
        f"{grid_of(rehearsal)}",
        err=True,
    )


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

    Prints the memory that it needs, and the blocked tasks if it deadlocks. Exit
    codes: 1 deadlock, 2 not an order for this pipeline.
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
    """Print a table on stdout of each rank's stages, its largest D (forwards minus backwards) and
    its most held activations."""
    shape = order.shape
    ranks = range(shape.num_ranks)
    print("The most at once, in activations of one chunk and microbatch:")
    table = Table(
        "",
        [
            Column("rank", ranks),
            Column("stages", [" ".join(map(str, shape.stages_of(rank))) for rank in ranks]),
            Column("D", [order.peak_depth(rank) for rank in ranks]),
            Column("held", [order.peak_held(rank) for rank in ranks]),
        ],
    )
    print_tables([table], markdown=False)


app = typer.Typer(
    help="Look at the order that a hint gives, or check an order file.", no_args_is_help=True
)

app.command(
    cls=Command,
    epilog="Examples: rrfp hint show 1f1b --pp 4 --microbatches 8 > order.csv; "
    "rrfp hint show zb-v --pp 4 --microbatches 8 --chunks 2 --placement v",
)(show)
app.command(
    cls=Command,
    epilog="Example: rrfp hint check order.csv --pp 4 --microbatches 8 && "
    "rrfp train --dispatch fixed --hint order.csv --pp 4 --microbatches 8",
)(check)
