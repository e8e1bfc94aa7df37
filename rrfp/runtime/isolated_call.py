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

from rrfp.errors import described

_RAISED = 70
"""The exit code of a process whose question raised an exception."""
_END_S = 5.0
"""How long a killed process may take to end; one that a driver holds in the kernel does not."""


class NoAnswerError(Exception):
    """A question without an answer; the message says why, as in "it did not answer within 60 s"."""

    def __init__(self, reason: str, raised: str = "") -> None:
        super().__init__(reason)
        self.raised = raised
        """The name of the exception that the question raised; empty if it hung or crashed."""


def probe(question: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """What this function of a module returns in a process of its own, as JSON carries it.

    Raises NoAnswerError if it raises, crashes, cannot be started or takes longer than `limit_s`;
    nothing of it is left then.
    """
    try:
        return _answer_to(question, arguments, limit_s)
    except OSError as error:
        raise NoAnswerError(
            f"no process can be started for it: {described(error)}", type(error).__name__
        ) from None


def _answer_to(question: Callable[..., Any], arguments: tuple[object, ...], limit_s: float) -> Any:
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
        if process.returncode == _RAISED and told:
            raised, reason = json.loads(told)
            raise NoAnswerError(reason, raised)
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
        exit_code = 0
        try:
            question = getattr(importlib.import_module(module), name)
            told = json.dumps(question(*json.loads(arguments)))
        except Exception as error:
            exit_code = _RAISED
            told = json.dumps([type(error).__name__, described(error)])
        stdout.write(told)
        stdout.flush()
        # Some libraries crash when they are torn down.
        os._exit(exit_code)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
