"""Draws charts by name, and writes them to files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from rrfp.analyze.bubbles import structural_shares
from rrfp.analyze.charts import ChartKind
from rrfp.analyze.charts.durations import message_times, misalignment_map, task_times
from rrfp.analyze.charts.gantt import gantt
from rrfp.analyze.charts.per_rank import bubble_causes, hint_order, memory_held, progress
from rrfp.analyze.frames import Frames
from rrfp.analyze.html import figure, page
from rrfp.errors import UsageError
from rrfp.trace.safe_files import open_whole

VEGA_LITE = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
"""The Vega-Lite version of altair, as vl-convert names it."""
_PNG_SCALE = 2

_OF_A_STEP: dict[ChartKind, Callable[[Frames, int | None], Any]] = {
    ChartKind.GANTT: gantt,
    ChartKind.HINT: hint_order,
    ChartKind.MEMORY: memory_held,
    ChartKind.PROGRESS: progress,
}
_OF_A_RUN: dict[ChartKind, Callable[[Frames], Any]] = {
    ChartKind.BUBBLES: lambda frames: bubble_causes(frames, structural_shares(frames)),
    ChartKind.MISALIGNMENT: misalignment_map,
    ChartKind.TASK_TIMES: task_times,
    ChartKind.MESSAGE_TIMES: message_times,
}


def draw(kind: ChartKind, frames: Frames, step: int | None = None) -> Any:
    """Draw a chart of a run. `step` selects the step of kinds that show one step.

    Raises RrfpError if the run lacks the data, and UsageError for a step that the run lacks, or for
    any step with a kind that shows all steps.
    """
    if kind in _OF_A_STEP:
        return _OF_A_STEP[kind](frames, step)
    if step is not None:
        raise UsageError(f"the {kind} chart shows all steps; leave out --step, or choose --steps")
    return _OF_A_RUN[kind](frames)


def spec_of(chart: Any) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, including its data."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.to_dict()
    return spec


def save(chart: Any, path: Path) -> None:
    """Write a chart atomically as .png, .svg or .html.

    Raises UsageError for another suffix, or if the file cannot be written.
    """
    check_ending(path)
    write_file(path, _ENDINGS[path.suffix.lower()](spec_of(chart)))


def check_ending(path: Path) -> None:
    """Raise UsageError for a file name with another suffix than a chart's."""
    if path.suffix.lower() not in _ENDINGS:
        raise UsageError(
            f"'{path}' is no file for a chart; give it a name that ends in {' or '.join(_ENDINGS)}"
        )


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises UsageError for a directory, or if it cannot be written."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it with -o")
    try:
        with open_whole(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); choose another file with -o"
        ) from error


def _as_png(spec: dict[str, Any]) -> bytes:
    """Render a chart as PNG, on white and at twice its size."""
    return vl_convert.vegalite_to_png(_on_white(spec), VEGA_LITE, scale=_PNG_SCALE)


def _as_svg(spec: dict[str, Any]) -> bytes:
    """Render a chart as SVG, on white."""
    return vl_convert.vegalite_to_svg(_on_white(spec), VEGA_LITE).encode()


def _as_page(spec: dict[str, Any]) -> bytes:
    """Make a self-contained HTML page of a chart. Moves the title out of `spec`."""
    title = str(spec["title"]["text"])
    return page(title, figure("chart", spec), {"chart": spec}, VEGA_LITE).encode()


def _on_white(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the specification with a white background, for files outside of a page."""
    return {**spec, "background": "white"}


_ENDINGS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    ".png": _as_png,
    ".svg": _as_svg,
    ".html": _as_page,
}
