"""`rrfp analyze report`: a run as one page."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.cli.options import Evaluations, Steps, TracePath, parse_steps
from rrfp.cli.report_extra import check_report_extra


def report(
    path: TracePath = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    steps: Steps = None,
    evaluations: Evaluations = False,
) -> None:
    """Write all that a run's trace tells as one HTML page that needs no network.

    It begins with what matters and what to try, in words. Then come tables and
    charts, the settings, and how sound the trace is.
    """
    asked = None if steps is None else parse_steps(steps)
    check_report_extra()

    from rrfp.analyze.charts.files import write_file
    from rrfp.analyze.report.page import report as make
    from rrfp.analyze.report.page import report_of
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.perfetto.reader import read_contents

    trace = resolve_trace(path)
    content = make(report_of(trace), read_contents(trace), asked, evaluations=evaluations)
    write_file(out, content.encode())
    typer.echo(f"The report is {out}")
