"""The Gantt chart of a step: a row for each stage, with numbered boxes for microbatches."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from rrfp.analyze.charts.style import (
    INK,
    WIDTH_PX,
    by_value,
    finished,
    lead_tasks,
    lead_waits,
    places,
    shown,
    window_of,
)
from rrfp.analyze.colors import CAUSE_COLORS, KIND_COLORS
from rrfp.analyze.critical_path import LINK, critical_path
from rrfp.analyze.frames import Frames
from rrfp.analyze.perfetto_overlay import replica_of
from rrfp.analyze.table import TimeUnit, format_time
from rrfp.errors import RrfpError
from rrfp.trace.records import step_name

MOST_BARS = 10_000
"""More bars are joined, because a screen cannot show them and a browser becomes slow."""
_ODD = " odd chunk"
"""The suffix of the kind of tasks of odd chunks."""
_COLORS = {
    **KIND_COLORS,
    f"F{_ODD}": "#A9DAF5",
    f"B{_ODD}": "#F0A468",
    f"W{_ODD}": "#F8F3A6",
    **CAUSE_COLORS,
}
_ROW_PX = 26
_DIGIT_PX = 5.2
_LEAST_BINS = 16
_PATH_NOTE = "black line: the critical path, which made the step as long as it was"


@dataclass(frozen=True, slots=True)
class _Panel:
    """The data of one drawn step."""

    labels: dict[int, str]
    """The label of each pipeline rank's row."""
    bars: pl.DataFrame
    path: pl.DataFrame
    """The corners of the line of the critical path."""
    length_ns: int
    which: str
    num_bars: int


def gantt(frames: Frames, step: int | None = None, most_bars: int = MOST_BARS) -> Any:
    """Draw the tasks of a step, the waits as thin bars, and the critical path as a line.

    None means the slowest step. Shows the replica with most of the critical path (the first replica
    if there is no path), and the first rank of each group. Tasks have the number of their
    microbatch if it fits; odd chunks are paler. With more than `most_bars` bars, rows are divided
    into equal spans that show what took most of them, and the chart states it.

    Raises RrfpError if no step was finished or the step has no tasks, and UsageError for an
    unfinished step.
    """
    panel = _panel(frames, step, most_bars)
    return _drawn([panel], f"{panel.which.capitalize()}: {format_time(panel.length_ns)}")


def gantts(runs: Mapping[str, tuple[Frames, int]], title: str) -> Any:
    """Draw a step of each of several runs, by name, on a common time axis, as `gantt` does.

    The runs share 10,000 bars.

    Raises RrfpError and UsageError as `gantt` does.
    """
    most_bars = MOST_BARS // max(1, len(runs))
    panels = [_panel(frames, step, most_bars, f"{name}: ") for name, (frames, step) in runs.items()]
    notes = [
        f"{name}: {panel.which}, {format_time(panel.length_ns)}"
        for name, panel in zip(runs, panels, strict=True)
    ]
    return _drawn(panels, title, *notes)


def _panel(frames: Frames, step: int | None, most_bars: int, prefix: str = "") -> _Panel:
    """Collect bars, critical path and labels of one replica, with times from the step's start.

    Without `step` it is the slowest one (`window_of`).
    """
    step, start_ns, end_ns, which = window_of(frames, step)
    labels = {pp_rank: f"{prefix}{label}" for pp_rank, label in places(frames).items()}
    replica, path = _path(frames, step)
    every = _bars(frames, step, replica).with_columns(
        pl.col("start_ns", "end_ns").clip(start_ns, end_ns) - start_ns
    )
    is_joined = len(every) > most_bars
    bars = _joined(every, end_ns - start_ns, most_bars) if is_joined else every
    row = pl.col("pp_rank").replace_strict(labels).alias("row")
    return _Panel(
        labels,
        bars.with_columns(row).drop("pp_rank"),
        path.with_columns(row, pl.col("time_ns") - start_ns).drop("pp_rank"),
        end_ns - start_ns,
        which,
        len(every),
    )


