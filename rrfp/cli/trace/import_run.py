"""`rrfp trace import`: a run made of other people's traces, or a hang told by its dumps."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rrfp.errors import UsageError
from rrfp.trace.steps import count_of, counted


class HangFormat(StrEnum):
    """How a hang is printed."""

    TEXT = "text"
    JSON = "json"


def import_run(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS",
            help="Profiles (.json, .json.gz), exports of Nsight Systems (.sqlite) or execution "
            "traces (.et, .json), one a rank; OpenTelemetry spans (.json, .jsonl); a directory of "
            "them; or one table of StragglerAnalysis (.csv, .parquet).",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The directory of the run to make.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run that is in the directory.")
    ] = False,
    flight_recorder: Annotated[
        bool,
        typer.Option(
            "--flight-recorder",
            help="PATHS are dumps of torch's flight recorder (nccl_trace_rank_0, ...): say who "
            "waits for whom, and make no run.",
        ),
    ] = False,
    format_: Annotated[
        HangFormat | None,
        typer.Option(
            "--format",
            help=r"How to print what --flight-recorder finds \[text].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a run of what other programs recorded, or say who waits for whom in a job that hangs.

    A profile needs no ranges of ours. What it cannot tell is said.
    """
    if flight_recorder:
        if out is not None:
            raise UsageError(
                f"--flight-recorder makes no run, so leave out -o {out}; redirect its output to "
                "keep it"
            )
        print(_hang(paths, format_ or HangFormat.TEXT))
        return
    if format_ is not None:
        raise UsageError(
            f"--format {format_.value} is for what --flight-recorder finds; leave it out, or add "
            "--flight-recorder"
        )
    if out is None:
        raise UsageError("the run needs a directory to go to; add -o runs/NAME")
    _import(paths, out, force=force)


def _import(paths: list[Path], out: Path, *, force: bool) -> None:
    from rrfp.interchange.files import import_run as read_run
    from rrfp.interchange.imported_run import check_run_dir, write_run

    check_run_dir(out, force=force)  # before anything large is read
    imported = read_run(paths)
    write_run(out, imported.recording, force=force)
    for note in imported.notes:
        typer.echo(note, err=True)
    ranks = imported.recording.ranks
    num_tasks = sum(len(rank.tasks) for rank in ranks)
    steps = {phase.step for rank in ranks for phase in rank.phases}
    found = f"{counted(num_tasks, 'task')} of {counted(len(ranks), 'rank')}"
    print(f"{out} has {found} in {count_of(steps)}")


def _hang(paths: list[Path], format_: HangFormat) -> str:
    from rrfp.cli.trace.hang import hang_json, hang_text
    from rrfp.interchange.flight.dumps import read_dumps
    from rrfp.interchange.flight.hang import hang_of

    hang = hang_of(read_dumps(paths, lambda note: typer.echo(note, err=True)))
    return hang_json(hang) if format_ is HangFormat.JSON else hang_text(hang)
