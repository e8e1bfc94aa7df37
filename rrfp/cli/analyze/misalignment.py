"""`rrfp analyze misalignment`: how messages and their stages missed each other."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.analyze.frames import print_report, read_frames
from rrfp.cli.options import By, ByRank, Evaluations, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold

if TYPE_CHECKING:
    from rrfp.cli.tables import Sheet


def misalignment(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 3 when a link's p95 of seconds starved is above this."),
    ] = None,
) -> None:
    """Show on each link how long messages lay ready, and how long stages idled for them."""
    from rrfp.analyze import misalignment as module

    frames = read_frames(path, steps, evaluations)
    report = module.misalignment(frames, stage, by_rank=by is By.RANK)

    def sheets() -> "list[Sheet]":
        from rrfp.cli.analyze.sheets import link_sheet, stages_by_rank

        return [link_sheet(report, stages_by_rank(frames.run), by_rank=by is By.RANK)]

    print_report(frames, report, module.as_json(report), output_format, sheets)
    check_threshold(fail_above, report["starved_s_p95"].max(), "a link's p95 of seconds starved")