def _drawn(panels: Sequence[_Panel], title: str, *notes: str) -> Any:
    """Draw panels below each other: waits, tasks, microbatch numbers and critical paths."""
    longest_ns = max(panel.length_ns for panel in panels)
    unit = TimeUnit.of(longest_ns)
    length = longest_ns / unit.value
    bars = pl.concat([panel.bars for panel in panels], how="diagonal")
    path = pl.concat(
        [panel.path.with_columns(run=pl.lit(number)) for number, panel in enumerate(panels)]
    )
    labels = [label for panel in panels for label in panel.labels.values()]
    subtitles = list(notes)
    num_bars = sum(panel.num_bars for panel in panels)
    if num_bars > len(bars):
        subtitles.append(
            f"{num_bars:,} bars are joined into {len(bars):,}: each span shows what took most of it"
        )
    bars = bars.select(
        "row",
        (pl.col("start_ns") / unit.value).round(6).alias("start"),
        (pl.col("end_ns") / unit.value).round(6).alias("end"),
        pl.all().exclude("row", "start_ns", "end_ns"),
    )
    rows = alt.Y("row:N", sort=labels, title=None, scale=alt.Scale(padding=0.12))
    span = alt.X(
        "start:Q",
        title=f"time in the step ({unit.symbol})",
        scale=alt.Scale(domain=[0, length], nice=False),
    )
    color = alt.Color("what:N", scale=by_value(shown(_COLORS, bars["what"])), title=None)
    is_wait = pl.col("what").is_in(list(CAUSE_COLORS))
    ran = bars.filter(~is_wait)
    idle = (
        alt.Chart(bars.filter(is_wait).select("row", "start", "end", "what"))
        .mark_bar(height={"band": 0.3})
        .encode(y=rows, x=span, x2="end:Q", color=color, tooltip=["what:N", "row:N"])
    )
    work = (
        alt.Chart(ran)
        .mark_bar(stroke=INK, strokeWidth=0.4, strokeOpacity=0.6)
        .encode(
            y=rows,
            x=span,
            x2="end:Q",
            color=color,
            tooltip=[name for name in ran.columns if name not in ("start", "end")],
        )
    )
    layers = [idle, work]
    if "microbatch" in ran.columns:
        # Waits of unknown causes are among these bars and have no microbatch.
        layers.append(_numbers(ran.drop_nulls("microbatch"), rows, length))
    if not path.is_empty():
        subtitles.append(_PATH_NOTE)
        layers += _path_lines(path, unit, labels)
    chart = alt.layer(*layers).properties(width=WIDTH_PX, height=_ROW_PX * len(labels))
    return finished(chart, title, *subtitles)


def _path(frames: Frames, step: int) -> tuple[int | None, pl.DataFrame]:
    """Return the replica of a step's critical path, and the path's corners (`pp_rank`, `time_ns`).

    None and no corners if the path cannot be computed. Corners inside a straight line are left out.
    """
    corners: list[tuple[int, int]] = []
    replica = None
    # Damaged traces are drawn without a path.
    with suppress(RrfpError):
        segments = critical_path(frames, step).segments
        replica = replica_of(frames, step, segments)
        for segment in segments:
            # A link connects the previous corner to its receiver.
            if segment.kind != LINK:
                corners.append((segment.pp_rank, segment.start_ns))
            corners.append((segment.pp_rank, segment.end_ns))
    # A line along a row needs only its ends.
    needed = [
        corner
        for number, corner in enumerate(corners)
        if not 0 < number < len(corners) - 1
        or not corners[number - 1][0] == corner[0] == corners[number + 1][0]
    ]
    schema = {"pp_rank": pl.Int64, "time_ns": pl.Int64}
    return replica, pl.DataFrame(needed, schema=schema, orient="row")


