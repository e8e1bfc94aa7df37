"""Hint position against dispatch position: how far each rank departed from its hint's order."""

from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.charts.colours import KIND_COLOURS
from rrfp.analyze.charts.style import (
    INK,
    by_value,
    faceted,
    finished,
    lead_tasks,
    shown,
    some_places,
    window_of,
)
from rrfp.analyze.frames import Frames
from rrfp.errors import RrfpError

_COLUMNS = 4


def hint_order(frames: Frames, step: int | None = None) -> Any:
    """A point a task: how many tasks its rank had started before it in the step, and its place in
    the hint's order. On the line the two agree; above it a task came earlier than the hint has it.

    Raises RrfpError when no step was finished or the run has no hint's order, and UsageError for a
    step that was not finished.
    """
    step, _, _, which = window_of(frames, step)
    labels, notes = some_places(frames)
    tasks = lead_tasks(frames, step).filter(pl.col("pp_rank").is_in(list(labels)))
    if tasks.filter(pl.col("hint_position") >= 0).is_empty():
        raise RrfpError(
            "the trace has no places of its tasks in a hint's order; record one with 'rrfp train'"
        )
    points = tasks.sort("pp_rank", "start_ns").select(
        pl.col("pp_rank").replace_strict(labels).alias("row"),
        (pl.int_range(pl.len()).over("pp_rank")).alias("dispatched"),
        "hint_position",
        "kind",
        "microbatch",
        "skipped",
    )
    longest = max(len(points) // max(1, points["row"].n_unique()), 1)
    place = alt.Scale(domain=[0, longest], nice=False)
    base = alt.Chart(points)
    dots = base.mark_circle(size=14, opacity=0.9).encode(
        x=alt.X("dispatched:Q", title="dispatch position", scale=place, axis=_AXIS),
        y=alt.Y("hint_position:Q", title="hint position", scale=place, axis=_AXIS),
        color=alt.Color("kind:N", scale=by_value(shown(KIND_COLOURS, points["kind"])), title=None),
        tooltip=["kind:N", "microbatch:Q", "dispatched:Q", "hint_position:Q", "skipped:Q"],
    )
    line = base.mark_line(color=INK, opacity=0.35, strokeWidth=1, tooltip=False).encode(
        x="dispatched:Q", y="dispatched:Q"
    )
    chart = faceted(alt.layer(line, dots), "row", list(labels.values()), _COLUMNS, 140)
    return finished(
        chart,
        f"Hint and dispatch positions in {which}",
        "above the line: dispatched earlier than the hint has it",
        *notes,
    )


_AXIS = alt.Axis(tickCount=4)
