"""The entry point of `rrfp`, and the only reader of `sys.argv`.

`rrfp run` starts in every process of a user's job, whose environment has torch and Megatron-Core
but perhaps not the other packages that rrfp needs. The standard library therefore parses it
(`rrfp.cli.run`). typer parses all other subcommands (`rrfp.cli.app`).
"""

import gc
import os
import sys
from functools import partial

from rrfp import requirements
from rrfp.cli import declared_options as completion
from rrfp.cli import errors
from rrfp.cli.errors import interrupt_once, restore_default_interrupts
from rrfp.errors import UsageError
from rrfp.train.launch.store import is_call_pending


def main() -> int:
    """Run the command line in `sys.argv`, or print the completions that a shell requested, and
    return the exit code.

    If packages are missing, every subcommand but `rrfp run` prints an error that names them, and
    completion fails silently. If a thread still waits for torch's store at the end, the process
    exits at once, without cleanup.
    """
    words = sys.argv[1:]
    interrupt_once()
    if words[:1] == ["run"]:
        from rrfp.cli.run import parse_command

        done = errors.call_command(partial(parse_command, words[1:]))
    elif lacking := requirements.lacking(requirements.OF_COMMANDS):
        if completion.is_requested():
            return errors.FAILED
        done = errors.call_command(partial(_refuse, lacking))
    else:
        from rrfp.cli.app import app

        if completion.is_requested():
            return completion.print_completions(app)
        done = errors.run_app(app, words)
    if isinstance(done, int):
        code = done
        # The interpreter then does not traverse torch's objects at exit. Objects of a user's script
        # are still finalized.
        gc.freeze()
    else:
        restore_default_interrupts()
        code = done()
    if is_call_pending():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _refuse(lacking: str) -> None:
    """Raise UsageError that names the missing packages, which every subcommand but `run` needs."""
    raise UsageError(
        f"this environment lacks {lacking}, and only 'rrfp run' works without them; install them, "
        "or call this command in an environment that has them"
    )
