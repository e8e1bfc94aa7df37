"""`rrfp analyze deviations`: how far each rank departed from its hint's order."""

from typing import Annotated

import typer

from rrfp.cli.options import By, ByRank, Evaluations, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, note_left_out, print_analysis, read_frames

EXAMPLE = "Example: rrfp analyze deviations runs/latest --fail-above 0.2"


def deviations(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 3 if a rank deviates more often than this."),
    ] = None,
) -> None:
    """Show how far each pipeline rank departed from its hint's order.

    A dispatch deviates by the number of unfinished tasks that the hint ranks
    above it. The distance is the share of pairs of tasks that ran in the
    opposite order.
    """
    from rrfp.analyze.deviations import deviation_table
    from rrfp.analyze.deviations import deviations as measure

    frames = read_frames(path, steps, evaluations)
    report = measure(frames, stage, by_rank=by is By.RANK)
    unfinished = set(frames.steps) - set(frames.windows["step"])
    note_left_out(tuple(unfinished), "not every rank finished them")

    table = deviation_table(report, frames.stages, by_rank=by is By.RANK)
    print_analysis(frames, table, output_format)
    check_threshold(fail_above, report["deviating_fraction"].max(), "a rank's deviating fraction")
