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
    """The first line of a long message; torch's go on with source locations."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def reason_of(error: BaseException) -> str:
    """Why something failed, as the operating system says it where it did."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(str(error))


def described(error: BaseException) -> str:
    """The type and the message of an error that nobody foresaw; if the system refused something
    that the message does not name, also the line that asked for it."""
    told = f"{type(error).__name__}: {first_line(str(error))}"
    if isinstance(error, OSError) and error.filename is None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].line:
            at = frames[-1]
            told += f", at `{at.line}` ({Path(at.filename).name}, line {at.lineno})"
    return told


def numbered(noun: str, numbers: Collection[int]) -> str:
    """As in `rank 1` or `ranks 2, 3`."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """`; did you mean 'bfw'?`: the known name that is nearest to what somebody wrote, to be put
    behind the fact. Empty if none is near."""
    names = [*known]
    # Exchanged letters are likelier than left-out ones, which get_close_matches prefers.
    exchanged = [name for name in names if sorted(name) == sorted(text)]
    nearest = exchanged or get_close_matches(text, names, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def is_torchs_loss(error: BaseException) -> bool:
    """Whether a collective of torch failed because the connection to a peer broke. It raises a bare
    RuntimeError, and only the message says why."""
    return _is_torchs(error, "connection")


def is_torchs_silence(error: BaseException) -> bool:
    """Whether a collective of torch failed because a peer was silent for too long."""
    return _is_torchs(error, "timed out")


def _is_torchs(error: BaseException, sign: str) -> bool:
    return isinstance(error, RuntimeError) and sign in first_line(str(error)).lower()
