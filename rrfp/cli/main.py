"""The command `rrfp`: its verbs, and the one place where an error becomes an exit code.

A verb's file is imported at every start, so it imports what is heavy (torch, polars, perfetto)
inside its commands only.
"""

import gc
import os
import sys
from typing import Annotated

import typer

from rrfp import __version__, compiled
from rrfp.cli import analyze, completion, errors, hint, trace
from rrfp.cli.bench.command import bench
from rrfp.cli.chaos.command import chaos
from rrfp.cli.doctor import doctor
from rrfp.cli.interrupts import give_interrupts_back, take_interrupts
from rrfp.cli.run import run
from rrfp.cli.runs import runs
from rrfp.cli.simulate import simulate
from rrfp.cli.train import train
from rrfp.cli.tune.command import tune
from rrfp.cli.verify import verify
from rrfp.cli.watch.command import watch
from rrfp.train.ranks.hosts.answers import is_asking

app = typer.Typer(
    name="rrfp",
    help="Train a pipeline readiness-first on Megatron-Core or simulate it, and see where its time "
    "goes.",
    epilog="Example: rrfp train --hint bf, then rrfp analyze bubbles and rrfp trace view; or rrfp "
    "simulate --pp 8 --microbatches 32 --sweep hint=bf,bfw.",
    no_args_is_help=True,
    # Also of the commands in it.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
# What stands behind SCRIPT is the script's, options included.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(verify)
app.command()(simulate)
app.command()(tune)
app.command()(bench)
app.command()(doctor)
app.command()(chaos)
app.command(epilog="Example: rrfp runs, then rrfp analyze @-1")(runs)
app.command(epilog="Example: rrfp watch, while 'rrfp train' runs in another terminal")(watch)
app.add_typer(trace.app, name="trace")
app.add_typer(analyze.app, name="analyze")
app.add_typer(hint.app, name="hint")


def _print_version(wanted: bool) -> None:
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


def main() -> int:
    """Run the command line on `sys.argv` and give its exit code."""
    if completion.is_asked():
        return completion.answer(app)
    take_interrupts()
    gc.freeze()  # what the imports have made lives until the end
    done = errors.run(app, sys.argv[1:])
    if isinstance(done, int):
        code = done
        # So that the interpreter does not look through torch's objects as it ends. What a script
        # that we have run leaves is not ours to leave unfinalized.
        gc.freeze()
    else:
        give_interrupts_back()
        code = done()
    if is_asking():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
