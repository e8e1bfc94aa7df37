"""How a run ended: `outcome.json`, which the launcher keeps locked while the run goes.

So a run that still goes is told from one whose launcher was killed: this one's file is empty, and
nobody holds it. Like the ranks' own files it is opened for reading and writing (see `spill.py`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import IO

from rrfp.errors import RrfpError, StoppedError
from rrfp.json_text import parsed
from rrfp.trace.rundir import RunDir
from rrfp.trace.spill import hold, is_being_written


class Outcome(StrEnum):
    """How a run ended, as far as its files tell."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By a signal, after which it may go on if it saves checkpoints."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """Its launcher could not tell any more how it ended."""
    RECORDED = "recorded"
    """Its job's own end is not known here."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, and the sentence of the error that ended it."""

    outcome: Outcome
    error: str | None = None


class OutcomeNote:
    """Where the block of `noting_outcome` may say more than that the run was finished."""

    def __init__(self) -> None:
        self.outcome = Outcome.FINISHED
        self.error: str | None = None


@contextmanager
def noting_outcome(run: RunDir) -> Iterator[OutcomeNote]:
    """Hold the run's outcome while the block runs the ranks, and write it when the block ends. A
    disk that takes no note of it changes nothing for the run."""
    note = OutcomeNote()
    file = _hold(run)
    try:
        yield note
    except KeyboardInterrupt:
        note.outcome = Outcome.INTERRUPTED
        raise
    except RrfpError as error:
        is_stopped = isinstance(error, StoppedError)
        note.outcome = Outcome.STOPPED if is_stopped else Outcome.FAILED
        note.error = str(error)
        raise
    except Exception as error:
        note.outcome, note.error = Outcome.FAILED, f"{type(error).__name__}: {error}"
        raise
    except BaseException:
        note.outcome = Outcome.STOPPED
        raise
    finally:
        if file is not None:
            with suppress(OSError):
                file.write(f"{json.dumps({'outcome': note.outcome, 'error': note.error})}\n")
            with suppress(OSError):
                file.close()


def _hold(run: RunDir) -> IO[str] | None:
    with suppress(OSError):
        file = run.outcome.open("w+", encoding="utf-8")
        hold(file)
        return file
    return None


def is_going(run: RunDir) -> bool:
    """Whether a process still runs or records this run. May raise OSError."""
    files = [run.outcome] if run.outcome.exists() else []
    for session in run.sessions():
        files += session.records.glob("rank-*.jsonl")
    return any(map(is_being_written, files))


def read_ending(run: RunDir) -> Ending | None:
    """What the launcher of a run that has ended wrote; None if no launcher ran it. May raise
    OSError."""
    try:
        text = run.outcome.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    try:
        told = parsed(text)
        return Ending(Outcome(told["outcome"]), told["error"])
    except (ValueError, TypeError, KeyError):
        return Ending(Outcome.KILLED)
