"""Memory: the bytes of activations that each rank held at every moment, below its bound."""

from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.charts.colours import KIND_COLOURS
from rrfp.analyze.charts.style import INK, faceted, finished, some_places, window_of
from rrfp.analyze.frames import Frames
from rrfp.analyze.memory.peaks import budgets, kept_changes, memory
from rrfp.analyze.units import Unit
from rrfp.schedule.hold import byte_unit, told_bytes
from rrfp.trace.steps import step_name

_COLUMNS = 2
_MOST_POINTS = 250
"""Of a curve; of a longer one the highest point of every few is drawn."""


def memory_held(frames: Frames, step: int | None = None) -> Any:
    """What each pipeline rank held in a step, at most over its replicas; None takes the step with
    the highest peak. A dashed line is the bound in bytes, where one was in force.

    Raises RrfpError when no step was finished or the trace does not tell any bytes, and UsageError
    for a step that was not finished.
    """
    found = memory(frames)
    step, start_ns, end_ns, which = window_of(
        frames, found.worst.peak_step if step is None else step
    )
    if step == found.worst.peak_step:
        which = f"{step_name(step)}, the one with the highest peak"
    labels, notes = some_places(frames)
    # Of the ranks at one place the one that held most in the step.
    tasks = kept_changes(frames.of_steps([step])).filter(pl.col("pp_rank").is_in(list(labels)))
    held_most = (
        tasks.group_by("pp_rank", "rank")
        .agg(pl.col("held_bytes").max())
        .sort("pp_rank", "held_bytes", "rank", descending=[False, True, False])
        .unique("pp_rank", keep="first", maintain_order=True)
    )
    own = tasks.join(held_most.select("rank"), on="rank", how="semi")
    unit = Unit.of(end_ns - start_ns)
    most = max(1, *held_most["held_bytes"])
    symbol, size = byte_unit(most)
    curves = (
        own.with_columns(index=pl.int_range(pl.len()).over("rank"), num=pl.len().over("rank"))
        .with_columns(group=pl.col("index") // (1 + pl.col("num") // _MOST_POINTS))
        .sort("rank", "group", "held_bytes", descending=[False, False, True], maintain_order=True)
        .unique(["rank", "group"], keep="first", maintain_order=True)
        .sort("rank", "start_ns", maintain_order=True)
        .select(
            pl.col("pp_rank").replace_strict(labels).alias("row"),
            ((pl.col("start_ns") - start_ns) / unit.value).round(6).alias("time"),
            (pl.col("held_bytes") / size).round(6).alias("held"),
            (pl.col("for_w") / size).round(6).alias("for_w"),
        )
    )
    bounds = (
        held_most.join(budgets(frames).filter(pl.col("step") == step), on="rank")
        .filter(pl.col("budget_bytes") > 0)
        .select(
            pl.col("pp_rank").replace_strict(labels).alias("row"),
            (pl.col("budget_bytes") / size).round(6).alias("bound"),
        )
    )
    # Both in one table, as all layers of a facet share their data.
    table = pl.concat([curves, bounds], how="diagonal")
    time = alt.X(
        "time:Q",
        title=f"time in the step ({unit.symbol})",
        scale=alt.Scale(domain=[0, (end_ns - start_ns) / unit.value], nice=False),
    )
    title = f"{symbol} held"
    base = alt.Chart().transform_filter("isValid(datum.held)")
    layers = [
        base.mark_area(interpolate="step-after", color=KIND_COLOURS["F"], opacity=0.7).encode(
            x=time,
            y=alt.Y("held:Q", title=title),
            tooltip=["time:Q", "held:Q", "for_w:Q"],
        )
    ]
    if (own["for_w"] > 0).any():
        notes = ("yellow: what waits for weight gradients alone", *notes)
        layers.append(
            base.mark_area(interpolate="step-after", color=KIND_COLOURS["W"], opacity=0.9).encode(
                x=time, y=alt.Y("for_w:Q", title=title)
            )
        )
    if not bounds.is_empty():
        notes = ("dashed: the bound", *notes)
        layers.append(
            alt.Chart()
            .transform_filter("isValid(datum.bound)")
            .mark_rule(strokeDash=[4, 3], strokeWidth=1.5, color=INK)
            .encode(y=alt.Y("bound:Q", title=title))
        )
    chart = faceted(alt.layer(*layers, data=table), "row", list(labels.values()), _COLUMNS, 110)
    return finished(
        chart,
        f"Bytes of activations held in {which}",
        f"at most {told_bytes(most)}",
        *notes,
    )
