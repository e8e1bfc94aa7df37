"""The errors a user can see. Each message is one sentence: the fact, the value, the next step."""


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
