"""The typer app of all subcommands: help and shell completion.

The file of a subcommand is imported at every start, so it imports heavy packages (torch, polars,
perfetto) only inside functions.
"""

from typing import Annotated

import typer

from rrfp import __version__, compiled
from rrfp.cli import analyze, hint, trace
from rrfp.cli.bench import bench
from rrfp.cli.chaos import chaos
from rrfp.cli.declared_options import as_typer_command
from rrfp.cli.doctor import doctor
from rrfp.cli.options import Command
from rrfp.cli.run import OPTIONS, run
from rrfp.cli.runs import runs
from rrfp.cli.simulate import simulate
from rrfp.cli.train import TrainCommand, train
from rrfp.cli.tune import tune
from rrfp.cli.verify import verify
from rrfp.cli.watch import watch

app = typer.Typer(
    name="rrfp",
    help="Train a pipeline readiness-first on Megatron-Core or simulate it, and see where its time "
    "goes.",
    epilog="Example: rrfp train --hint bf, then rrfp analyze bubbles and rrfp trace view; or rrfp "
    "simulate --pp 8 --microbatches 32 --sweep hint=bf,bfw.",
    no_args_is_help=True,
    # Subcommands inherit it.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TrainCommand)(train)
# For the list of subcommands and for completion only: `rrfp.cli.main` runs it without typer.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(
    as_typer_command(run, OPTIONS)
)
app.command(cls=Command)(verify)
app.command(cls=Command)(simulate)
app.command(cls=Command)(tune)
app.command(cls=Command)(bench)
app.command(cls=Command)(doctor)
# Its own flags and flags of `rrfp train` may be mixed.
app.command(cls=Command, context_settings={"ignore_unknown_options": True})(chaos)
app.command(cls=Command, epilog="Example: rrfp runs, then rrfp analyze @-1")(runs)
app.command(cls=Command, epilog="Example: rrfp watch, while 'rrfp train' runs in another terminal")(
    watch
)
app.add_typer(trace.app, name="trace")
app.add_typer(analyze.app, name="analyze")
app.add_typer(hint.app, name="hint")


def _print_version(wanted: bool) -> None:
    """Print the version and how the core runs on stdout, and exit, if `--version` is given."""
    if wanted:
        print(f"rrfp {__version__}, core {compiled.core()}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass
