"""The chart of a preset: a bar per row and a facet per case, with intervals."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.charts.style import INK, WIDTH_PX, by_value, finished
from rrfp.analyze.colors import CAUSE_COLORS
from rrfp.race.presets import Measure, Preset
from rrfp.race.results import ResultRow
from rrfp.schedule.tasks import Cause

_COLORS = {
    "megatron": "#8C8C8C",
    "torch": "#E69F00",
    "deepspeed": "#CC79A7",
    "fixed": "#0072B2",
    "ready": "#009E73",
}
"""Colors by dispatch, from the palette of Okabe and Ito."""
_PARTS = {
    "compute": "#C4C4C4",
    "blocking": CAUSE_COLORS[Cause.TRANSFER],
    "coordination": CAUSE_COLORS[Cause.COORDINATION],
}
_ROW_PX = 16

_TITLES = {
    Measure.SPEED: "times as fast as Megatron's 1F1B",
    Measure.SLOWDOWN: "slowdown of a step",
}


def race_chart(preset: Preset, rows: Sequence[ResultRow]) -> Any | None:
    """Draw the chart that answers a preset's question; None if no row has its figure."""
    chart = (
        _time_parts_chart(rows)
        if preset.measure is Measure.TIME
        else _ratio_chart(preset.measure, rows)
    )
    if chart is None:
        return None
    return finished(
        chart.facet(
            row=alt.Row(
                "case:N",
                # In the order of the tables.
                sort=list(dict.fromkeys(row.lineup_row.case.name for row in rows)),
                title=None,
                header=alt.Header(labelAnchor="start", labelOrient="top"),
            )
        ).resolve_scale(y="independent"),
        f"{preset.name}: {preset.question}",
    )


def _ratio_chart(measure: Measure, rows: Sequence[ResultRow]) -> Any | None:
    """Draw each row's speed relative to Megatron's 1F1B, or its slowdown; None if no row has it."""
    base_value = 1.0 if measure is Measure.SPEED else 0.0
    found = []
    for row in rows:
        estimate = row.ratio_to_megatron if measure is Measure.SPEED else row.slowdown
        if estimate is not None:
            found.append({**_labels(row), **estimate.as_json()})
    if not found:
        return None
    frame = pl.DataFrame(found)
    base = alt.Chart(frame).encode(y=alt.Y("row:N", sort=None, title=None))
    bars = base.mark_bar().encode(
        x=alt.X(
            "median:Q",
            title=_TITLES[measure],
            axis=alt.Axis(format=".2f" if measure is Measure.SPEED else "%"),
        ),
        color=alt.Color("dispatch:N", scale=by_value(_COLORS), title=None),
        tooltip=["row:N", "median:Q", "low:Q", "high:Q"],
    )
    intervals = base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")
    line = alt.Chart().mark_rule(color=INK, strokeDash=[4, 3]).encode(x=alt.datum(base_value))
    return alt.layer(bars, intervals, line, data=frame).properties(
        width=WIDTH_PX, height=alt.Step(_ROW_PX)
    )


def _time_parts_chart(rows: Sequence[ResultRow]) -> Any | None:
    """Draw each row's compute, blocking and coordination time as a stacked bar in seconds; None if
    no row has them."""
    found = [
        {**_labels(row), "part": part, "place": place, "seconds": seconds}
        for row in rows
        for place, (part, seconds) in enumerate(
            zip(_PARTS, (row.compute_s, row.blocking_s, row.coordination_s), strict=True)
        )
        if seconds is not None
    ]
    if not found:
        return None
    frame = pl.DataFrame(found)
    return (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            y=alt.Y("row:N", sort=None, title=None),
            x=alt.X("seconds:Q", stack="zero", title="seconds of a step, mean over ranks"),
            color=alt.Color("part:N", scale=by_value(_PARTS), title=None),
            order=alt.Order("place:Q"),
            tooltip=["row:N", "part:N", "seconds:Q"],
        )
        .properties(width=WIDTH_PX, height=alt.Step(_ROW_PX))
    )


def _labels(row: ResultRow) -> dict[str, str]:
    """Return the fields by which charts place and color a row: its case, label and dispatch."""
    return {
        "case": row.lineup_row.case.name,
        "row": row.label,
        "dispatch": row.lineup_row.system.dispatch_label,
    }
