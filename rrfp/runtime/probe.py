"""A question to a process of its own: a driver or a fabric that is asked may hang, or crash."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from rrfp.errors import first_line

_END_S = 5.0
"""How long a killed process may take to end; one that a driver holds in the kernel does not."""


class NoAnswerError(Exception):
    """A question without an answer; the message says why, as in "it did not answer within 60 s"."""


def probe(question: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """What this function of a module returns in a process of its own, as JSON carries it.

    Raises NoAnswerError if it raises, crashes or takes longer than `limit_s`; nothing of it is left
    then.
    """
    command = (sys.executable, "-m", __name__, question.__module__, question.__name__)
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [*command, json.dumps(arguments), f"{limit_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"it did not answer within {limit_s:g} s") from None
        finally:
            _end(process)
        if process.returncode:
            raise NoAnswerError(_why(process.returncode, stderr))
        return json.loads(told)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started, if it has not ended by itself."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    assert process.stdout is not None
    process.stdout.close()


def _why(exit_code: int, stderr: IO[bytes]) -> str:
    if exit_code < 0:
        return f"it was killed: {signal.strsignal(-exit_code)}"
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")


def _answer(module: str, name: str, arguments: str, limit_s: str) -> None:
    # Should the one who asked be gone, this still ends.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s) + _END_S)
    # What libraries print must not come between.
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        question = getattr(importlib.import_module(module), name)
        failed = 0
        try:
            stdout.write(json.dumps(question(*json.loads(arguments))))
            stdout.flush()
        except Exception as error:
            failed = 1
            os.write(2, f"\n{type(error).__name__}: {first_line(str(error))}\n".encode())
        # Some libraries crash when they are torn down.
        os._exit(failed)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
