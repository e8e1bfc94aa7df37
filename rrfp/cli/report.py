"""`rrfp analyze report` and `chart`: a run as one page, and its charts as files."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rrfp.analyze.charts.kinds import ChartKind
from rrfp.cli.options import (
    Evaluations,
    Steps,
    TracePath,
    parse_steps,
    step_asked,
    tell_evaluations,
    tell_lacking,
)
from rrfp.errors import RrfpError


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
    _need_extra()

    from rrfp.analyze.charts.files import write_file
    from rrfp.analyze.report import report as make
    from rrfp.analyze.report import report_of
    from rrfp.trace.perfetto_reader import read_contents
    from rrfp.trace.rundir import resolve_trace

    trace = resolve_trace(path)
    content = make(report_of(trace), read_contents(trace), asked, evaluations=evaluations)
    write_file(out, content.encode())
    typer.echo(f"The report is {out}")


def chart(
    kind: Annotated[ChartKind, typer.Argument(metavar="KIND", help="Which chart.")],
    path: TracePath = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="A .png, .svg or .html file [KIND.png]."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="The step that gantt, hint and progress show; the slowest without it."
        ),
    ] = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
) -> None:
    """Draw one chart of a run into a file.

    The page that an .html file holds is interactive, and needs no network.
    """
    asked = None if steps is None else parse_steps(steps)
    _need_extra()

    from rrfp.analyze.cache import load_frames
    from rrfp.analyze.charts.files import check_ending, draw, save
    from rrfp.trace.rundir import resolve_trace

    out = out or Path(f"{kind}.png")
    check_ending(out)
    frames = load_frames(resolve_trace(path), asked, evaluations=evaluations)
    tell_lacking(frames)
    tell_evaluations(frames)
    save(draw(kind, frames, step_asked(frames, step, evaluations=evaluations)), out)
    typer.echo(f"The chart is {out}")


def _need_extra() -> None:
    """RrfpError where what draws charts is not installed."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise RrfpError(
            f"charts need {' and '.join(missing)}, which this installation lacks; install the "
            "extra 'report' (pip install 'rrfp[report]')"
        )
