"""Calls of a function in a process of its own, for drivers and fabrics that may hang or crash."""

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
"""Exit code of a process whose function raised an exception."""
_END_S = 5.0
"""Time for a killed process to end. It cannot end while a driver blocks in the kernel."""


class NoAnswerError(Exception):
    """A call without a result; the message says why, such as "it did not answer within 60 s"."""

    def __init__(self, reason: str, raised: str = "") -> None:
        super().__init__(reason)
        self.raised = raised
        """Name of the exception that the function raised; empty if it hung or crashed."""


def call_isolated(function: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """Call a function of a module in a new process, and return its result. Arguments and result
    pass as JSON.

    Raises NoAnswerError if it raises, crashes, cannot be started or takes longer than `limit_s`, in
    seconds. In any case the process is killed if it still runs, and with it those that it started.
    """
    try:
        return _run_process(function, arguments, limit_s)
    except OSError as error:
        raise NoAnswerError(
            f"no process can be started for it: {described(error)}", type(error).__name__
        ) from None


def _run_process(
    function: Callable[..., Any], arguments: tuple[object, ...], limit_s: float
) -> Any:
    """Run the function in a new process, in a session of its own, and return its result; then kill
    what still runs in its process group. Raises NoAnswerError if the function raises, crashes or
    takes longer than `limit_s`; OSError if no process starts."""
    command = (sys.executable, "-m", __name__, function.__module__, function.__name__)
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [*command, json.dumps(arguments), f"{limit_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"it did not answer within {limit_s:g} s") from None
        finally:
            _kill_group(process)
        if process.returncode == _RAISED and output:
            raised, reason = json.loads(output)
            raise NoAnswerError(reason, raised)
        if process.returncode:
            raise NoAnswerError(_describe_failure(process.returncode, stderr))
        return json.loads(output)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, also those that it has left, and wait up to 5 s for it.
    Closes the pipe of its output."""
    # No other process gets the number of a group in which a process is left, and the number of an
    # empty one is not given anew before all others.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    assert process.stdout is not None
    process.stdout.close()


def _describe_failure(exit_code: int, stderr: IO[bytes]) -> str:
    """Return the signal that killed a process, or else the last line of its stderr that is not
    blank; "no reason given" without one."""
    if exit_code < 0:
        return f"it was killed: {signal.strsignal(-exit_code)}"
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")


def _main(module: str, name: str, arguments: str, limit_s: str) -> None:
    """Call the function in this process, write its result or its exception to stdout as JSON, and
    end at once, with exit code 0 or 70. Other output goes to stderr. A timer kills the process 5 s
    after `limit_s`."""
    # This process ends even if its parent is gone.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s) + _END_S)
    # Output of libraries goes to stderr: stdout carries the result.
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        exit_code = 0
        try:
            function = getattr(importlib.import_module(module), name)
            output = json.dumps(function(*json.loads(arguments)))
        except Exception as error:
            exit_code = _RAISED
            output = json.dumps([type(error).__name__, described(error)])
        stdout.write(output)
        stdout.flush()
        # Some libraries crash during a normal exit.
        os._exit(exit_code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
