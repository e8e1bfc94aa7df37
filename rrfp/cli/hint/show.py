"""`rrfp hint show`: the order of a hint."""

import sys
from typing import Annotated

import typer

from rrfp.cli.completion import hint_names
from rrfp.cli.hint.rehearsed import Chunks, Microbatches, PlacementOption, Pp, grid_of, rehearsal_of
from rrfp.schedule.order import format_order
from rrfp.schedule.shape import Placement


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

    In the grid every task takes one unit of time and every message none.
    The order of a hint that ranks in rounds is the one that it gives then.
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
