"""Progress curves: how many forwards and backwards each rank had started at every moment."""

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
    some_places,
    window_of,
)
from rrfp.analyze.frames import Frames
from rrfp.analyze.settings import run_limit
from rrfp.analyze.units import Unit
from rrfp.errors import RrfpError
from rrfp.trace.steps import step_name

_COLUMNS = 2
_MOST_POINTS = 250
"""Of a curve; a longer one is thinned out."""


def progress(frames: Frames, step: int | None = None) -> Any:
    """n_F(t) and n_B(t) of each rank in a step; D is what lies between. A dashed line marks how far
    the limit lets n_F go, where the run had one that could matter.

    Raises RrfpError when no step was finished, and UsageError for one that was not.
    """
    step, start_ns, end_ns, which = window_of(frames, step)
    labels, notes = some_places(frames)
    tasks = lead_tasks(frames, step).filter(
        pl.col("pp_rank").is_in(list(labels)) & pl.col("kind").is_in(["F", "B"])
    )
    if tasks.is_empty():
        raise RrfpError(f"{step_name(step)} of the trace has no tasks; see 'rrfp trace check'")
    unit = Unit.of(end_ns - start_ns)
    limit = run_limit(frames)
    counts = (
        tasks.sort("start_ns")
        .with_columns(
            n_f=(pl.col("kind") == "F").cum_sum().over("pp_rank").cast(pl.Int32),
            n_b=(pl.col("kind") == "B").cum_sum().over("pp_rank").cast(pl.Int32),
            index=pl.int_range(pl.len()).over("pp_rank"),
            num=pl.len().over("pp_rank"),
        )
        .filter(
            (pl.col("index") % (1 + pl.col("num") // _MOST_POINTS) == 0)
            | (pl.col("index") == pl.col("num") - 1)
        )
        .select(
            pl.col("pp_rank").replace_strict(labels).alias("row"),
            ((pl.col("start_ns") - start_ns) / unit.value).round(6).alias("time"),
            "n_f",
            "n_b",
            (pl.col("n_f") - pl.col("n_b")).alias("D"),
        )
    )
    most: int = counts["n_f"].max()  # type: ignore[assignment]
    domain = alt.Scale(domain=[0, most], nice=False)
    time = alt.X(
        "time:Q",
        title=f"time in the step ({unit.symbol})",
        scale=alt.Scale(domain=[0, (end_ns - start_ns) / unit.value], nice=False),
    )
    base = alt.Chart(counts)
    between = base.mark_area(interpolate="step-after", color=INK, opacity=0.12).encode(
        x=time,
        y=alt.Y("n_b:Q", title="tasks started", scale=domain),
        y2="n_f:Q",
        tooltip=["time:Q", "n_f:Q", "n_b:Q", "D:Q"],
    )
    curves = (
        base.transform_fold(["n_f", "n_b"], as_=["curve", "count"])
        .transform_calculate(kind="datum.curve == 'n_f' ? 'F' : 'B'")
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            x=time,
            y=alt.Y("count:Q", scale=domain, title="tasks started"),
            color=alt.Color(
                "kind:N",
                scale=by_value({kind: KIND_COLOURS[kind] for kind in "FB"}),
                title=None,
                legend=alt.Legend(symbolType="stroke", symbolStrokeWidth=3),
            ),
        )
    )
    layers = [between, curves]
    if limit is not None and limit < most:
        notes = (f"dashed: how far the limit of {limit} lets F go", *notes)
        layers.append(
            base.transform_calculate(ceiling=f"min(datum.n_b + {limit}, {most})")
            .mark_line(interpolate="step-after", strokeDash=[4, 3], strokeWidth=1.2, color=INK)
            .encode(x=time, y=alt.Y("ceiling:Q", scale=domain))
        )
    chart = faceted(alt.layer(*layers), "row", list(labels.values()), _COLUMNS, 120)
    return finished(
        chart, f"Forwards and backwards started in {which}", "the shaded height is D", *notes
    )
