"""The errors a user can see. Each message is one sentence: the fact, the value, the next step."""

import traceback
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path


class RrfpError(Exception):
    """Something failed while running; the command line exits with 1."""

    exit_code = 1


class StoppedError(RrfpError):
    """A signal from outside ended the run."""


class GateError(RrfpError):
    """A figure is above what was asked for; the command line exits with 3."""

    exit_code = 3


class UsageError(RrfpError):
    """Wrong arguments, configuration, data or order file; the command line exits with 2."""

    exit_code = 2


def first_line(text: str) -> str:
    """Return the first line of a message that is not blank, without spaces around it, or `no reason
    given`. Messages of torch go on with source locations."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def reason_of(error: BaseException) -> str:
    """Return why something failed: the operating system's text (`strerror`) for an OSError that has
    one, else the first line of the message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(str(error))


def described(error: BaseException) -> str:
    """Describe an unforeseen error by its type and the first line of its message. For an OSError
    that names no file it adds the source line that raised it, if the traceback has it."""
    told = f"{type(error).__name__}: {first_line(str(error))}"
    if isinstance(error, OSError) and error.filename is None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].line:
            at = frames[-1]
            told += f", at `{at.line}` ({Path(at.filename).name}, line {at.lineno})"
    return told


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Format a noun and numbers: `rank 1`, or in the plural `ranks 2, 3`. Nothing is sorted."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'bfw'?` with the known name nearest to `text`, to be appended to an
    error; empty if none is near. A name of the same letters in another order goes first."""
    names = [*known]
    # Exchanged letters are likelier than left-out ones, which get_close_matches prefers.
    exchanged = [name for name in names if sorted(name) == sorted(text)]
    nearest = exchanged or get_close_matches(text, names, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def is_torchs_loss(error: BaseException) -> bool:
    """Return True for a RuntimeError whose first line contains "connection" in any case: a
    collective of torch failed because the connection to a peer broke, which only the text shows."""
    return _is_torchs(error, "connection")


def is_torchs_silence(error: BaseException) -> bool:
    """Return True for a RuntimeError whose first line contains "timed out" in any case: a
    collective of torch failed because a peer was silent for too long."""
    return _is_torchs(error, "timed out")


def _is_torchs(error: BaseException, sign: str) -> bool:
    """Return True for a RuntimeError whose message's first line, in lower case, contains `sign`."""
    return isinstance(error, RuntimeError) and sign in first_line(str(error)).lower()
