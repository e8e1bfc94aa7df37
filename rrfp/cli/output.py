"""How reports are printed, and what is said on stderr beside them."""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rrfp.cli.options import PEOPLE, Format, RowFormat, parse_steps
from rrfp.cli.progress import working
from rrfp.errors import GateError, RrfpError, UsageError
from rrfp.trace.records import EVALUATION, counted, step_names

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.frames import Frames
    from rrfp.analyze.table import Table


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


def read_frames(
    path: Path | None, steps: str | None, evaluations: bool, *, with_warm_up: bool = False
) -> "Frames":
    """Read the frames of a run's steps, or of its evaluations, and note what the trace lacks."""
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_trace

    with working("Reading the trace"):
        frames = load_frames(
            resolve_trace(path), asked, evaluations=evaluations, with_warm_up=with_warm_up
        )
    tell_missing_records(frames)
    return frames


def print_report(
    tables: "Sequence[Table]",
    output_format: Format,
    more: Mapping[str, object] | None = None,
) -> None:
    """Print tables on stdout: for people one by one, for programs as one document or table.

    The JSON document is that of the first table, and of `more`. Raises UsageError for Parquet on a
    terminal.
    """
    match output_format:
        case Format.TABLE | Format.MD:
            print_tables(tables, markdown=output_format is Format.MD)
        case Format.JSON:
            print(json.dumps({**tables[0].document(), **(more or {})}))
        case Format.CSV:
            from rrfp.analyze.table import csv_of_frame

            sys.stdout.write(csv_of_frame(_joined(tables)))
        case Format.PARQUET:
            if sys.stdout.isatty():
                raise UsageError(
                    "--format parquet is no text for a terminal; send it to a file with "
                    "> report.parquet"
                )
            # polars would name the error of a closed pipe in its own way.
            octets = BytesIO()
            _joined(tables).write_parquet(octets)
            sys.stdout.buffer.write(octets.getvalue())


def print_analysis(frames: "Frames", table: "Table", output_format: Format) -> None:
    """Print a table of these frames, and note the steps of the run that they leave out."""
    tell_warm_up(frames)
    if output_format in PEOPLE:
        tell_evaluations(frames)
    print_report([table], output_format, left_out_of(frames))


def _joined(tables: "Sequence[Table]") -> "pl.DataFrame":
    import polars as pl

    return pl.concat([table.frame() for table in tables])


def print_rows(table: "Table", output_format: RowFormat, *, may_have_formulas: bool = True) -> None:
    """Print one table on stdout, without a data frame."""
    match output_format:
        case RowFormat.TABLE | RowFormat.MD:
            print_tables([table], markdown=output_format is RowFormat.MD)
        case RowFormat.JSON:
            print(json.dumps(table.document()))
        case RowFormat.CSV:
            print(table.csv(may_have_formulas=may_have_formulas), end="")


def print_tables(tables: "Sequence[Table]", *, markdown: bool) -> None:
    """Print tables for people, on a terminal or as Markdown."""
    if markdown:
        print("\n".join(table.markdown() for table in tables), end="")
        return
    from rrfp.cli.console import console, print_table

    terminal = console()
    for table in tables:
        print_table(table, terminal)


def left_out_of(frames: "Frames") -> dict[str, object]:
    """The steps that a report leaves out, for its JSON: the number of evaluations and, if there
    was any, the steps of the warm-up."""
    warm_up = {"warm_up_left_out": list(frames.warm_up)} if frames.warm_up else {}
    return {"evaluations_left_out": frames.num_left_out, **warm_up}


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
