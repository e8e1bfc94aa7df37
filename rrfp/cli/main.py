"""The entry of `rrfp`, and the one place where its arguments are taken from.

`rrfp run` starts in every process of somebody's job, whose environment has torch and Megatron-Core
and perhaps no package of ours, or an older one. So it is parsed by the standard library
(`rrfp.cli.run`); every other subcommand by typer (`rrfp.cli.app`).
"""

import gc
import os
import sys
from functools import partial

from rrfp import requirements
from rrfp.cli import declared_options as completion
from rrfp.cli import errors
from rrfp.cli.errors import give_interrupts_back, take_interrupts
from rrfp.errors import UsageError
from rrfp.train.launch.store import is_call_pending


def main() -> int:
    """Run the command line on `sys.argv` and give its exit code."""
    words = sys.argv[1:]
    take_interrupts()
    if words[:1] == ["run"]:
        from rrfp.cli.run import parsed

        done = errors.handled(partial(parsed, words[1:]))
    elif lacking := requirements.lacking(requirements.OF_COMMANDS):
        if completion.is_asked():
            return errors.FAILED
        done = errors.handled(partial(_refuse, lacking))
    else:
        from rrfp.cli.app import app

        if completion.is_asked():
            return completion.answer(app)
        done = errors.run(app, words)
    if isinstance(done, int):
        code = done
        # So that the interpreter does not look through torch's objects as it ends. What a script
        # that we have run leaves is not ours to leave unfinalized.
        gc.freeze()
    else:
        give_interrupts_back()
        code = done()
    if is_call_pending():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _refuse(lacking: str) -> None:
    raise UsageError(
        f"this environment lacks {lacking}, and only 'rrfp run' works without them; install them, "
        "or call this command in an environment that has them"
    )
