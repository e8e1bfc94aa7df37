"""`rrfp analyze report`: an HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.cli.options import Evaluations, Steps, TracePath, parse_steps
from rrfp.cli.output import check_page, check_report_extra, note_evaluations, note_warm_up
from rrfp.cli.progress import working

EXAMPLE = "Example: rrfp analyze report runs/latest -o report.html"


def report(
    path: TracePath = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    steps: Steps = None,
    evaluations: Evaluations = False,
) -> None:
    """Write all reports of a run as one HTML page that needs no network.

    It begins with findings and advice. Tables, charts, the settings and a check
    of the trace follow.
    """
    asked = None if steps is None else parse_steps(steps)
    check_page(out)
    check_report_extra()

    from rrfp.analyze.charts.export import write_file
    from rrfp.analyze.frames import choose_steps, frames_of
    from rrfp.analyze.report import report_of, report_on
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.perfetto.reader import read_contents

    trace = resolve_trace(path)
    with working("Reading the trace"):
        contents = read_contents(trace)
        frames = choose_steps(frames_of(contents.recording), asked, evaluations=evaluations)
    note_warm_up(frames)
    note_evaluations(frames)
    with working("Writing the report"):
        write_file(out, report_on(report_of(trace), contents, frames).encode())
    typer.echo(f"The report is {out}")
