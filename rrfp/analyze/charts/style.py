"""The common style of charts, and the choice of the step and ranks that they show.

Text and lines are `currentColor`: in a page they have its light or dark color, and in a file of
their own they are black on white.
"""

from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.frames import Frames, label_of
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.records import step_name, steps_in_order

INK = "currentColor"
WIDTH_PX = 760
"""The width of a chart in a file; in a page it is as wide as the page."""
_AXIS_PX = 50
_SPACING_PX = 16
"""The space beside the first facet and between facets; page.js has the same."""
_MOST_FACETS = 16


def finished(chart: Any, title: str, *notes: str) -> Any:
    """Return the chart with title, notes as subtitles, and the common style."""
    return chart.properties(
        title=alt.TitleParams(title, subtitle=list(notes), anchor="start", offset=10)
    ).configure(**_CONFIG)


def faceted(chart: Any, by: str, order: list[str], columns: int, height_px: int) -> Any:
    """Repeat a chart for each value of the column `by`, in `columns` columns.

    `usermeta` has the number and preferred width of the facets, for page.js.
    """
    width_px = (WIDTH_PX - _AXIS_PX + _SPACING_PX) // columns - _SPACING_PX
    return (
        chart.properties(width=width_px, height=height_px)
        .facet(
            facet=alt.Facet(
                f"{by}:N", sort=order, title=None, header=alt.Header(labelAnchor="start")
            ),
            columns=columns,
            spacing={"row": 14, "column": _SPACING_PX},
        )
        .properties(usermeta={"cells": len(order), "cellWidth": WIDTH_PX // columns})
    )


def by_value(colors: dict[str, str]) -> alt.Scale:
    """Make a scale that gives each value its color, with a legend in this order."""
    return alt.Scale(domain=list(colors), range=list(colors.values()))


def shown(colors: dict[str, str], values: pl.Series) -> dict[str, str]:
    """Return the colors of the values that occur, in the order of `colors`."""
    there = set(values.unique())
    return {value: color for value, color in colors.items() if value in there}


def places(frames: Frames) -> dict[int, str]:
    """Return the label of each pipeline rank, such as `stage 3`."""
    return {pp_rank: label_of(stages) for pp_rank, stages in frames.stages.items()}


def some_places(frames: Frames) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return labels of at most 16 pipeline ranks, evenly spread, and a note if others are left
    out."""
    every = places(frames)
    if len(every) <= _MOST_FACETS:
        return every, ()
    ranks = list(every)
    last = len(ranks) - 1
    chosen = sorted({ranks[round(i * last / (_MOST_FACETS - 1))] for i in range(_MOST_FACETS)})
    note = f"{len(chosen)} of {len(ranks)} pipeline ranks are shown"
    return {pp_rank: every[pp_rank] for pp_rank in chosen}, (note,)


def window_of(frames: Frames, step: int | None) -> tuple[int, int, int, str]:
    """Return a step, its start and end in ns, and its description; None means the slowest step.

    Raises RrfpError if no step was finished by all ranks or all take no time, and UsageError for a
    step that was not finished or takes no time.
    """
    whole = frames.finished_windows().filter(pl.col("start_ns") < pl.col("end_ns"))
    if whole.is_empty():
        raise RrfpError("the steps take no time in this trace; see 'rrfp trace check'")
    found = {row[0]: row for row in whole.select("step", "start_ns", "end_ns").iter_rows()}
    if step is None:
        slowest = max(found.values(), key=lambda row: row[2] - row[1])
        of = f", the slowest of {len(found)}" if len(found) > 1 else ""
        return (*slowest, f"{step_name(slowest[0])}{of}")
    if step not in found:
        others = steps_in_order(found)
        raise UsageError(
            f"{step_name(step)} was not finished by every rank; choose one from "
            f"{step_name(others[0])} to {step_name(others[-1])}"
        )
    return (*found[step], step_name(step))


def lead_tasks(frames: Frames, step: int, replica: int | None = None) -> pl.DataFrame:
    """Return the tasks of a step in a replica (None: the first), of its lowest tensor rank.

    The first and the lowest are those that have tasks in the step.
    """
    return _of_leads(frames.tasks, step, replica)


def lead_waits(frames: Frames, step: int, replica: int | None = None) -> pl.DataFrame:
    """Return the waits of a step in a replica (None: the first), of its lowest tensor rank.

    The first and the lowest are those that have waits in the step.
    """
    return _of_leads(frames.waits, step, replica)


def _of_leads(frame: pl.DataFrame, step: int, replica: int | None) -> pl.DataFrame:
    """Keep the rows of one step, replica (None: the lowest) and tensor rank (the lowest).

    The lowest are those in the rows of this step, over all replicas.
    """
    # A trace may lack the first member or replica, so the smallest number is used.
    of_step = frame.filter(pl.col("step") == step)
    chosen = pl.col("dp_rank").min() if replica is None else pl.lit(replica)
    return of_step.filter(
        (pl.col("dp_rank") == chosen) & (pl.col("tp_rank") == pl.col("tp_rank").min())
    )


_CONFIG: dict[str, Any] = {
    "aria": False,
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "title": {"color": INK, "subtitleColor": INK, "fontSize": 14, "subtitleFontSize": 12},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "tickColor": INK,
        "tickOpacity": 0.4,
        "domainColor": INK,
        "domainOpacity": 0.4,
        "gridColor": INK,
        "gridOpacity": 0.12,
        "labelFontSize": 11,
        "titleFontSize": 11,
    },
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "orient": "bottom",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "symbolType": "square",
        "symbolStrokeWidth": 0,
        "symbolOpacity": 1,
        "columns": 6,
    },
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 11},
}
