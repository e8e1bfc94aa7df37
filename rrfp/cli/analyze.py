"""`rrfp analyze`: reports from a run's trace."""

import csv
import json
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.errors import RrfpError, UsageError

if TYPE_CHECKING:
    from rrfp.analyze.bubbles import Bubbles

app = typer.Typer(help="Reports from a run's trace.", no_args_is_help=True)


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@app.callback()
def _options() -> None:
    """Reports from a run's trace."""


@app.command(epilog="Example: rrfp analyze bubbles runs/latest --steps 3:10 --fail-above 0.4")
def bubbles(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]", help="A run's directory or its trace file; none means the newest run."
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Only the steps from A up to, not including, B."),
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="How to print the report.")
    ] = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 when the bubble fraction is above this."),
    ] = None,
) -> None:
    """Show how much of each rank's time was idle, and why."""
    asked = None if steps is None else _parse_steps(steps)

    from rrfp.analyze.bubbles import bubbles as divide
    from rrfp.trace.perfetto import read_trace
    from rrfp.trace.rundir import resolve_trace

    report = divide(read_trace(resolve_trace(path)), asked)
    if report.dropped_steps:
        typer.echo(
            f"left out, as not every rank finished them: steps {_list(report.dropped_steps)}",
            err=True,
        )
    match output_format:
        case Format.TABLE:
            _print_table(report)
        case Format.JSON:
            print(json.dumps(report.as_json()))
        case Format.CSV:
            _print_csv(report)
    if fail_above is not None and report.bubble_fraction > fail_above:
        raise RrfpError(
            f"the bubble fraction is {report.bubble_fraction:.4f}, above the {fail_above:g} of "
            f"--fail-above"
        )


def _parse_steps(text: str) -> range:
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None:
        raise UsageError(f"--steps takes a range such as 3:10, not '{text}'")
    start = int(match[1] or 0)
    stop = int(match[2]) if match[2] else sys.maxsize
    if start >= stop:
        raise UsageError(f"--steps {text} is empty; the second number must be the larger one")
    return range(start, stop)


def _list(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps))


def _print_table(report: "Bubbles") -> None:
    from rich.console import Console

    from rrfp.cli.tables import bubble_table

    Console().print(bubble_table(report))


def _print_csv(report: "Bubbles") -> None:
    """A row a rank; times in seconds."""
    from rrfp.analyze.bubbles import CAUSES, NS_PER_S

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["rank", "pp_rank", "stages", "bubble_fraction", "window_s", "busy_s", *CAUSES])
    for rank in report.ranks:
        times_ns = (rank.window_ns, rank.busy_ns, *(rank.causes_ns[cause] for cause in CAUSES))
        writer.writerow(
            [
                rank.info.rank,
                rank.info.pp_rank,
                " ".join(map(str, rank.info.stages)),
                rank.bubble_fraction,
                *(time_ns / NS_PER_S for time_ns in times_ns),
            ]
        )
