"""Messages and their stages: which waited for which, link by link, over the run."""

from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.charts.style import WIDTH_PX, finished
from rrfp.analyze.frames import Frames
from rrfp.analyze.misalignment import timed_messages
from rrfp.analyze.units import Unit
from rrfp.errors import RrfpError

_NUM_BINS = 60
_ROW_PX = 18
_EXTREME_SHARE = 0.98
"""The colours end at this quantile: a few long waits would hide all others."""
_COLOURS = ("#0072B2", "#7FB2D3", "#B4B4B4", "#E0A184", "#D55E00")
"""From starved over neutral to queued: apart on light and dark grounds, and to every eye."""


def misalignment_map(frames: Frames) -> Any:
    """A row a directed link, a column a span of time; the colour is the mean over its messages of
    the time queued minus the time that they starved their stage.

    Raises RrfpError for a run without messages or finished steps.
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
    over = Unit.of(end_ns - begin_ns)
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
    unit = Unit.of(extreme_ns)
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
                scale=alt.Scale(domain=domain, range=list(_COLOURS), clamp=True),
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
        "Who waited for whom, link by link",
        "orange: messages waited for the stage; blue: the stage waited for messages",
    )
