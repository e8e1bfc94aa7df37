"""Readers as the fuzzer sees them, and the checks on how a command ends."""

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from rrfp.cli import app, errors

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Attempt = Callable[[], object]
"""Reads files in the working directory. RrfpError means refused; any other error is a finding."""


class BrokenPromiseError(Exception):
    """A command ended in a way that is never allowed, such as with a traceback."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A part of rrfp that reads files which others may have made or damaged."""

    name: str
    make: Callable[[Path], object]
    """Writes undamaged files into a directory."""
    damaged: tuple[str, ...]
    """Glob patterns below the directory of the files to damage, one file in each input."""
    attempts: tuple[Attempt, ...]
    """The attempts, one of which is drawn for each input."""
    share: int = 1
    """The number of inputs in proportion to other readers'; fast readers get more."""
    same: bool = False
    """True if damage must not change the output, because the files are only a cache."""
    has_log: bool = False
    """True if only ranks read the files. Their stderr is a log, in which a panic of Rust may
    precede the error that ends the run."""


def rrfp(*arguments: str) -> Attempt:
    """An attempt that runs a command line. It must succeed, or refuse in one sentence on stderr."""

    def run() -> str:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = errors.run_app(app.app, arguments)
            out.flush()
        if os.environ.get(errors.DEBUG_VARIABLE):
            raise BrokenPromiseError(err.getvalue()[-3000:])
        output = out.buffer.getvalue().decode("utf-8", "surrogateescape")
        _check(code, output, err.getvalue())
        return output if code == 0 else f"{code}: {err.getvalue()}"

    return run


def refusing_to_start(*arguments: str) -> Attempt:
    """An attempt that runs `rrfp train` until it would make a directory and start processes."""
    run = rrfp("train", "--out", "run", *arguments)

    def stop(_: object) -> None:
        pass

    def run_patched() -> object:
        with patch("rrfp.cli.train._run", stop):
            return run()

    return run_patched


def _check(code: object, out: str, err: str) -> None:
    def broken(why: str) -> NoReturn:
        raise BrokenPromiseError(f"{why}: {err[-2000:]!r}")

    if code not in (0, 1, 2, 3):
        broken(f"exit code {code}")
    for word in ("this is a bug", "Traceback", "panicked at", "the system refused"):
        if word in err:
            broken(word)
    last = err.strip().split("\n")[-1]
    # `trace check` prints its findings on stdout; a failed gate ends with a sentence like an error.
    if code in (2, 3) and not last.startswith("rrfp: "):
        broken(f"exit code {code} without a sentence")
    if code == 1 and not last.startswith("rrfp: ") and not out:
        broken("exit code 1 without a word")
    if found := _UNPRINTABLE.search(out + err):
        broken(f"{found[0]!r} reaches the terminal")
