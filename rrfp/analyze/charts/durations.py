"""Charts of task times, message times and misalignment."""

import math
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from rrfp.analyze.charts.style import WIDTH_PX, by_value, faceted, finished, shown, some_places
from rrfp.analyze.colors import KIND_COLORS
from rrfp.analyze.frames import Frames
from rrfp.analyze.misalignment import timed_messages
from rrfp.analyze.table import TimeUnit
from rrfp.errors import RrfpError

_COLUMNS = 2
_NUM_BINS = 60
_LEAST_DECADES = 0.1
"""The least extent of the axis."""
_DIRECTION_COLORS = {"forward": KIND_COLORS["F"], "backward": KIND_COLORS["B"]}


def task_times(frames: Frames) -> Any:
    """Draw the distribution of task times by pipeline rank and kind, for at most 16 pipeline ranks.

    Raises RrfpError if there are no tasks, or all took no time.
    """
    times = frames.tasks.select(
        "pp_rank", pl.col("kind").alias("what"), (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    )
    return _distributions(frames, times, KIND_COLORS, "task", "How long tasks took")


def message_times(frames: Frames) -> Any:
    """Draw the distribution of message times by direction and receiving pipeline rank (at most 16).

    A message lasts from the first byte written to the last byte received; a blocking transfer
    begins when both ranks have reached it. Raises RrfpError if there are no messages, or all took
    no time.
    """
    times = timed_messages(frames).select(
        pl.col("to_pp_rank").alias("pp_rank"),
        pl.col("direction").alias("what"),
        (pl.col("came_ns") - pl.col("left_ns")).alias("ns"),
    )
    return _distributions(
        frames, times, _DIRECTION_COLORS, "message", "How long messages were in flight", "to "
    )


def _distributions(
    frames: Frames,
    times: pl.DataFrame,
    colors: dict[str, str],
    noun: str,
    title: str,
    prefix: str = "",
) -> Any:
    """Draw histograms on a logarithmic axis; heights are shares of a rank's times of a kind.

    Shows at most 16 pipeline ranks; 0 counts as 1 ns. Raises RrfpError if there are no times, or
    if all are 0.
    """
    if times.is_empty():
        raise RrfpError(f"the trace has no {noun}s; see 'rrfp trace check'")
    if times["ns"].max() <= 0:  # type: ignore[operator]
        raise RrfpError(f"the {noun}s of the trace took no time")
    labels, notes = some_places(frames)
    labels = {pp_rank: f"{prefix}{label}" for pp_rank, label in labels.items()}
    times = times.filter(pl.col("pp_rank").is_in(list(labels))).with_columns(
        pl.col("ns").clip(1).log10().alias("log")
    )
    low, high = times.select(pl.min("log"), pl.max("log").alias("high")).row(0)
    # A single value becomes a bar in the middle.
    margin = max(0.0, _LEAST_DECADES - (high - low)) / 2
    low, high = low - margin, high + margin
    width = (high - low) / _NUM_BINS
    unit = TimeUnit.of(10 ** ((low + high) / 2))
    edges = 10 ** (low + width * np.arange(_NUM_BINS + 1)) / unit.value
    counted = (
        times.with_columns(
            bin=((pl.col("log") - low) / width).cast(pl.Int32).clip(0, _NUM_BINS - 1)
        )
        .group_by("pp_rank", "what", "bin")
        .agg(pl.len().alias("count"))
        .with_columns(share=pl.col("count") / pl.col("count").sum().over("pp_rank", "what"))
        .sort("pp_rank", "what", "bin")
    )
    bars = counted.select(
        pl.col("pp_rank").replace_strict(labels).alias("row"),
        "what",
        pl.Series("low", edges).gather(counted["bin"]).round_sig_figs(4),
        pl.Series("high", edges).gather(counted["bin"] + 1).round_sig_figs(4),
        "count",
        pl.col("share").round_sig_figs(4),
    )
    domain = [float(edges[0]), float(edges[-1])]
    ticks = _ticks(*domain)
    scale = by_value(shown(colors, bars["what"]))
    chart = (
        alt.Chart(bars)
        .mark_rect(fillOpacity=0.35)
        .encode(
            x=alt.X(
                "low:Q",
                scale=alt.Scale(type="log", domain=domain, nice=False),
                axis=alt.Axis(values=ticks, format="~g", labelOverlap=True),
                title=f"{noun} time ({unit.symbol})",
            ),
            x2="high:Q",
            y=alt.Y("share:Q", stack=None, title=None, axis=alt.Axis(format="%", tickCount=3)),
            y2=alt.Y2Datum(0),
            # Pale with an outline, so that kinds do not hide each other.
            fill=alt.Fill("what:N", scale=scale, title=None),
            stroke=alt.Stroke("what:N", scale=scale, title=None),
            tooltip=[
                "what:N",
                alt.Tooltip("low:Q", title=f"from ({unit.symbol})"),
                alt.Tooltip("high:Q", title=f"to ({unit.symbol})"),
                "count:Q",
                alt.Tooltip("share:Q", format=".2%"),
            ],
        )
    )
    return finished(
        faceted(chart, "row", list(labels.values()), _COLUMNS, 60),
        title,
        f"{len(times):,} {noun}s; heights are shares of a rank's {noun}s of a kind",
        *notes,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between two positive limits, for a logarithmic axis.

    If there are fewer than three, four evenly spaced numbers instead.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 9:
            break
    if len(ticks) >= 3:
        return ticks
    return [float(f"{tick:.3g}") for tick in np.linspace(low, high, 4)]


_ROW_PX = 18
_EXTREME_SHARE = 0.98
"""The quantile at which the colors end, because a few long waits would hide all others."""
_COLORS = ("#0072B2", "#7FB2D3", "#B4B4B4", "#E0A184", "#D55E00")
"""From starved over neutral to queued; distinct on light and dark backgrounds and to all eyes."""


def misalignment_map(frames: Frames) -> Any:
    """Draw a row for each directed link and a column for each of 60 spans of time.

    The color is the mean, over messages that arrived then, of the time queued minus the time
    starved, limited to the 98th percentile. Raises RrfpError without messages or finished steps.
    """
    messages = timed_messages(frames)
    whole = frames.windows
    if messages.is_empty() or whole.is_empty():
        raise RrfpError(
            "the trace has no messages between stages; record one with 'rrfp train' under its own "
            "transport"
        )
    messages = messages.filter(pl.col("step").is_in(whole["step"].implode()))
    begin_ns: int = whole["start_ns"].min()  # type: ignore[assignment]
    end_ns: int = whole["end_ns"].max()  # type: ignore[assignment]
    bin_ns = max(1, -(-(end_ns - begin_ns) // _NUM_BINS))
    over = TimeUnit.of(end_ns - begin_ns)
    cells = (
        messages.with_columns(bin=(pl.col("came_ns") - begin_ns) // bin_ns)
        .group_by("from", "to", "direction", "bin")
        .agg(
            pl.len().alias("messages"),
            pl.col("queued_ns").mean().alias("queued"),
            pl.col("starved_ns").mean().alias("starved"),
        )
        .sort("direction", "from", "to", "bin", descending=[True, False, False, False])
    )
    extreme_ns: float = (cells["queued"] - cells["starved"]).abs().quantile(_EXTREME_SHARE) or 1.0
    unit = TimeUnit.of(extreme_ns)
    cells = cells.select(
        pl.format("{} → {} {}", "from", "to", "direction").alias("link"),
        (pl.col("bin") * bin_ns / over.value).round(6).alias("start"),
        ((pl.col("bin") + 1) * bin_ns / over.value).round(6).alias("end"),
        "messages",
        (pl.col("queued") / unit.value).round(4),
        (pl.col("starved") / unit.value).round(4),
        ((pl.col("queued") - pl.col("starved")) / unit.value).round(4).alias("misaligned"),
    )
    most = extreme_ns / unit.value
    domain = [-most, -most / 2, 0, most / 2, most]
    chart = (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X(
                "start:Q",
                title=f"time in the run ({over.symbol})",
                scale=alt.Scale(nice=False),
                axis=alt.Axis(grid=False),
            ),
            x2="end:Q",
            y=alt.Y("link:N", sort=None, title=None),
            color=alt.Color(
                "misaligned:Q",
                scale=alt.Scale(domain=domain, range=list(_COLORS), clamp=True),
                title=f"queued minus starved ({unit.symbol})",
                legend=alt.Legend(gradientLength=220, orient="bottom"),
            ),
            tooltip=[
                "link:N",
                "messages:Q",
                alt.Tooltip("queued:Q", title=f"queued ({unit.symbol})", format=".4g"),
                alt.Tooltip("starved:Q", title=f"starved ({unit.symbol})", format=".4g"),
            ],
        )
        .properties(width=WIDTH_PX, height=_ROW_PX * cells["link"].n_unique())
    )
    return finished(
        chart,
        "Waits of messages and stages, link by link",
        "orange: messages waited for the stage; blue: the stage waited for messages",
    )
