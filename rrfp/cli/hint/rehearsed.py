"""What `rrfp hint` looks at: an order of a pipeline, rehearsed, and its grid over time."""

import shutil
from typing import Annotated

import typer

from rrfp.errors import UsageError
from rrfp.inputs.hint_files import resolve_hint
from rrfp.schedule.grid import format_blocked, format_grid
from rrfp.schedule.rehearsal import Rehearsal, order_of, rehearse
from rrfp.schedule.shape import Placement, Shape

_MAX_FORWARDS = 2**16
"""More than anybody can look at; a rehearsal of these takes some seconds."""

Pp = Annotated[int, typer.Option(min=1, help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches a step.")]
Chunks = Annotated[int, typer.Option(min=1, help="Model chunks a rank.")]
PlacementOption = Annotated[
    Placement, typer.Option("--placement", help="Where chunks lie: Megatron's loop, or a V.")
]


def rehearsal_of(
    hint: str, pp: int, microbatches: int, chunks: int, placement: Placement
) -> Rehearsal:
    if pp * chunks * microbatches > _MAX_FORWARDS:
        raise UsageError(
            f"--pp {pp}, --chunks {chunks} and --microbatches {microbatches} make "
            f"{pp * chunks * microbatches} forwards, more than the {_MAX_FORWARDS} that are "
            "rehearsed; choose smaller ones"
        )
    shape = Shape(pp, microbatches, chunks, placement)
    return rehearse(order_of(resolve_hint(hint).on(shape), shape))


def grid_of(rehearsal: Rehearsal) -> str:
    """The grid as wide as the terminal, and under it where each rank stands in a deadlock."""
    places = (format_blocked(rehearsal.order.shape, blocked) for blocked in rehearsal.blocked)
    grid = format_grid(rehearsal, shutil.get_terminal_size().columns)
    return "\n\n".join(filter(None, [grid, "\n".join(places)]))
