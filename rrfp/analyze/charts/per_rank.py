"""Charts with a part for each rank: causes of bubbles, memory, progress and hint order."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.charts.style import (
    INK,
    WIDTH_PX,
    by_value,
    faceted,
    finished,
    lead_tasks,
    shown,
    some_places,
    window_of,
)
from rrfp.analyze.colors import CAUSE_COLORS, KIND_COLORS
from rrfp.analyze.frames import Frames, label_of, run_limit
from rrfp.analyze.memory import activation_changes, budgets, memory
from rrfp.analyze.table import TimeUnit, format_time
from rrfp.errors import RrfpError
from rrfp.schedule.policy import byte_unit, format_bytes
from rrfp.trace.records import NS_PER_S, format_step_counts, step_name

_ROW_PX = 24


def bubble_causes(frames: Frames, structural: Sequence[float] = ()) -> Any:
    """Draw a bar for each rank with a part for each cause of idle time, as shares of the window.

    `structural` has the structural part of the bubble by pipeline rank, as a share of the window. A
    line marks its end on each bar; the rest is excess. Raises RrfpError if no step was finished.
    """
    divided = bubbles(frames).with_structural(structural)
    labels = _labels(frames)
    parts = pl.DataFrame(
        [
            {
                "row": labels[rank.rank],
                "cause": cause,
                "place": place,
                "share": time_ns / rank.window_ns,
                "seconds": time_ns / NS_PER_S,
            }
            for rank in divided.ranks
            for place, (cause, time_ns) in enumerate(rank.causes_ns.items())
            if time_ns
        ],
        schema={
            "row": pl.String,
            "cause": pl.String,
            "place": pl.Int32,
            "share": pl.Float64,
            "seconds": pl.Float64,
        },
    )
    rows = alt.Y("row:N", sort=list(labels.values()), title=None)
    notes = [f"work is the rest; {divided.bubble_fraction:.1%} of all ranks' time is bubble"]
    layers = [_cause_bars(parts, rows)]
    marks = pl.DataFrame(
        [
            {"row": labels[rank.rank], "structural": rank.structural_ns / rank.window_ns}
            for rank in divided.ranks
            if rank.structural_ns is not None
        ],
        schema={"row": pl.String, "structural": pl.Float64},
    )
    if not marks.is_empty():
        notes.append(
            "the line marks the structural part: the bubble with all tasks at their mean times"
        )
        layers.append(
            alt.Chart(marks)
            .mark_tick(color=INK, thickness=2.5, bandSize=_ROW_PX)
            .encode(
                y=rows, x=alt.X("structural:Q"), tooltip=[alt.Tooltip("structural:Q", format=".2%")]
            )
        )
    chart = alt.layer(*layers).properties(width=WIDTH_PX, height=_ROW_PX * len(labels))
    return finished(
        chart,
        f"Why ranks idled, over {format_step_counts(divided.steps)} of "
        f"{format_time(divided.window_ns / len(divided.steps))}",
        *notes,
    )


def _cause_bars(parts: pl.DataFrame, rows: alt.Y) -> Any:
    """Draw a bar for each rank, with a part for each cause."""
    return (
        alt.Chart(parts)
        .mark_bar(stroke=INK, strokeWidth=0.3, strokeOpacity=0.5)
        .encode(
            y=rows,
            x=alt.X(
                "share:Q", stack="zero", title="share of the window", axis=alt.Axis(format="%")
            ),
            color=alt.Color(
                "cause:N", scale=by_value(shown(CAUSE_COLORS, parts["cause"])), title=None
            ),
            order=alt.Order("place:Q"),
            tooltip=[
                alt.Tooltip("row:N", title="rank"),
                alt.Tooltip("cause:N"),
                alt.Tooltip("share:Q", format=".2%"),
                alt.Tooltip("seconds:Q", format=".4g"),
            ],
        )
    )


def _labels(frames: Frames) -> dict[int, str]:
    """Return the label of each rank: its stages, with its replica and tensor rank if there are
    several."""
    run = frames.run.sort("pp_rank", "dp_rank", "tp_rank")
    several = [name for name in ("dp_rank", "tp_rank") if run[name].n_unique() > 1]
    return {
        row["rank"]: " ".join(
            [
                label_of(row["stages"]),
                *(f"{name.removesuffix('_rank')}{row[name]}" for name in several),
            ]
        )
        for row in run.iter_rows(named=True)
    }


_COLUMNS = 2
_MOST_POINTS = 250
"""The largest number of points of a curve; longer curves are thinned."""


def memory_held(frames: Frames, step: int | None = None) -> Any:
    """Draw the held activation bytes of each pipeline rank over a step, with its bound dashed.

    None means the step with the highest peak. Of several ranks at a stage, the one with the highest
    peak in the step is shown; of more than 16 stages, 16. Raises RrfpError if no step was finished
    or the trace has no bytes, and UsageError for an unfinished step.
    """
    found = memory(frames)
    step, start_ns, end_ns, which = window_of(
        frames, found.worst.peak_step if step is None else step
    )
    if step == found.worst.peak_step:
        which = f"{step_name(step)}, the one with the highest peak"
    labels, notes = some_places(frames)
    tasks = activation_changes(frames.of_steps([step])).filter(
        pl.col("pp_rank").is_in(list(labels))
    )
    held_most = (
        tasks.group_by("pp_rank", "rank")
        .agg(pl.col("held_bytes").max())
        .sort("pp_rank", "held_bytes", "rank", descending=[False, True, False])
        .unique("pp_rank", keep="first", maintain_order=True)
    )
    own = tasks.join(held_most.select("rank"), on="rank", how="semi")
    unit = TimeUnit.of(end_ns - start_ns)
    most = max(1, *held_most["held_bytes"])
    symbol, size = byte_unit(most)
    curves = _thinned(own).select(
        pl.col("pp_rank").replace_strict(labels).alias("row"),
        ((pl.col("start_ns") - start_ns) / unit.value).round(6).alias("time"),
        (pl.col("held_bytes") / size).round(6).alias("held"),
        (pl.col("for_w") / size).round(6).alias("for_w"),
    )
    bounds = (
        held_most.join(budgets(frames).filter(pl.col("step") == step), on="rank")
        .filter(pl.col("budget_bytes") > 0)
        .select(
            pl.col("pp_rank").replace_strict(labels).alias("row"),
            (pl.col("budget_bytes") / size).round(6).alias("bound"),
        )
    )
    # All layers of a facet share one table.
    table = pl.concat([curves, bounds], how="diagonal")
    time = alt.X(
        "time:Q",
        title=f"time in the step ({unit.symbol})",
        scale=alt.Scale(domain=[0, (end_ns - start_ns) / unit.value], nice=False),
    )
    title = f"{symbol} held"
    base = alt.Chart().transform_filter("isValid(datum.held)")
    layers = [
        base.mark_area(interpolate="step-after", color=KIND_COLORS["F"], opacity=0.7).encode(
            x=time, y=alt.Y("held:Q", title=title), tooltip=["time:Q", "held:Q", "for_w:Q"]
        )
    ]
    if (own["for_w"] > 0).any():
        notes = ("yellow: held only for pending weight gradients", *notes)
        layers.append(
            base.mark_area(interpolate="step-after", color=KIND_COLORS["W"], opacity=0.9).encode(
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
        chart, f"Bytes of activations held in {which}", f"at most {format_bytes(most)}", *notes
    )


def _thinned(held: pl.DataFrame) -> pl.DataFrame:
    """Keep the highest point of each group of neighboring points, so that curves have at most
    250."""
    return (
        held.with_columns(index=pl.int_range(pl.len()).over("rank"), num=pl.len().over("rank"))
        .with_columns(group=pl.col("index") // (1 + pl.col("num") // _MOST_POINTS))
        .sort("rank", "group", "held_bytes", descending=[False, False, True], maintain_order=True)
        .unique(["rank", "group"], keep="first", maintain_order=True)
        .sort("rank", "start_ns", maintain_order=True)
    )


def progress(frames: Frames, step: int | None = None) -> Any:
    """Draw the started forwards n_F(t) and backwards n_B(t) of each rank; their difference is D.

    None means the slowest step. Shows the first replica, the first rank of each group, and at most
    16 pipeline ranks. A dashed line marks how far the limit lets n_F go, if it is below the number
    of forwards. Raises RrfpError if no step was finished or the step has no F or B, and UsageError
    for an unfinished step.
    """
    step, start_ns, end_ns, which = window_of(frames, step)
    labels, notes = some_places(frames)
    tasks = lead_tasks(frames, step).filter(
        pl.col("pp_rank").is_in(list(labels)) & pl.col("kind").is_in(["F", "B"])
    )
    if tasks.is_empty():
        raise RrfpError(f"{step_name(step)} of the trace has no tasks; see 'rrfp trace check'")
    unit = TimeUnit.of(end_ns - start_ns)
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
                scale=by_value({kind: KIND_COLORS[kind] for kind in "FB"}),
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


_ORDER_COLUMNS = 4


def hint_order(frames: Frames, step: int | None = None) -> Any:
    """Draw a point for each task: its position of dispatch and its position in the hint's order.

    None means the slowest step. Shows the first replica, the first rank of each group, and at most
    16 pipeline ranks. Tasks above the diagonal were dispatched earlier than the hint ranks them.
    Raises RrfpError if no step was finished or the run recorded no hint positions, and UsageError
    for an unfinished step.
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
        color=alt.Color("kind:N", scale=by_value(shown(KIND_COLORS, points["kind"])), title=None),
        tooltip=["kind:N", "microbatch:Q", "dispatched:Q", "hint_position:Q", "skipped:Q"],
    )
    line = base.mark_line(color=INK, opacity=0.35, strokeWidth=1, tooltip=False).encode(
        x="dispatched:Q", y="dispatched:Q"
    )
    chart = faceted(alt.layer(line, dots), "row", list(labels.values()), _ORDER_COLUMNS, 140)
    return finished(
        chart,
        f"Hint and dispatch positions in {which}",
        "above the line: dispatched earlier than the hint ranks it",
        *notes,
    )


_AXIS = alt.Axis(tickCount=4)
