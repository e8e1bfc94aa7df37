"""`rrfp trace export`: a run's trace in other people's forms."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rrfp.cli.options import TracePath
from rrfp.errors import UsageError
from rrfp.trace.steps import counted


class ExportFormat(StrEnum):
    """In what form a trace is written."""

    CHROME = "chrome"
    PARQUET = "parquet"


def export_run(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A .json or .json.gz file, or a directory for Parquet."),
    ],
    path: TracePath = None,
    output_format: Annotated[
        ExportFormat | None,
        typer.Option("--format", help="Without it, as the name of the output says."),
    ] = None,
) -> None:
    """Write a trace as Chrome's trace events (one JSON file) or as Parquet tables."""
    from rrfp.trace.locate import resolve_trace

    if not out.name:
        raise UsageError("the output has no name; give -o a .json or .json.gz file or a directory")
    is_json = out.name.endswith((".json", ".json.gz"))
    chosen = output_format or (ExportFormat.CHROME if is_json else ExportFormat.PARQUET)
    if chosen is ExportFormat.CHROME and not is_json:
        raise UsageError(f"Chrome's trace events go to a .json or .json.gz file, not to {out}")
    if output_format is None and not is_json and out.suffix and not out.is_dir():
        raise UsageError(
            f"the name of {out} tells no format; end it in .json or .json.gz, or say --format "
            "parquet for a directory of that name"
        )
    trace = resolve_trace(path)
    if chosen is ExportFormat.CHROME:
        from rrfp.interchange.chrome import write_chrome
        from rrfp.trace.perfetto.reader import read_trace

        write_chrome(out, read_trace(trace))
        print(f"{out} opens in ui.perfetto.dev and chrome://tracing")
    else:
        from rrfp.analyze.cache import CachedTrace
        from rrfp.analyze.files.export import export_tables

        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; choose a directory for the Parquet files with -o")
        for file, num_rows in export_tables(CachedTrace(trace).frames(), out):
            print(f"{file} has {counted(num_rows, 'row')}")
