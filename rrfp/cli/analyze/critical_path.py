"""`rrfp analyze critical-path`: what made a step as long as it was."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.analyze.frames import print_report, read_frames
from rrfp.cli.options import Evaluations, Format, FrameFormat, Stage, Steps, TracePath, step_asked
from rrfp.cli.output import check_threshold

if TYPE_CHECKING:
    from rrfp.cli.tables import Sheet


def critical_path(
    path: TracePath = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step to look at; the slowest one without it.")
    ] = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with 3 when links and waits own more of the step than this; those of all "
            "stages, whatever --stage shows.",
        ),
    ] = None,
) -> None:
    """Show which tasks, links and waits made a step as long as it was.

    The chain goes from the end of the step back to its start, each time to
    what came last of the things that a task needed.
    """
    from rrfp.analyze.critical_path import critical_path as find_path

    frames = read_frames(path, steps, evaluations, with_warm_up=step is not None)
    report = find_path(frames, step_asked(frames, step, evaluations=evaluations))
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))

    def sheets() -> "list[Sheet]":
        from rrfp.cli.analyze.sheets import path_sheet, stages_by_rank

        return [path_sheet(report, stages_by_rank(frames.run))]

    print_report(frames, report.frame, report.as_json(), output_format, sheets)
    check_threshold(fail_above, report.idle_fraction, "what links and waits own of the step")
