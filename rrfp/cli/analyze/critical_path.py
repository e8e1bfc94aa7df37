"""`rrfp analyze critical-path`: the chain of tasks and waits that made a step long."""

from typing import Annotated

import typer

from rrfp.cli.options import (
    PEOPLE,
    Evaluations,
    Format,
    FrameFormat,
    Stage,
    Steps,
    TracePath,
    step_in_trace,
)
from rrfp.cli.output import check_threshold, print_analysis, read_frames

EXAMPLE = "Example: rrfp analyze critical-path runs/latest --step 4"


def critical_path(
    path: TracePath = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step. Default: the slowest.")] = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with 3 if links and waits of all stages take more than this share of the "
            "step.",
        ),
    ] = None,
) -> None:
    """Show which tasks, links and waits made a step as long as it was.

    The path goes from the end of the step back to its start. At each task it
    continues with the dependency that was ready last.
    """
    from rrfp.analyze.critical_path import critical_path as find_path
    from rrfp.analyze.critical_path import owner_table, path_table

    frames = read_frames(path, steps, evaluations, with_warm_up=step is not None)
    report = find_path(frames, step_in_trace(frames, step, evaluations=evaluations))
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))

    for_people = output_format in PEOPLE
    table = path_table(report, frames.stages) if for_people else owner_table(report)
    print_analysis(frames, table, output_format)
    check_threshold(fail_above, report.idle_fraction, "the share of links and waits in the step")
