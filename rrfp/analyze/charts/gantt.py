"""The Gantt chart of a step, as papers on pipelines draw it: a row a stage, boxes with numbers."""

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
"""More are joined: a screen has no room for them, and a browser takes its time."""
_ODD = " odd chunk"
"""Behind the kind of a task whose chunk has an odd number."""
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
    """One step of a run: what is drawn of it."""

    labels: dict[int, str]
    """By pipeline rank, of its row."""
    bars: pl.DataFrame
    path: pl.DataFrame
    """The corners of the line that the critical path is."""
    length_ns: int
    which: str
    num_bars: int


def gantt(frames: Frames, step: int | None = None, most_bars: int = MOST_BARS) -> Any:
    """The tasks of a step and, thin, the waits between them; None is the slowest step. A line is
    the critical path.

    Of replicas that with the critical path is shown, and of ranks that run tasks together the
    first. A task is named by its microbatch where that fits; every other chunk of a rank is paler.
    Above `most_bars` a row is cut into equal spans, each of which shows what took most of it, and
    the chart says so.

    Raises RrfpError when no step was finished, and UsageError for one that was not.
    """
    panel = _panel(frames, step, most_bars)
    return _drawn([panel], f"{panel.which.capitalize()}: {format_time(panel.length_ns)}")


def gantts(runs: Mapping[str, tuple[Frames, int]], title: str) -> Any:
    """A step of each of several runs, by name, one below the other on one axis of time.

    Raises RrfpError and UsageError as `gantt` does.
    """
    most_bars = MOST_BARS // max(1, len(runs))
    panels = [_panel(frames, step, most_bars, f"{name}: ") for name, (frames, step) in runs.items()]
    told = [
        f"{name}: {panel.which}, {format_time(panel.length_ns)}"
        for name, panel in zip(runs, panels, strict=True)
    ]
    return _drawn(panels, title, *told)


def _panel(frames: Frames, step: int | None, most_bars: int, prefix: str = "") -> _Panel:
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
    longest_ns = max(panel.length_ns for panel in panels)
    unit = TimeUnit.of(longest_ns)
    length = longest_ns / unit.value
    bars = pl.concat([panel.bars for panel in panels], how="diagonal")
    path = pl.concat(
        [panel.path.with_columns(run=pl.lit(number)) for number, panel in enumerate(panels)]
    )
    labels = [label for panel in panels for label in panel.labels.values()]
    told = list(notes)
    num_bars = sum(panel.num_bars for panel in panels)
    if num_bars > len(bars):
        told.append(
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
        # A wait of a cause that nobody knows has none.
        layers.append(_numbers(ran.drop_nulls("microbatch"), rows, length))
    if not path.is_empty():
        told.append(_PATH_NOTE)
        layers += _path_lines(path, unit, labels)
    chart = alt.layer(*layers).properties(width=WIDTH_PX, height=_ROW_PX * len(labels))
    return finished(chart, title, *told)


def _path(frames: Frames, step: int) -> tuple[int | None, pl.DataFrame]:
    """The replica that the critical path of a step runs through, and the path's corners: `pp_rank`
    and `time_ns`. None, and no corners, for a step whose path cannot be found."""
    corners: list[tuple[int, int]] = []
    replica = None
    # Damaged traces are drawn as far as they can be.
    with suppress(RrfpError):
        segments = critical_path(frames, step).segments
        replica = replica_of(frames, step, segments)
        for segment in segments:
            # A link leads from where the path was: to whom both waited for, or who sent.
            if segment.kind != LINK:
                corners.append((segment.pp_rank, segment.start_ns))
            corners.append((segment.pp_rank, segment.end_ns))
    # A line along one row needs its ends alone.
    kept = [
        corner
        for number, corner in enumerate(corners)
        if not 0 < number < len(corners) - 1
        or not corners[number - 1][0] == corner[0] == corners[number + 1][0]
    ]
    schema = {"pp_rank": pl.Int64, "time_ns": pl.Int64}
    return replica, pl.DataFrame(kept, schema=schema, orient="row")


def _path_lines(path: pl.DataFrame, unit: TimeUnit, labels: list[str]) -> list[Any]:
    """The path as a black line with a white edge, which is seen on every ground."""
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
    """A row a task or a wait; `what` is the kind of a task, or the cause of a wait."""
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
    """The microbatch in each box that has room for it, at whatever width the chart is drawn."""
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
    """At most so many bars in place of these: rows in equal spans, equal neighbours as one."""
    num_bins = 4 * most_bars
    while True:
        joined = _joined_in(bars, length_ns, num_bins)
        if len(joined) <= most_bars or num_bins <= _LEAST_BINS:
            return joined
        num_bins //= 2


def _joined_in(bars: pl.DataFrame, length_ns: int, num_bins: int) -> pl.DataFrame:
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
    # Equal neighbours in one row are one bar.
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
