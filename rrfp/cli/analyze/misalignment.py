"""`rrfp analyze misalignment`: queued messages and starved stages, link by link."""

from typing import Annotated

import typer

from rrfp.cli.options import By, ByRank, Evaluations, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, print_analysis, read_frames

EXAMPLE = "Example: rrfp analyze misalignment runs/latest --steps 3:10"


def misalignment(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 3 if a link's p95 of seconds starved is above this."),
    ] = None,
) -> None:
    """Show for each link how long messages were queued, and how long stages idled for them."""
    from rrfp.analyze.misalignment import link_table
    from rrfp.analyze.misalignment import misalignment as measure

    frames = read_frames(path, steps, evaluations)
    report = measure(frames, stage, by_rank=by is By.RANK)

    table = link_table(report, frames.stages, by_rank=by is By.RANK)
    print_analysis(frames, table, output_format)
    check_threshold(fail_above, report["starved_s_p95"].max(), "a link's p95 of seconds starved")
