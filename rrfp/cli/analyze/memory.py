"""`rrfp analyze memory`: how many bytes each rank kept, and how many more it could have kept."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.analyze.frames import print_report, read_frames
from rrfp.cli.options import By, ByRank, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, tell_left_out

if TYPE_CHECKING:
    from rrfp.cli.tables.sheet import Sheet


def memory(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 3 when a rank held more GiB than this."),
    ] = None,
) -> None:
    """Show how many bytes of activations each stage's rank held, and when.

    Of several ranks at one place of the pipeline it shows the one that held
    most. Its room is what its bound would have let it hold beyond that, or
    without a bound in bytes what the rank that held most has held beyond that.
    """
    from rrfp.analyze.memory import peaks

    frames = read_frames(path, steps, evaluations=False)
    report = peaks.memory(frames)
    if by is By.STAGE:
        report = report.by_stage()
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    unfinished = set(frames.steps) - set(frames.windows["step"])
    tell_left_out(tuple(unfinished), "not every rank finished them")

    def sheets() -> "list[Sheet]":
        from rrfp.cli.tables.memory import memory_sheet

        return [memory_sheet(report)]

    print_report(frames, report.frame, report.as_json(), output_format, sheets)
    check_threshold(fail_above, report.worst.peak_held_bytes / 2**30, "what a rank held, in GiB,")
