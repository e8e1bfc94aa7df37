"""The tables that a report is made from, and how the report is printed."""

from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.cli.options import Format, parse_steps
from rrfp.cli.output import print_frame, tell_evaluations, tell_missing_records

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames


def read_frames(path: Path | None, steps: str | None, evaluations: bool) -> "Frames":
    """The tables of a run's steps, or of its evaluations; on stderr, what the trace lacks."""
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.cache import load_frames
    from rrfp.trace.locate import resolve_trace

    frames = load_frames(resolve_trace(path), asked, evaluations=evaluations)
    tell_missing_records(frames)
    return frames


def print_report(
    frames: "Frames", report: "pl.DataFrame", as_json: dict[str, object], output_format: Format
) -> None:
    """Print a report on these tables; on stderr, which steps the tables leave out."""
    if output_format is Format.TABLE:
        tell_evaluations(frames)
    as_json |= {"evaluations_left_out": frames.num_left_out}
    print_frame(report, as_json, output_format)
