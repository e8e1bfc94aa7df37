"""Reads and writes `outcome.json`: how a run ended.

The launcher keeps the file locked, and empty, while the run goes, as the ranks do with their own
files (`rrfp.trace.spill`). An empty file without a lock means that the launcher was killed.
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
from rrfp.trace.spill import is_being_written, lock_for_writing


class Outcome(StrEnum):
    """How a run ended, according to its files."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped by a signal; it may be resumed if it saves checkpoints."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """The launcher was killed before it could write the outcome."""
    RECORDED = "recorded"
    """A recorded job whose own end is not known here."""


class FoundBy(StrEnum):
    """The part of the system that detected a failure."""

    LAUNCHER = "launcher"
    """The launcher saw that a rank had died or hung."""
    RANK = "rank"
    """The failed rank itself."""
    LINK = "link"
    """A peer of the failed rank, over their link."""
    BOARD = "stall board"
    """Waiting ranks, which compared what they waited for."""
    COLLECTIVE = "collective"
    """torch, in a rank that waited for others in a collective."""


@dataclass(frozen=True, slots=True)
class FaultOrigin:
    """The rank or link that made a run fail, in machine-readable form."""

    found_by: FoundBy
    rank: int | None = None
    link: tuple[int, int] | None = None
    """Two ranks, if the connection between them failed and neither of them did."""

    @classmethod
    def decode(cls, value: Any) -> Self:
        """The inverse of `asdict`, from decoded JSON. Raises TypeError, KeyError or ValueError for
        an invalid value."""
        rank, link = value["rank"], value["link"]
        if link is not None:
            first, second = link
            link = first, second
        if not all(isinstance(each, int) for each in (0 if rank is None else rank, *(link or ()))):
            raise TypeError("a rank is a number")
        return cls(FoundBy(value["found_by"]), rank, link)


class RunFailedError(RrfpError):
    """A run failed. It is known what detected the failure, and perhaps which rank or link caused
    it."""

    def __init__(self, sentence: str, culprit: FaultOrigin) -> None:
        super().__init__(sentence)
        self.culprit = culprit


@dataclass(slots=True)
class Ending:
    """How a run ended, and the message of the error that ended it. Its fields are the file's
    keys."""

    outcome: Outcome = Outcome.FINISHED
    error: str | None = None
    culprit: FaultOrigin | None = None

    @classmethod
    def decode(cls, value: Any) -> Self:
        """The ending in the decoded JSON of outcome.json; a missing `culprit` is None. Raises
        TypeError, KeyError or ValueError for an invalid value."""
        outcome, error = Outcome(value["outcome"]), value["error"]
        if not isinstance(error, str | None):
            raise TypeError("an error is a sentence")
        # Earlier runs have no such key.
        culprit = value.get("culprit")
        return cls(outcome, error, None if culprit is None else FaultOrigin.decode(culprit))

    def described(self) -> bytes:
        """The content of outcome.json: a line of JSON."""
        return f"{json.dumps(asdict(self))}\n".encode()


@contextmanager
def noting_outcome(run: RunDir) -> Iterator[Ending]:
    """Keep the outcome file locked while the block runs the ranks, and write the outcome when the
    block ends or raises: the yielded `Ending`, or for an exception, which is raised again,
    `INTERRUPTED` (KeyboardInterrupt), `STOPPED` (StoppedError, SystemExit) or `FAILED`. Errors of
    the disk are ignored."""
    note = Ending()
    file = _create_locked(run)
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
                file.write(note.described())
            with suppress(OSError):
                file.close()


def _create_locked(run: RunDir) -> IO[bytes] | None:
    """Create or empty the outcome file, and lock it; None if either fails."""
    with suppress(OSError):
        file = open_own(run.outcome, truncate=True)
        lock_for_writing(file)
        return file
    return None


class JobOutcome:
    """Writes the outcome of a recorded job from its own processes, as no rrfp launcher sees them
    end."""

    def __init__(self, run: RunDir, *, leads: bool) -> None:
        """`leads` is true in one process, which keeps the outcome file locked."""
        self._run = run
        self._leads = leads
        self._file = _create_locked(run) if leads else None

    def close(self, ending: Ending | None, *, has_lost_peer: bool) -> None:
        """Write how this process ended (None: unknown), and unlock the file. An earlier ending in
        the file stays, unless it is `FINISHED`; a process other than the leader writes only if it
        failed by itself. If the leader's ending is unknown and the file empty or damaged, the file
        is removed. Errors of the disk are ignored."""
        has_failed = ending is not None and ending.outcome is not Outcome.FINISHED
        with suppress(OSError):
            known = read_ending(self._run)
            is_open = known is None or known.outcome in (Outcome.KILLED, Outcome.FINISHED)
            if ending is None:
                if self._leads and known == Ending(Outcome.KILLED):
                    self._run.outcome.unlink(missing_ok=True)
            elif is_open and (self._leads or (has_failed and not has_lost_peer)):
                with open_own(self._run.outcome, truncate=True) as file:
                    file.write(ending.described())
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def is_running(run: RunDir) -> bool:
    """True if a launcher or a recording rank of this run is alive. May raise OSError."""
    files = [run.outcome] if run.outcome.exists() else []
    for session in run.sessions():
        files += session.records.glob("rank-*.jsonl")
    return any(map(is_being_written, files))


def read_ending(run: RunDir) -> Ending | None:
    """Read how a run ended: None without an outcome file, `KILLED` if the file is empty or damaged,
    so also while its launcher runs. May raise OSError."""
    try:
        content = read_small(run.outcome)
    except FileNotFoundError:
        return None
    try:
        return Ending.decode(parsed(content.decode(errors="replace")))
    except (ValueError, TypeError, KeyError):
        return Ending(Outcome.KILLED)


def why_without_records(run: RunDir) -> str:
    """Explain in a sentence why a run's directory has no records: no run in it, the logs of one
    host alone, --no-trace, still running, ended before its first step, or records that are gone.
    May raise OSError, and RrfpError if run.json cannot be read."""
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
    if is_running(run):
        return f"the run in {run.path} has recorded nothing yet; wait for its first step"
    ending = read_ending(run)
    reason = "" if ending is None or ending.error is None else f" ({first_line(ending.error)})"
    when = "before its first step" if not run.metrics.exists() else "and its records are gone"
    return (
        f"no rank of the run in {run.path} has recorded anything: it ended {when}{reason}; see "
        f"{run.logs}"
    )
