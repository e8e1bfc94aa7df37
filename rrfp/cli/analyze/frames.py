"""The tables that a report is made from, and how the report is printed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.cli.options import Format, parse_steps
from rrfp.cli.output import print_frame, tell_evaluations, tell_missing_records, tell_warm_up
from rrfp.cli.progress import working

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames
    from rrfp.cli.tables import Sheet


def read_frames(
    path: Path | None, steps: str | None, evaluations: bool, *, with_warm_up: bool = False
) -> "Frames":
    """The tables of a run's steps, or of its evaluations; on stderr, what the trace lacks."""
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_trace

    with working("Reading the trace"):
        frames = load_frames(
            resolve_trace(path), asked, evaluations=evaluations, with_warm_up=with_warm_up
        )
    tell_missing_records(frames)
    return frames


def print_report(
    frames: "Frames",
    report: "pl.DataFrame",
    as_json: dict[str, object],
    output_format: Format,
    sheets: "Callable[[], Sequence[Sheet]]",
) -> None:
    """Print a report on these tables; on stderr, which steps the tables leave out."""
    tell_warm_up(frames)
    if output_format in (Format.TABLE, Format.MD):
        tell_evaluations(frames)
    print_frame(report, as_json | left_out_of(frames), output_format, sheets)


def left_out_of(frames: "Frames") -> dict[str, object]:
    """What the JSON of a report says of the steps that it leaves out: the number of evaluations
    and, where there was any, the steps of the warm-up."""
    warm_up = {"warm_up_left_out": list(frames.warm_up)} if frames.warm_up else {}
    return {"evaluations_left_out": frames.num_left_out, **warm_up}
