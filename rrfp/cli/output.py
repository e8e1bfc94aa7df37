"""How reports are printed, and what is said on stderr beside them."""

import json
import sys
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

import typer

from rrfp.cli.options import Format
from rrfp.errors import GateError, UsageError
from rrfp.trace.steps import EVALUATION, counted, step_names

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames

NOT_WHOLE = "they are not whole training steps"
"""Why a step is not replayed."""


def print_frame(
    report: "pl.DataFrame",
    as_json: dict[str, object],
    output_format: Format,
    print_table: Callable[[], None] | None = None,
) -> None:
    """Print a report on stdout. `print_table` prints a table of its own in place of the rows.

    Raises UsageError for Parquet on a terminal.
    """
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
            # Written by us, so that a closed pipe is told as the system does, not as polars does.
            octets = BytesIO()
            report.write_parquet(octets)
            sys.stdout.buffer.write(octets.getvalue())


def check_threshold(most: float | None, found: Any, what: str) -> None:
    """Raise GateError for a figure above --fail-above."""
    if most is not None and found > most:
        raise GateError(f"{what} is {found:.4g}, above the {most:g} of --fail-above")


def tell_missing_records(frames: "Frames", whose: str = "") -> None:
    """Name on stderr what is missing from a trace; `whose` tells several traces apart."""
    from rrfp.analyze.missing_records import missing_records

    for sentence in missing_records(frames):
        typer.echo(f"note: {whose}{sentence}; see 'rrfp trace check'", err=True)


def tell_left_out(steps: tuple[int, ...], why: str) -> None:
    """Name on stderr the steps that a report does not count."""
    if steps:
        typer.echo(f"left out, as {why}: {step_names(steps)}", err=True)


def tell_evaluations(
    frames: "Frames", more: str = "--evaluations looks at them", whose: str = ""
) -> None:
    """Say on stderr how many evaluations a report leaves out; `whose` tells several runs apart."""
    if frames.num_left_out:
        told = counted(frames.num_left_out, EVALUATION)
        typer.echo(f"{whose}left out: {told}; {more}", err=True)
