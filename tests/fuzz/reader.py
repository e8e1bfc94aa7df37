"""What a reader is to the fuzzer, and how a command is held to its promise."""

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
"""Reads what lies in the working directory. Refuses by RrfpError; any other error is a finding."""


class BrokenPromiseError(Exception):
    """A command ended as none may."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Something that reads files that others may have made or damaged."""

    name: str
    make: Callable[[Path], object]
    """Writes whole files into a directory."""
    damaged: tuple[str, ...]
    """Which of these are damaged, one in each input: patterns below the directory."""
    attempts: tuple[Attempt, ...]
    """One is drawn for each input."""
    share: int = 1
    """How many inputs it gets for one of the others': what is quick gets more."""
    same: bool = False
    """Whether damage must not change what is told: the files only keep what can be made anew."""
    has_log: bool = False
    """Whether ranks alone read it, whose stderr is a log: a panic of Rust may stand there, beside
    the sentence that ends the run."""


def rrfp(*arguments: str) -> Attempt:
    """A command line. It may end well, or refuse in one sentence on stderr."""

    def run() -> str:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = errors.run_app(app.app, arguments)
            out.flush()
        if os.environ.get(errors.DEBUG_VARIABLE):
            raise BrokenPromiseError(err.getvalue()[-3000:])
        told = out.buffer.getvalue().decode("utf-8", "surrogateescape")
        _check(code, told, err.getvalue())
        return told if code == 0 else f"{code}: {err.getvalue()}"

    return run


def refusing_to_start(*arguments: str) -> Attempt:
    """`rrfp train`, up to where it would make a directory and start processes."""
    run = rrfp("train", "--out", "run", *arguments)

    def stop(_: object) -> None:
        pass

    def tried() -> object:
        with patch("rrfp.cli.train._run", stop):
            return run()

    return tried


def _check(code: object, out: str, err: str) -> None:
    def broken(why: str) -> NoReturn:
        raise BrokenPromiseError(f"{why}: {err[-2000:]!r}")

    if code not in (0, 1, 2, 3):
        broken(f"exit code {code}")
    for word in ("this is a bug", "Traceback", "panicked at", "the system refused"):
        if word in err:
            broken(word)
    last = err.strip().split("\n")[-1]
    # `trace check` tells its findings on stdout, a gate its sentence like an error.
    if code in (2, 3) and not last.startswith("rrfp: "):
        broken(f"exit code {code} without a sentence")
    if code == 1 and not last.startswith("rrfp: ") and not out:
        broken("exit code 1 without a word")
    if found := _UNPRINTABLE.search(out + err):
        broken(f"{found[0]!r} reaches the terminal")
