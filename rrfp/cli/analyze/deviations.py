"""`rrfp analyze deviations`: how far each rank departed from its hint's order."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.analyze.frames import print_report, read_frames
from rrfp.cli.options import By, ByRank, Evaluations, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, tell_left_out

if TYPE_CHECKING:
    from rrfp.cli.tables import Sheet


def deviations(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 3 when a rank deviates more often than this."),
    ] = None,
) -> None:
    """Show how far each pipeline rank departed from its hint's order.

    A dispatch deviates by the unfinished tasks that the hint ranks above it.
    The distance is the share of a step's pairs of tasks that ran the other
    way round.
    """
    from rrfp.analyze import deviations as module

    frames = read_frames(path, steps, evaluations)
    report = module.deviations(frames, stage, by_rank=by is By.RANK)
    unfinished = set(frames.steps) - set(frames.windows["step"])
    tell_left_out(tuple(unfinished), "not every rank finished them")

    def sheets() -> "list[Sheet]":
        from rrfp.cli.analyze.sheets import deviation_sheet, stages_by_rank

        return [deviation_sheet(report, stages_by_rank(frames.run), by_rank=by is By.RANK)]

    print_report(frames, report, module.as_json(report), output_format, sheets)
    check_threshold(fail_above, report["deviating_fraction"].max(), "a rank's deviating fraction")
