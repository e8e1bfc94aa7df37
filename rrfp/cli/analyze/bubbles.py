"""`rrfp analyze bubbles`: where the ranks' time went."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import (
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
    print_frame,
    tell_evaluations,
    tell_left_out,
    tell_missing_records,
)

if TYPE_CHECKING:
    from rrfp.analyze.bubbles import Bubbles


def bubbles(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 3 when the bubble fraction is above this."),
    ] = None,
) -> None:
    """Show how much of each rank's time was idle, and why.

    The structural part is what tasks at their mean times would have left; the
    rest is excess, which jitter made.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.bubbles import bubbles as divide
    from rrfp.analyze.cache import CachedTrace
    from rrfp.analyze.chosen import NOT_REPLAYED, choose
    from rrfp.trace.locate import resolve_trace

    trace = CachedTrace(resolve_trace(path))
    frames = choose(trace.frames(), asked, evaluations=evaluations)
    tell_missing_records(frames)
    report = divide(frames)
    structural, why_not = ([], NOT_REPLAYED) if evaluations else trace.structural(asked)
    report = report.with_structural(structural)
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    tell_left_out(report.dropped_steps, "not every rank finished them")
    if output_format is Format.TABLE:
        tell_evaluations(frames)
    as_json = report.as_json() | {"evaluations_left_out": frames.num_left_out}
    print_frame(report.frame, as_json, output_format, lambda: _print_table(report, why_not))
    check_threshold(fail_above, report.bubble_fraction, "the bubble fraction")


def _print_table(report: "Bubbles", why_not_replayed: str) -> None:
    from rich.console import Console

    from rrfp.cli.tables import bubble_table

    console = Console()
    console.print(bubble_table(report))
    told = (
        f"What of it is structural is not known: {why_not_replayed}."
        if report.parts is None
        else report.parts.told
    )
    console.print(told, highlight=False, markup=False)
