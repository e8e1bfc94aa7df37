"""`rrfp trace import`: a run made of other people's traces."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.trace.steps import count_of


def import_run(
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
    print(f"{out} has {num_tasks} tasks of {len(ranks)} ranks in {count_of(steps)}")
