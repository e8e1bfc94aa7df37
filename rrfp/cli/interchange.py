"""`rrfp trace import` and `rrfp trace export`: other people's traces, and ours in their forms."""

import json
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import TracePath
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.steps import EVALUATION, STEP, count_of, evaluation_step

if TYPE_CHECKING:
    import polars as pl

    from rrfp.trace.records import Recording


class ExportFormat(StrEnum):
    """In what form a trace is written."""

    CHROME = "chrome"
    PARQUET = "parquet"


_HINT = "imported"
TABLES = ("tasks", "waits", "messages", "agreements", "phases", "counters", "run")
"""The tables that are exported, as `rrfp.analyze.frames` declares them."""


def import_trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS...",
            help="Profiles (.json, .json.gz), one a rank; a directory of them; or one table of "
            "StragglerAnalysis (.csv, .parquet).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory of the run to make.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run that is in the directory.")
    ] = False,
) -> None:
    """Make a run of what torch.profiler or StragglerAnalysis recorded.

    The profiles must carry ranges of the pipeline's tasks: those of
    rrfp.megatron.trace_native(), or of torch.distributed.pipelining.
    """
    from rrfp.interchange.files import import_run
    from rrfp.trace.rundir import create_run_dir

    if out.exists() and not (force and out.is_dir()):
        create_run_dir(out, force, _HINT)  # refuses it, before anything large is read
    imported = import_run(paths)
    try:
        _write_run(out, force, imported.recording)
    except OSError as error:
        raise RrfpError(f"the run {out} could not be written: {error.strerror}") from error
    for note in imported.notes:
        typer.echo(note, err=True)
    ranks = imported.recording.ranks
    num_tasks = sum(len(rank.tasks) for rank in ranks)
    steps = {phase.step for rank in ranks for phase in rank.phases}
    print(f"{out} has {num_tasks} tasks of {len(ranks)} ranks in {count_of(steps)}")


def _write_run(out: Path, force: bool, recording: "Recording") -> None:
    """Write a run whole or not at all; the one it replaces stays until then. May raise OSError."""
    from rrfp.trace.perfetto_writer import write_trace
    from rrfp.trace.rundir import RunDir, create_run_dir

    is_new = not out.exists()
    run = create_run_dir(out, force, _HINT) if is_new else RunDir(out)
    try:
        with TemporaryDirectory(prefix=".import-", dir=out) as directory:
            part = RunDir(Path(directory))
            write_trace(part.trace, recording)
            part.run_json.write_text(f"{json.dumps(recording.settings, indent=2)}\n")
            create_run_dir(out, force=True, hint=_HINT)
            part.run_json.replace(run.run_json)
            part.trace.replace(run.trace)
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()


def export_trace(
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
    from rrfp.trace.rundir import resolve_trace

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
        from rrfp.trace.perfetto import read_trace

        write_chrome(out, read_trace(trace))
        print(f"{out} opens in ui.perfetto.dev and chrome://tracing")
    else:
        _write_parquet(out, trace)


def _write_parquet(out: Path, trace: Path) -> None:
    from rrfp.analyze.cache import CachedTrace

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose a directory for the Parquet files with -o")
    frames = CachedTrace(trace).frames()
    out.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        frame = _with_evaluations(getattr(frames, name))
        frame.write_parquet(out / f"{name}.parquet")
        print(f"{out / name}.parquet has {len(frame)} rows")


def _with_evaluations(frame: "pl.DataFrame") -> "pl.DataFrame":
    """A table, and beside its steps the number of the evaluation, null in those that train."""
    if STEP not in frame.columns:
        return frame
    import polars as pl

    number = evaluation_step(0) - pl.col(STEP)
    told = pl.when(number >= 0).then(number).alias(EVALUATION)
    return frame.insert_column(frame.columns.index(STEP) + 1, frame.select(told).to_series())
