"""`rrfp analyze bubbles`: the work and the idle time of the ranks, by cause."""

from typing import Annotated

import typer

from rrfp.cli.console import print_report
from rrfp.cli.options import (
    PEOPLE,
    By,
    ByRank,
    Evaluations,
    Format,
    FrameFormat,
    Stage,
    Steps,
    TracePath,
    parse_steps,
)
from rrfp.cli.output import (
    check_threshold,
    left_out_json,
    note_evaluations,
    note_left_out,
    note_missing_records,
    note_warm_up,
)
from rrfp.cli.progress import working

EXAMPLE = "Example: rrfp analyze bubbles runs/latest --steps 3:10 --fail-above 0.4"


def bubbles(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 3 when the bubble fraction is above this."),
    ] = None,
) -> None:
    """Show how much of each stage's time was idle, and why.

    The structural part is the idle time with every task at its mean time; the
    rest is excess, caused by variation.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.bubbles import bubble_table
    from rrfp.analyze.bubbles import bubbles as divide
    from rrfp.analyze.frame_files import CachedTrace
    from rrfp.analyze.frames import NOT_REPLAYED, choose_steps
    from rrfp.trace.locate import resolve_trace

    with working("Reading the trace"):
        trace = CachedTrace(resolve_trace(path))
        frames = choose_steps(trace.frames(), asked, evaluations=evaluations)
    note_missing_records(frames)
    report = divide(frames)
    with working("Replaying the run"):
        structural, why_not = ([], NOT_REPLAYED) if evaluations else trace.structural(asked)
    report = report.with_structural(structural)
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    note_warm_up(frames)
    note_left_out(report.dropped_steps, "not every rank finished them")
    if output_format in PEOPLE:
        note_evaluations(frames)
    by_rank = by is By.RANK or output_format not in PEOPLE
    table = bubble_table(report, why_not, by_rank=by_rank)
    print_report([table], output_format, left_out_json(frames))
    check_threshold(fail_above, report.bubble_fraction, "the bubble fraction")
