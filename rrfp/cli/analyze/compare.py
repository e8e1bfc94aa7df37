"""`rrfp analyze compare`: two runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.cli.console import print_report
from rrfp.cli.declared_options import run_names
from rrfp.cli.options import PEOPLE, Evaluations, Format, FrameFormat, Stage, Steps, parse_steps
from rrfp.cli.output import (
    check_page,
    check_report_extra,
    note_evaluations,
    note_missing_records,
    note_warm_up,
)
from rrfp.cli.progress import working
from rrfp.errors import GateError

EXAMPLE = "Example: rrfp analyze compare runs/before runs/after -o compared.html"


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="The first run, as in rrfp analyze.", autocompletion=run_names
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", help="The run to compare with it.", autocompletion=run_names),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Also write a page with both runs on one axis."
        ),
    ] = None,
    steps: Steps = None,
    stage: Stage = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None, typer.Option(min=0, help="Exit with 3 if B/A is significantly above this.")
    ] = None,
) -> None:
    """Compare run B with run A: step times, and which causes of idle time changed.

    The first row compares the schedules at equal task times, so a busier machine
    does not count against either. Figures are medians over steps with 95%
    bootstrap intervals. For each cause: seconds per step that B spends beyond A,
    averaged over all ranks or over those of --stage.
    """
    asked = None if steps is None else parse_steps(steps)

    if out is not None:
        check_page(out)
        check_report_extra()

    from rrfp.analyze.compare import compare as relate
    from rrfp.analyze.compare import comparison_tables, differences, verdict, warning
    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_trace

    with working("Reading the traces"):
        traces = [resolve_trace(path) for path in (first, second)]
        a, b = (load_frames(trace, asked, evaluations=evaluations) for trace in traces)
    for whose, frames in (("A: ", a), ("B: ", b)):
        note_missing_records(frames, whose)
        note_warm_up(frames, whose)
        if output_format in PEOPLE:
            note_evaluations(frames, whose=whose)
    with working("Comparing the runs"):
        report = relate(a, b, stage)
    unlike = differences(a, b)
    more: dict[str, object] = {
        "differences": unlike,
        "evaluations_left_out": [a.num_left_out, b.num_left_out],
    }
    if a.warm_up or b.warm_up:
        more["warm_up_left_out"] = [list(a.warm_up), list(b.warm_up)]
    conclusions = verdict(report, "An evaluation" if evaluations else "A step")
    conclusions += filter(None, [report.memory_sentence])
    tables = comparison_tables(report, [*conclusions, warning(unlike)])
    print_report(tables, output_format, more)
    if out is not None:
        from rrfp.analyze.charts.export import write_file
        from rrfp.analyze.report import comparison_page, report_of

        names = [report_of(trace) for trace in traces]
        write_file(out, comparison_page(names, [a, b], report, unlike, conclusions).encode())
        typer.echo(f"The page is {out}", err=True)
    ratio = report.step_time_ratio
    if fail_above is not None and ratio.low > fail_above:
        raise GateError(
            f"B takes {ratio.median:.3f} times as long as A ({ratio.low:.3f} to {ratio.high:.3f}), "
            f"above the {fail_above:g} of --fail-above"
        )
