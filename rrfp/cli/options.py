"""What several reports take and how they are printed."""

import json
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.errors import RrfpError, UsageError
from rrfp.trace.steps import EVALUATION, counted, evaluation_step, is_evaluation, step_names

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames

TracePath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PATH]", help="A run's directory or its trace file; none means the newest run."
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(metavar="A:B", help="Only the steps from A up to, not including, B."),
]
Evaluations = Annotated[
    bool,
    typer.Option(
        "--evaluations",
        help="Look at the run's evaluations, which are left out otherwise; steps are then counted "
        "among these.",
    ),
]
Stage = Annotated[
    int | None, typer.Option(min=0, help="Only the pipeline rank that holds this stage.")
]

NOT_WHOLE = "they are not whole training steps"
"""Why a step is not replayed."""


class RowFormat(StrEnum):
    """How rows that are compared are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


FrameFormat = Annotated[Format, typer.Option("--format", help="How to print the report.")]


def parse_steps(text: str) -> range:
    """Read `A:B`, either of which may be left out; UsageError for anything else."""
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text)
    if match is None:
        raise UsageError(f"--steps takes a range such as 3:10, not '{text}'")
    start = int(match[1] or 0)
    stop = int(match[2]) if match[2] else sys.maxsize
    if start >= stop:
        raise UsageError(f"--steps {text} is empty; the second number must be the larger one")
    return range(start, stop)


def print_frame(
    report: "pl.DataFrame",
    as_json: dict[str, object],
    output_format: Format,
    print_table: Callable[[], None] | None = None,
) -> None:
    """Print a report on stdout, as a table its rows or what a report has of its own. UsageError
    for bytes on a terminal."""
    match output_format:
        case Format.TABLE if print_table is not None:
            print_table()
        case Format.TABLE:
            from rich.console import Console

            from rrfp.cli.tables import frame_table

            Console().print(frame_table(report))
        case Format.JSON:
            print(json.dumps(as_json))
        case Format.CSV:
            sys.stdout.write(report.write_csv())
        case Format.PARQUET:
            if sys.stdout.isatty():
                raise UsageError(
                    "--format parquet is no text for a terminal; send it to a file with "
                    "> report.parquet"
                )
            # A pipe that was closed is the system's to tell, and not polars'.
            octets = BytesIO()
            report.write_parquet(octets)
            sys.stdout.buffer.write(octets.getvalue())


def check_threshold(most: float | None, found: Any, what: str) -> None:
    """Raises RrfpError, so that the command exits with 1, where a figure is above --fail-above."""
    if most is not None and found > most:
        raise RrfpError(f"{what} is {found:.4g}, above the {most:g} of --fail-above")


def tell_lacking(frames: "Frames", whose: str = "") -> None:
    """Name on stderr what a trace lacks; of several, `whose` it is."""
    from rrfp.analyze.lacking import lacking

    for sentence in lacking(frames):
        typer.echo(f"note: {whose}{sentence}; see 'rrfp trace check'", err=True)


def tell_left_out(steps: tuple[int, ...], why: str) -> None:
    """Name on stderr the steps that a report does not count."""
    if steps:
        typer.echo(f"left out, as {why}: {step_names(steps)}", err=True)


def tell_evaluations(
    frames: "Frames", more: str = "--evaluations looks at them", whose: str = ""
) -> None:
    """Say on stderr that a report is of the steps that train, where the run evaluates as well; of
    several, `whose` it is."""
    if frames.num_left_out:
        told = counted(frames.num_left_out, EVALUATION)
        typer.echo(f"{whose}left out: {told}; {more}", err=True)


def step_asked(frames: "Frames", number: int | None, *, evaluations: bool) -> int | None:
    """The step of that number, as a trace numbers it: one that trains, or an evaluation."""
    if number is None or not evaluations or not any(map(is_evaluation, frames.steps)):
        return number
    return evaluation_step(number)