def _path_lines(path: pl.DataFrame, unit: TimeUnit, labels: list[str]) -> list[Any]:
    """Draw the path as a black line with a white edge: two layers, visible on any background."""
    corners = path.select(
        "row",
        "run",
        (pl.col("time_ns") / unit.value).round(6).alias("time"),
        pl.int_range(pl.len()).alias("place"),
    )
    base = alt.Chart(corners).encode(
        y=alt.Y("row:N", sort=labels, title=None, bandPosition=0.9),
        x=alt.X("time:Q"),
        order="place:Q",
        detail="run:N",
    )
    return [
        base.mark_line(color="white", strokeWidth=4.5, strokeJoin="round", tooltip=False),
        base.mark_line(color="black", strokeWidth=2, strokeJoin="round", tooltip=False),
    ]


def _bars(frames: Frames, step: int, replica: int | None) -> pl.DataFrame:
    """Return a row for each task and wait of a replica; `what` is a task's kind or a wait's cause.

    Kinds of odd chunks have a suffix. Raises RrfpError if the step has no tasks.
    """
    tasks = lead_tasks(frames, step, replica)
    if tasks.is_empty():
        raise RrfpError(f"{step_name(step)} of the trace has no tasks; see 'rrfp trace check'")
    suffix = pl.when(pl.col("chunk") % 2 == 1).then(pl.lit(_ODD)).otherwise(pl.lit(""))
    span = ("pp_rank", "start_ns", "end_ns")
    return pl.concat(
        [
            tasks.select(
                *span,
                (pl.col("kind") + suffix).alias("what"),
                *("microbatch", "chunk", "hint_position", "skipped"),
            ),
            lead_waits(frames, step, replica).select(*span, what="cause"),
        ],
        how="diagonal",
    )


def _numbers(ran: pl.DataFrame, rows: alt.Y, length: float) -> Any:
    """Draw the microbatch number in each box that is wide enough at the chart's actual width."""
    width_px = f"(datum.end - datum.start) / {length!r} * width"
    needed_px = f"({_DIGIT_PX} * length(toString(datum.microbatch)) + 2)"
    return (
        alt.Chart(ran)
        .transform_filter(f"{width_px} > {needed_px}")
        .transform_calculate(middle="(datum.start + datum.end) / 2")
        .mark_text(fontSize=9, color="black", clip=True, tooltip=False)
        .encode(y=rows, x=alt.X("middle:Q"), text="microbatch:N")
    )


def _joined(bars: pl.DataFrame, length_ns: int, most_bars: int) -> pl.DataFrame:
    """Join bars into at most `most_bars`, with the number of spans per row halved as needed.

    At 16 spans per row or fewer there may be more bars.
    """
    num_bins = 4 * most_bars
    while True:
        joined = _joined_in(bars, length_ns, num_bins)
        if len(joined) <= most_bars or num_bins <= _LEAST_BINS:
            return joined
        num_bins //= 2


def _joined_in(bars: pl.DataFrame, length_ns: int, num_bins: int) -> pl.DataFrame:
    """Divide rows into equal spans with the kind or cause that took most, and join equal neighbors.

    Spans without any bar are left out.
    """
    bin_ns = max(1, -(-length_ns // num_bins))
    key = ("pp_rank", "bin")
    first, last = pl.col("start_ns") // bin_ns, (pl.col("end_ns") - 1).clip(0) // bin_ns
    cut = (
        bars.filter(pl.col("end_ns") > pl.col("start_ns"))
        .with_columns(bin=pl.int_ranges(first, last + 1))
        .explode("bin")
    )
    overlap = pl.min_horizontal("end_ns", (pl.col("bin") + 1) * bin_ns) - pl.max_horizontal(
        "start_ns", pl.col("bin") * bin_ns
    )
    most = (
        cut.group_by(*key, "what")
        .agg(overlap.sum().alias("ns"))
        .sort("ns", "what", descending=True)
        .unique(key, keep="first", maintain_order=True)
        .sort(key)
    )
    place = (pl.col("bin") - pl.int_range(pl.len())).alias("place")
    return (
        most.with_columns(run=pl.struct("pp_rank", "what", place).rle_id())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("pp_rank", "what").first(),
            (pl.col("bin").first() * bin_ns).alias("start_ns"),
            ((pl.col("bin").last() + 1) * bin_ns).clip(0, length_ns).alias("end_ns"),
        )
        .drop("run")
    )
