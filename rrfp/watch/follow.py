"""Follows a run by reading its directory: new records and metrics, and the state of the run."""

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.strict_json import parsed
from rrfp.trace.outcome import Outcome, read_ending
from rrfp.trace.records import NS_PER_S, RankInfo, RankRecords
from rrfp.trace.run_dir import RunDir, expected_ranks
from rrfp.trace.run_json import description_of
from rrfp.trace.safe_files import LONGEST_LINE_BYTES, lines_of, open_regular
from rrfp.trace.spill import (
    add_flush,
    header_of,
    is_being_written,
    segment_after,
    segment_number,
    segments_in,
)
from rrfp.watch.alarms import Alarm, Alarms, Alert, format_ranks
from rrfp.watch.figures import StepAssembler, StepFigures

# Incremental reading of record files.
#
# A file stays open, so that its last records are still readable after the launcher has converted
# them into a trace and removed the file. Nothing is locked or written, so the run is not disturbed.


CHUNK = 4 * 2**20
"""Bytes read at a time."""


_MOST = 1e300
_UNUSED = ("stimulus", "agreement", "cost", "loss")
"""Records that no figure needs; decoding them too would take 1.5 times as long."""


class RecordsTail:
    """Reads the growing records of one rank, from one file or a sequence of segments."""

    def __init__(self, segments: Sequence[Path], most: int) -> None:
        """Open the records. Of the existing ones, only the last `most` bytes will be read. May
        raise OSError."""
        self.path = path = _first_segment(segments, most)
        """The file that is read now."""
        self.info: RankInfo | None = None
        """The recording rank; None until the file's header is complete."""
        self.begins_late = segment_number(path) > 1
        """True if earlier steps were skipped."""
        self.grown_ns: int | None = None
        """Time at which the file last grew, in ns since 1970."""
        self._most = most
        self._file: BufferedReader | None = open_regular(path)
        self.has_more = False
        """True if the last `read` left records that were already in the file."""
        self._begun: list[bytes] = []
        self._number = 0

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        """Close the file; later reads return None."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> RankRecords | None:
        """Return the flushes completed since the last call; None without any, or once closed.

        Reads up to 4 MiB, so that a longer flush takes several calls; the first call skips all but
        the last `most` bytes. Records of `_UNUSED` types are left out. Times are on the rank's own
        clock. Raises RrfpError if the file is damaged, and OSError.
        """
        if self._file is None:
            return None
        if self.info is None:
            self._file.seek(0)
            header = next(lines_of(self._file, self.path), b"")
            if not header.endswith(b"\n"):
                return None
            self.info = header_of(self.path, self._decoded(header))
            self._number = 1
            self._skip()
        lines = self._new_lines()
        if not lines:
            return None
        records = RankRecords(self.info)
        lists = records.by_name()
        for line in lines:
            self._number += 1
            add_flush(self.path, self._number, _without_unused(self._decoded(line)), lists)
        return records

    def _new_lines(self) -> list[bytes]:
        """Read up to `CHUNK` bytes and return the lines that they complete; store the rest.

        Enters the next segment, if there is one, at the end of this one. Sets `has_more` and
        `grown_ns`. Raises RrfpError for a line that is too long.
        """
        assert self._file is not None
        octets = self._file.read(CHUNK)
        self.has_more = len(octets) == CHUNK
        if not self.has_more:
            octets += self._enter_next_segment()
        if octets:
            with suppress(OSError):
                self.grown_ns = self.path.stat().st_mtime_ns
        *lines, rest = octets.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._begun, lines[0]))
            self._begun = []
        if rest:
            self._begun.append(rest)
        if sum(map(len, self._begun)) > LONGEST_LINE_BYTES:
            why = f"is longer than {LONGEST_LINE_BYTES >> 20} MiB"
            raise self._damaged(self._begun[0], why)
        return lines

    def _enter_next_segment(self) -> bytes:
        """Switch to the next segment if its header is complete; return the rest of the current one.

        Returns nothing (b"") if there is no next segment yet. Sets `begins_late` if segments in
        between are gone.
        """
        assert self._file is not None
        following = segment_after(self.path)
        if following is None:
            return b""
        try:
            file = open_regular(following)
        except FileNotFoundError:
            return b""
        if not file.readline().endswith(b"\n"):
            # The next segment's header is incomplete, so the rank may still write to this one.
            file.close()
            return b""
        rest = self._file.read()
        self._file.close()
        self.begins_late |= segment_number(following) > segment_number(self.path) + 1
        self.path, self._file, self.has_more = following, file, True
        return rest

    def _skip(self) -> None:
        """Seek to the last `most` bytes of a longer file, at the beginning of a flush.

        Then sets `begins_late`. A shorter file is not skipped.
        """
        assert self._file is not None
        size = self.path.stat().st_size if self.path.exists() else 0
        if size <= self._file.tell() + self._most:
            return
        self._file.seek(size - self._most)
        # Drop the rest of the flush at this offset.
        while (octets := self._file.readline(CHUNK)) and not octets.endswith(b"\n"):
            continue
        self.begins_late = True

    def _decoded(self, line: bytes) -> object:
        """Parse a line of JSON. Raises RrfpError if it is not valid."""
        try:
            return parsed(line)
        except ValueError as error:
            raise self._damaged(line, "is not JSON") from error

    def _damaged(self, line: bytes, why: str) -> RrfpError:
        """Make the error for a damaged line, for the caller to raise."""
        return RrfpError(
            f"{self.path} has a line that {why}: {line[:40]!r}; the file is damaged, and the run "
            "is not followed any further"
        )


def _first_segment(segments: Sequence[Path], most: int) -> Path:
    """Return the first of the last segments that have at most `most` bytes in total, or the last
    one."""
    size = 0
    for place in range(len(segments) - 1, 0, -1):
        size += segments[place].stat().st_size
        if size + segments[place - 1].stat().st_size > most:
            return segments[place]
    return segments[0]


def _without_unused(flush: object) -> object:
    """Return the flush without rows of `_UNUSED` types.

    A value that is not a list is returned as it is, for `add_flush` to refuse.
    """
    if not isinstance(flush, list):
        return flush
    return [row for row in flush if not (isinstance(row, list) and row and row[0] in _UNUSED)]


class MetricsTail:
    """Reads the growing `metrics.jsonl` of a run: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, object]]:
        """Return the lines completed since the last call as JSON objects.

        Other lines, and those with numbers of 1e300 or more, are skipped. A file that was replaced,
        as by a run that resumes, is read from its start; a missing file has no lines. May raise
        OSError.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return []
        with file:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            lines = [each for each in lines_of(file, self._path) if each.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        found = []
        for line in lines:
            with suppress(ValueError):
                value = parsed(line)
                if isinstance(value, dict) and _fits_floats(value):
                    found.append(value)
        return found


def _fits_floats(line: dict[str, object]) -> bool:
    """Return whether all numbers in the line, also in its lists, are below 1e300 in magnitude.

    NaN is not. Nested objects are not checked.
    """
    lists = (value if isinstance(value, list) else [value] for value in line.values())
    numbers = (each for values in lists for each in values if isinstance(each, int | float))
    return all(abs(each) < _MOST for each in numbers)


_FIRST_LOOK, _LEAST_FIRST_LOOK = 128 * 2**20, 2**20
"""Bytes of existing records to read at first: over all ranks, and at least per rank."""
_MAX_STEPS = 50
"""Number of recent steps whose figures stay available."""
_LEAST_SILENCE_S, _SILENT_STEPS = 30.0, 5
"""A run is silent if no step ends for 30 s and for the time of 5 recent steps."""
_RECENT = 10

Metrics = dict[str, Any]
"""A line of `metrics.jsonl`."""


class RunState(StrEnum):
    """State of a run."""

    WAITING = "waiting"
    """Nothing is recorded yet."""
    GOING = "going"
    SILENT = "silent"
    """Processes live, but no step has ended for long."""
    ENDED = "ended"
    KILLED = "killed"
    """The records stop, and no process wrote an outcome."""


class FinishedStep(NamedTuple):
    """A finished step, and the alarms active after it."""

    figures: StepFigures
    active: list[Alarm]


@dataclass(slots=True)
class Update:
    """The news of one `Follower.poll`."""

    steps: list[FinishedStep] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    has_more: bool = False
    """True if unread records remain, so that the next poll need not wait."""


class Follower:
    """Follows a running or finished run.

    It only reads the run's directory. Every method may raise OSError, and RrfpError for a damaged
    file.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self.run = RunDir(path)
        self.description: dict[str, Any] = {}
        self.steps: deque[StepFigures] = deque(maxlen=_MAX_STEPS)
        self.metrics: Metrics = {}
        """The last line of `metrics.jsonl`; empty before the first line."""
        self.begins_late = False
        """True if earlier steps were skipped because the records are long."""
        self._now_s = now_s
        self._session: RunDir | None = None
        self._tails: dict[int, RecordsTail] = {}
        self._lines = MetricsTail(self.run.metrics)
        self._assembly = StepAssembler()
        self._alarms: Alarms | None = None
        self._last_step_s: float | None = None
        self._has_read_trace = False

    @property
    def session(self) -> int:
        """Number of the session that is followed, from 1; also 1 before the first session."""
        return 1 if self._session is None else self._session.session

    @property
    def active(self) -> list[Alarm]:
        """The alarms that have not ended."""
        return [] if self._alarms is None else self._alarms.active

    @property
    def leading(self) -> Alarm | None:
        """Place with the largest rise, even if below the alarm threshold; None without a rise."""
        return None if self._alarms is None else self._alarms.leading

    @property
    def last_step(self) -> int | None:
        """Last training step that all ranks have ended, or else that of the last metrics; None
        without."""
        if self.steps:
            return self.steps[-1].step
        step = self.metrics.get("step")
        return step if isinstance(step, int) else None

    def poll(self) -> Update:
        """Read the new records and metrics; return the finished steps, metrics and alerts in them.

        Switches to a newer session, and reads the trace of one that is already over. Steps finish
        once all expected ranks have records, and then update the alarms.
        """
        self._enter_session()
        news = Update()
        news.metrics = self._lines.read()
        if news.metrics:
            self.metrics = news.metrics[-1]
            self._last_step_s = self._now_s()
        self._read_trace()
        for tail in self._tails.values():
            records = tail.read()
            news.has_more |= tail.has_more
            if records is not None:
                self._assembly.add(records)
            self.begins_late |= tail.begins_late
        expected = expected_ranks(self.description) or set(self._assembly.infos)
        if len(self._assembly.infos) >= len(expected) > 0:
            for step in self._assembly.pop_finished(len(expected)):
                self._add_step(step, news)
        return news

    def state(self) -> tuple[RunState, str]:
        """Return the state of the run and a sentence about it.

        A run goes on (or waits, or is silent) while a process holds the lock of a record file or of
        `outcome.json`. Otherwise the outcome, the trace and the last records decide.
        """
        if self._is_going():
            silent_s = self._silent_s()
            if silent_s is not None:
                return RunState.SILENT, self._describe_silence(silent_s)
            if self.last_step is None:
                return RunState.WAITING, self._describe_first_wait()
            return RunState.GOING, "going on"
        ending = read_ending(self.run)
        if ending is not None and ending.outcome is not Outcome.KILLED:
            error = f": {ending.error}" if ending.error else ""
            return RunState.ENDED, f"{ending.outcome}{error}"
        has_trace = self._session is not None and self._session.trace.exists()
        if ending is None and has_trace:
            return RunState.ENDED, "recorded, and over"
        has_begun = any(tail.info for tail in self._tails.values()) or self.last_step is not None
        if ending is None and not has_begun:
            return RunState.WAITING, "nothing is recorded yet"
        return self._state_after_stop(is_killed=ending is not None)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for tail in self._tails.values():
            tail.close()

    def _enter_session(self) -> None:
        """Switch to the last session if it is new, and open the records of new ranks.

        A new session drops earlier records and alarms. A file that has just vanished is skipped.
        Raises RrfpError if too many files are open.
        """
        sessions = self.run.sessions()
        if sessions and sessions[-1] != self._session:
            self.close()
            self._tails, self._assembly, self._alarms = {}, StepAssembler(), None
            self._session, self.description = sessions[-1], {}
            self._has_read_trace = False
        if not self.description.get("ranks"):
            self.description = description_of(self._session or self.run)
        if self._session is None:
            return
        found = segments_in(self._session.records)
        for rank, segments in found.items():
            if rank not in self._tails:
                most = max(_LEAST_FIRST_LOOK, _FIRST_LOOK // len(found))
                with suppress(FileNotFoundError):
                    self._tails[rank] = _open_tail(segments, most)

    def _read_trace(self) -> None:
        """Read the trace, once, of a session that ended before any of its records were read."""
        session = self._session
        if session is None or self._has_read_trace or self._assembly.infos:
            return
        if session.records.is_dir() or not session.trace.exists():
            return
        # Imported late: Perfetto's module is slow to import.
        from rrfp.trace.perfetto.reader import read_trace

        self._has_read_trace = True
        recording = read_trace(session.trace)
        self.description = self.description or recording.settings
        for records in recording.ranks:
            self._assembly.add(records, is_aligned=True)

    def _add_step(self, step: StepFigures, news: Update) -> None:
        """Add a finished step, and its alerts, to `news` and to this object's figures."""
        if self._alarms is None:
            self._alarms = Alarms(self._assembly.infos.values())
        news.alerts += self._alarms.add_step(step)
        news.steps.append(FinishedStep(step, self._alarms.active))
        self.steps.append(step)
        self._last_step_s = self._now_s()

    def _is_going(self) -> bool:
        """Return whether a process still runs or records the run.

        The check locks each file for a moment: `outcome.json`, and the record files whose header
        was read, because their writer already holds its own lock.
        """
        files = [tail.path for tail in self._tails.values() if tail.info is not None]
        if self.run.outcome.exists():
            files.append(self.run.outcome)
        return any(map(is_being_written, files))

    def _describe_first_wait(self) -> str:
        """Explain why no step is complete: the ranks that have ended none although others have, or
        no rank has."""
        ends = self._assembly.last_steps
        missing = sorted(expected_ranks(self.description) - ends.keys())
        if not (ends and missing):
            return "no step has ended yet"
        last = max(ends.values())
        return f"no step is whole: others are at step {last}, but not {format_ranks(missing)}"

    def _silent_s(self) -> float | None:
        """Return the seconds since the last step ended if the run counts as silent; otherwise None.

        It does after 30 s or, if longer, five times the longest of the last ten recorded steps.
        None before the first recorded step.
        """
        if self._last_step_s is None or not self.steps:
            return None
        silent_s = self._now_s() - self._last_step_s
        longest_s = max(step.window_s for step in list(self.steps)[-_RECENT:])
        is_silent = silent_s > max(_LEAST_SILENCE_S, _SILENT_STEPS * longest_s)
        return silent_s if is_silent else None

    def _describe_silence(self, silent_s: float) -> str:
        """Explain a silence by ranks whose records nobody writes, or else by ranks behind the last
        step; without either it is on all ranks."""
        silence = f"no step has ended for {silent_s:.0f} s"
        dead = [
            tail
            for tail in self._tails.values()
            if tail.info is not None and not is_being_written(tail.path)
        ]
        if dead:
            return f"{silence}; {self._describe_dead(dead)}"
        last_steps = self._assembly.last_steps
        behind = [rank for rank, step in last_steps.items() if step < max(last_steps.values())]
        if behind:
            step = max(last_steps.values())
            return f"{silence}; step {step} is missing from {format_ranks(sorted(behind))} only"
        return f"{silence}, on any rank; 'rrfp trace import --flight-recorder' reads a job's dumps"

    def _state_after_stop(self, *, is_killed: bool) -> tuple[RunState, str]:
        """Return state and sentence of a run whose records stopped.

        No outcome is written for a job recorded by `rrfp run`. Unless `is_killed`, the run counts
        as killed only if its ranks stopped at different steps or left no records.
        """
        grown = {tail: tail.grown_ns for tail in self._tails.values() if tail.grown_ns is not None}
        after = "" if self.last_step is None else f" after step {self.last_step}"
        if not grown:
            return RunState.KILLED, f"killed{after}; nobody wrote how it ended"
        ends = self._assembly.last_steps
        last = max(ends.values(), default=-1)
        first = [t for t in grown if t.info is not None and ends.get(t.info.rank, -1) < last]
        stop = f"records stop at {_clock(max(grown.values()))}{after}"
        if first:
            return RunState.KILLED, f"killed; {stop}; {self._describe_dead(first)}"
        if is_killed:
            return RunState.KILLED, f"killed; {stop}, of all ranks alike"
        return RunState.ENDED, f"over; {stop}"

    def _describe_dead(self, dead: list[RecordsTail]) -> str:
        """Format up to three dead ranks: `rank 2 on node7 writes nothing since 12:03:04, after step
        41`."""
        named = []
        for tail in dead[:3]:
            info = tail.info
            if info is None or tail.grown_ns is None:
                continue
            when = _clock(tail.grown_ns)
            step = self._assembly.last_steps.get(info.rank)
            after = "before its first step ended" if step is None else f"after step {step}"
            named.append(f"rank {info.rank} on {info.host} writes nothing since {when}, {after}")
        more = len(dead) - 3
        return "; ".join([*named, *([f"and {more} more ranks"] if more > 0 else [])])


def _clock(time_ns: int) -> str:
    """Format ns since 1970 as the local time of day, `12:03:04`."""
    return time.strftime("%H:%M:%S", time.localtime(time_ns / NS_PER_S))


def _open_tail(segments: list[Path], most: int) -> RecordsTail:
    """Open a rank's records. Raises RrfpError if too many files are open, and OSError."""
    try:
        return RecordsTail(segments, most)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise RrfpError(
                f"{segments[-1]} cannot be opened, as too many files are open; raise the limit "
                "first, with 'ulimit -n 65536'"
            ) from error
        raise
