"""How a run ended: `outcome.json`, which the launcher keeps locked while the run goes.

So a run that still goes is told from one whose launcher was killed: this one's file is empty, and
nobody holds it, as with the ranks' own files (see `spill.py`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import IO, Any, Self

from rrfp.errors import RrfpError, StoppedError, first_line
from rrfp.strict_json import parsed
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import read_description
from rrfp.trace.safe_files import open_own, read_small
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


class FoundBy(StrEnum):
    """Who found that a run could not go on."""

    LAUNCHER = "launcher"
    """From outside: a rank died or stood still."""
    RANK = "rank"
    """Itself."""
    LINK = "link"
    """A peer, over their link."""
    BOARD = "stall board"
    """Ranks that waited, together."""
    COLLECTIVE = "collective"
    """torch, in a rank that waited for others there."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who ended a run, for programs; the sentence says it to people."""

    found_by: FoundBy
    rank: int | None = None
    link: tuple[int, int] | None = None
    """Two ranks, if neither of them is at fault but what lies between."""

    @classmethod
    def decode(cls, told: Any) -> Self:
        """What `asdict` made JSON of. Raises TypeError, KeyError or ValueError for anything
        else."""
        rank, link = told["rank"], told["link"]
        if link is not None:
            first, second = link
            link = first, second
        if not all(isinstance(each, int) for each in (0 if rank is None else rank, *(link or ()))):
            raise TypeError("a rank is a number")
        return cls(FoundBy(told["found_by"]), rank, link)


class RunFailedError(RrfpError):
    """A run failed, and it is known who found that, and perhaps whose fault it was."""

    def __init__(self, sentence: str, culprit: Culprit) -> None:
        super().__init__(sentence)
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, and the sentence of the error that ended it."""

    outcome: Outcome
    error: str | None = None
    culprit: Culprit | None = None

    @classmethod
    def decode(cls, told: Any) -> Self:
        """What `described` made JSON of. Raises TypeError, KeyError or ValueError for
        anything else."""
        outcome, error = Outcome(told["outcome"]), told["error"]
        if not isinstance(error, str | None):
            raise TypeError("an error is a sentence")
        # Earlier runs named no culprit.
        culprit = told.get("culprit")
        return cls(outcome, error, None if culprit is None else Culprit.decode(culprit))

    def described(self) -> bytes:
        """What the file says."""
        return f"{json.dumps(asdict(self))}\n".encode()


class OutcomeNote:
    """Where the block of `noting_outcome` may say more than that the run was finished."""

    def __init__(self) -> None:
        self.outcome = Outcome.FINISHED
        self.error: str | None = None
        self.culprit: Culprit | None = None

    @property
    def ending(self) -> Ending:
        return Ending(self.outcome, self.error, self.culprit)


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
        note.culprit = error.culprit if isinstance(error, RunFailedError) else None
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
                file.write(note.ending.described())
            with suppress(OSError):
                file.close()


def _hold(run: RunDir) -> IO[bytes] | None:
    with suppress(OSError):
        file = open_own(run.outcome, anew=True)
        hold(file)
        return file
    return None


class JobOutcome:
    """How a job ends, as its own processes write it: no launcher of ours sees them end."""

    def __init__(self, run: RunDir, *, leads: bool) -> None:
        """`leads` is true of one process, which holds the run's outcome."""
        self._run = run
        self._leads = leads
        self._file = _hold(run) if leads else None

    def close(self, ending: Ending | None, *, has_lost_peer: bool) -> None:
        """Write how this process has ended; None if that is not known. The first that has failed by
        itself counts, and the leader's ending only if none has."""
        has_failed = ending is not None and ending.outcome is not Outcome.FINISHED
        with suppress(OSError):
            known = read_ending(self._run)
            is_open = known is None or known.outcome in (Outcome.KILLED, Outcome.FINISHED)
            if ending is None:
                if self._leads and known == Ending(Outcome.KILLED):
                    self._run.outcome.unlink(missing_ok=True)
            elif is_open and (self._leads or (has_failed and not has_lost_peer)):
                with open_own(self._run.outcome, anew=True) as file:
                    file.write(ending.described())
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


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
        content = read_small(run.outcome)
    except FileNotFoundError:
        return None
    try:
        return Ending.decode(parsed(content.decode(errors="replace")))
    except (ValueError, TypeError, KeyError):
        return Ending(Outcome.KILLED)


def why_without_records(run: RunDir) -> str:
    """A sentence: why nothing was recorded in a run's directory. May raise OSError, and RrfpError
    if its run.json cannot be read."""
    description = read_description(run.run_json)
    if not description:
        if run.logs.is_dir():
            return (
                f"{run.path} has the logs of one host's ranks alone; the trace is where host 0 of "
                "that run has its --out"
            )
        return f"{run.path} has no {run.trace.name}, and no run in it; 'rrfp runs' lists the runs"
    settings = description.get("settings")
    if isinstance(settings, dict) and settings.get("no_trace") is True:
        return (
            f"the run in {run.path} was trained with --no-trace; train it without to have a trace, "
            f"or read its {run.metrics.name}"
        )
    if is_going(run):
        return f"the run in {run.path} has recorded nothing yet; wait for its first step"
    ending = read_ending(run)
    reason = "" if ending is None or ending.error is None else f" ({first_line(ending.error)})"
    when = "before its first step" if not run.metrics.exists() else "and its records are gone"
    return (
        f"no rank of the run in {run.path} has recorded anything: it ended {when}{reason}; see "
        f"{run.logs}"
    )
