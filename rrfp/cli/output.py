"""How reports are printed, and what is said on stderr beside them."""

import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rrfp.cli.options import Format
from rrfp.cli.tables import csv_of
from rrfp.errors import GateError, RrfpError, UsageError
from rrfp.trace.records import EVALUATION, counted, step_names

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames
    from rrfp.cli.tables import Sheet


# The extra `report`, which draws charts: whether it is installed.


def missing_for_charts() -> list[str]:
    """The packages that drawing charts needs and this installation lacks."""
    return [name for name in ("altair", "vl_convert") if find_spec(name) is None]


def check_report_extra() -> None:
    """Raise RrfpError when a package that draws charts is missing."""
    missing = missing_for_charts()
    if missing:
        raise RrfpError(
            f"charts need {' and '.join(missing)}, which this installation lacks; install the "
            "extra 'report' (pip install 'rrfp[report]')"
        )


_PAGES = (".html", ".htm")
NOT_WHOLE = "they are not whole training steps"
WITHOUT_SIZES = "the bytes of their microbatches were not known yet"
"""Why a step is not replayed."""


def print_frame(
    report: "pl.DataFrame",
    as_json: dict[str, object],
    output_format: Format,
    sheets: "Callable[[], Sequence[Sheet]]",
) -> None:
    """Print a report on stdout: for people its sheets, for programs its rows or its JSON.

    Raises UsageError for Parquet on a terminal.
    """
    match output_format:
        case Format.TABLE | Format.MD:
            print_sheets(sheets(), markdown=output_format is Format.MD)
        case Format.JSON:
            print(json.dumps(as_json))
        case Format.CSV:
            sys.stdout.write(csv_of(report))
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


def print_sheets(sheets: "Sequence[Sheet]", *, markdown: bool) -> None:
    """Print tables for people, as tables or as Markdown."""
    if markdown:
        print("\n".join(sheet.markdown() for sheet in sheets), end="")
        return
    from rrfp.cli.tables import console

    terminal = console()
    for sheet in sheets:
        sheet.print(terminal)


def check_threshold(most: float | None, found: Any, what: str) -> None:
    """Raise GateError for a figure above --fail-above."""
    if most is not None and found > most:
        raise GateError(f"{what} is {found:.4g}, above the {most:g} of --fail-above")


def check_page(path: Path) -> None:
    """Raise UsageError for a name that does not end as a page's; writing refuses a directory."""
    if path.suffix.lower() not in _PAGES and not path.is_dir():
        raise UsageError(
            f"'{path}' is no file for a page; give it a name that ends in {' or '.join(_PAGES)}"
        )


def tell_missing_records(frames: "Frames", whose: str = "") -> None:
    """Name on stderr what is missing from a trace; `whose` tells several traces apart."""
    from rrfp.analyze.frames import missing_records

    for sentence in missing_records(frames):
        typer.echo(f"note: {whose}{sentence}; see 'rrfp trace check'", err=True)


def tell_left_out(steps: tuple[int, ...], why: str) -> None:
    """Name on stderr the steps that a report does not count."""
    if steps:
        typer.echo(f"left out, as {why}: {step_names(steps)}", err=True)


def tell_warm_up(frames: "Frames", whose: str = "") -> None:
    """Name on stderr the first steps that a report leaves out because they were slow."""
    if frames.warm_up:
        told = step_names(frames.warm_up)
        typer.echo(f"{whose}left out, as warm-up: {told}; --steps 0: takes all", err=True)


def tell_evaluations(
    frames: "Frames", more: str = "--evaluations looks at them", whose: str = ""
) -> None:
    """Say on stderr how many evaluations a report leaves out; `whose` tells several runs apart."""
    if frames.num_left_out:
        told = counted(frames.num_left_out, EVALUATION)
        typer.echo(f"{whose}left out: {told}; {more}", err=True)
