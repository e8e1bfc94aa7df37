"""`rrfp analyze chart`: one chart of a run as a file."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.analyze.charts import ChartKind
from rrfp.cli.options import Evaluations, Steps, TracePath, step_in_trace
from rrfp.cli.output import check_report_extra, note_evaluations, note_warm_up, read_frames

EXAMPLE = "Example: rrfp analyze chart gantt runs/latest --step 4 -o gantt.png"


def chart(
    kind: Annotated[
        ChartKind,
        typer.Argument(
            metavar="KIND",
            # The list of choices would be broken in the middle of a word.
            show_choices=False,
            help="bubbles, gantt, hint, memory, misalignment, progress, task-times or "
            "message-times.",
        ),
    ],
    path: TracePath = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="A .png, .svg or .html file [KIND.png]."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The step for gantt, hint, memory and progress. Default: the slowest, or for "
            "memory the one with the highest peak.",
        ),
    ] = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
) -> None:
    """Draw one chart of a run into a file; .html files are interactive."""
    check_report_extra()

    from rrfp.analyze.charts.export import check_ending, draw, save

    out = out or Path(f"{kind}.png")
    check_ending(out)
    frames = read_frames(path, steps, evaluations, with_warm_up=step is not None)
    note_evaluations(frames)
    drawn = draw(kind, frames, step_in_trace(frames, step, evaluations=evaluations))
    note_warm_up(frames)
    save(drawn, out)
    typer.echo(f"The chart is {out}")
