"""Bubble causes: how much of each rank's window was idle, and why."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.charts.colours import CAUSE_COLOURS
from rrfp.analyze.charts.style import (
    INK,
    WIDTH_PX,
    by_value,
    finished,
    label_of,
    shown,
)
from rrfp.analyze.frames import Frames
from rrfp.analyze.units import tell
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import count_of

_ROW_PX = 24


def bubble_causes(frames: Frames, structural: Sequence[float] = ()) -> Any:
    """A bar a rank with a part a cause, in shares of the window; the rest of the window is work.

    `structural` is the structural part of the bubble by pipeline rank, as a share of the window. A
    line marks it on each bar; what lies right of it is excess. Raises RrfpError when no step was
    finished.
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
    bars = (
        alt.Chart(parts)
        .mark_bar(stroke=INK, strokeWidth=0.3, strokeOpacity=0.5)
        .encode(
            y=rows,
            x=alt.X(
                "share:Q", stack="zero", title="share of the window", axis=alt.Axis(format="%")
            ),
            color=alt.Color(
                "cause:N",
                scale=by_value(shown(CAUSE_COLOURS, parts["cause"])),
                title=None,
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
    marks = pl.DataFrame(
        [
            {"row": labels[rank.rank], "structural": rank.structural_ns / rank.window_ns}
            for rank in divided.ranks
            if rank.structural_ns is not None
        ],
        schema={"row": pl.String, "structural": pl.Float64},
    )
    notes = [f"work is the rest; {divided.bubble_fraction:.1%} of all ranks' time is bubble"]
    layers = [bars]
    if not marks.is_empty():
        notes.append(
            "the line ends the structural part, what tasks at their mean times would have left"
        )
        layers.append(
            alt.Chart(marks)
            .mark_tick(color=INK, thickness=2.5, bandSize=_ROW_PX)
            .encode(
                y=rows,
                x=alt.X("structural:Q"),
                tooltip=[alt.Tooltip("structural:Q", format=".2%")],
            )
        )
    chart = alt.layer(*layers).properties(width=WIDTH_PX, height=_ROW_PX * len(labels))
    return finished(
        chart,
        f"Why ranks idled, over {count_of(divided.steps)} of "
        f"{tell(divided.window_ns / len(divided.steps))}",
        *notes,
    )


def _labels(frames: Frames) -> dict[int, str]:
    """The label of each rank: its stages, and its place among the ranks that share them."""
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
