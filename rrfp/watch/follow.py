"""Follows a run by its directory: what is new since the last look, and how the run stands."""

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
from rrfp.watch.alarms import Alarm, Alarms, Alert
from rrfp.watch.figures import Assembly, StepFigures

# Reads what has been added to a file of records since the last look, and nothing twice.
#
# The file stays open. So the last records of a run are still read when its launcher has made them
# into a trace and removed them. Nothing is locked and nothing written: the run takes no notice.


CHUNK = 4 * 2**20
"""Octets that are read at a time."""


_MOST = 1e300
_UNUSED = ("stimulus", "agreement", "cost", "loss")
"""Records that no figure is made of; with them, reading takes half as long again."""


class RecordsTail:
    """The growing records of one rank, in one file or in segments that follow each other."""

    def __init__(self, segments: Sequence[Path], most: int) -> None:
        """`most` octets are read of what is there already: the last ones. May raise OSError."""
        self.path = path = _first_of(segments, most)
        """The file that is read now."""
        self.info: RankInfo | None = None
        """Who records; None until the rank has written that."""
        self.begins_late = segment_number(path) > 1
        """Whether earlier steps were left out."""
        self.grown_ns: int | None = None
        """When the file last grew, in ns since 1970."""
        self._most = most
        self._file: BufferedReader | None = open_regular(path)
        self.has_more = False
        """Whether the last call left something that was there already."""
        self._begun: list[bytes] = []
        self._number = 0

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> RankRecords | None:
        """The flushes that were finished since the last call, up to the size of a chunk or one
        flush; None if there are none. Times are on the rank's own clock.

        Raises RrfpError for what is not a file of records, and OSError.
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
            add_flush(self.path, self._number, _used(self._decoded(line)), lists)
        return records

    def _new_lines(self) -> list[bytes]:
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
            raise self._damaged(b"".join(self._begun[:1]))
        return lines

    def _enter_next_segment(self) -> bytes:
        """Go on to the next segment, if the rank has; returns the rest of this one."""
        assert self._file is not None
        following = segment_after(self.path)
        if following is None:
            return b""
        try:
            file = open_regular(following)
        except FileNotFoundError:
            return b""
        if not file.readline().endswith(b"\n"):
            # The rank has only begun it, and may still write here.
            file.close()
            return b""
        rest = self._file.read()
        self._file.close()
        self.begins_late |= segment_number(following) > segment_number(self.path) + 1
        self.path, self._file, self.has_more = following, file, True
        return rest

    def _skip(self) -> None:
        """Go on to the last octets of a file that is longer than what is to be read of it."""
        assert self._file is not None
        size = self.path.stat().st_size if self.path.exists() else 0
        if size <= self._file.tell() + self._most:
            return
        self._file.seek(size - self._most)
        # The rest of a flush that began earlier.
        while (octets := self._file.readline(CHUNK)) and not octets.endswith(b"\n"):
            continue
        self.begins_late = True

    def _decoded(self, line: bytes) -> object:
        try:
            return parsed(line)
        except ValueError as error:
            raise self._damaged(line) from error

    def _damaged(self, line: bytes) -> RrfpError:
        return RrfpError(
            f"{self.path} has a line that is not JSON: {line[:40]!r}; the file is damaged, and "
            "the run is not followed any further"
        )


def _first_of(segments: Sequence[Path], most: int) -> Path:
    """The first of the last segments that have at most so many octets, or the last one."""
    size = 0
    for place in range(len(segments) - 1, 0, -1):
        size += segments[place].stat().st_size
        if size + segments[place - 1].stat().st_size > most:
            return segments[place]
    return segments[0]


def _used(flush: object) -> object:
    """A flush without the rows that are not used; `add_flush` refuses what is no flush."""
    if not isinstance(flush, list):
        return flush
    return [row for row in flush if not (isinstance(row, list) and row and row[0] in _UNUSED)]


class LinesTail:
    """The growing `metrics.jsonl` of a run: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, object]]:
        """The lines that were finished since the last call. A file that was replaced, as when a run
        goes on from a checkpoint, is read anew. May raise OSError."""
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
                if isinstance(value, dict) and _fits(value):
                    found.append(value)
        return found


def _fits(line: dict[str, object]) -> bool:
    """Whether each number in a line is one that a float holds; JSON has others."""
    lists = (value if isinstance(value, list) else [value] for value in line.values())
    numbers = (each for values in lists for each in values if isinstance(each, int | float))
    return all(abs(each) < _MOST for each in numbers)


_FIRST_LOOK, _LEAST_FIRST_LOOK = 128 * 2**20, 2**20
"""Octets that are read of a run that has gone on for long: over all ranks, but of each so many."""
_KEPT = 50
"""Steps whose figures are kept."""
_LEAST_SILENCE_S, _SILENT_STEPS = 30.0, 5
"""A run that ends no step for so long, and for as long as so many steps take, is silent."""
_RECENT = 10

Metrics = dict[str, Any]
"""A line of `metrics.jsonl`."""


class Stand(StrEnum):
    """How a run stands."""

    WAITING = "waiting"
    """Nothing is recorded yet."""
    GOING = "going"
    SILENT = "silent"
    """It goes on, and has ended no step for long."""
    ENDED = "ended"
    KILLED = "killed"
    """Its records stopped, and nobody wrote how it ended."""


class Seen(NamedTuple):
    """A step that has ended, and what was slow then."""

    figures: StepFigures
    active: list[Alarm]


@dataclass(slots=True)
class News:
    """What one look has found."""

    steps: list[Seen] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    has_more: bool = False
    """Whether more is there already, so that the next look need not wait."""


class Follower:
    """A run that is going, or that has ended.

    It reads the run's directory and changes nothing in it. Every method may raise OSError, and
    RrfpError for a damaged file.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self.run = RunDir(path)
        self.description: dict[str, Any] = {}
        self.steps: deque[StepFigures] = deque(maxlen=_KEPT)
        self.metrics: Metrics = {}
        """The last line of `metrics.jsonl`; empty for a run without."""
        self.begins_late = False
        """Whether earlier steps were left out, because they are many."""
        self._now_s = now_s
        self._session: RunDir | None = None
        self._tails: dict[int, RecordsTail] = {}
        self._lines = LinesTail(self.run.metrics)
        self._assembly = Assembly()
        self._alarms: Alarms | None = None
        self._last_step_s: float | None = None
        self._has_read_trace = False

    @property
    def session(self) -> int:
        """The session that is followed, counted from 1."""
        return 1 if self._session is None else self._session.session

    @property
    def active(self) -> list[Alarm]:
        """What is slow now."""
        return [] if self._alarms is None else self._alarms.active

    @property
    def leading(self) -> Alarm | None:
        """What stands out most, whether or not it counts as slow."""
        return None if self._alarms is None else self._alarms.leading

    @property
    def last_step(self) -> int | None:
        """The last training step that all ranks have ended."""
        if self.steps:
            return self.steps[-1].step
        step = self.metrics.get("step")
        return step if isinstance(step, int) else None

    def look(self) -> News:
        """Read what is new."""
        self._enter_session()
        news = News()
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
            for step in self._assembly.finished(len(expected)):
                self._take(step, news)
        return news

    def stand(self) -> tuple[Stand, str]:
        """How the run stands, and a sentence about it."""
        if self._is_going():
            silent_s = self._silent_s()
            if silent_s is not None:
                return Stand.SILENT, self._silence(silent_s)
            if self.last_step is None:
                return Stand.WAITING, self._first_wait()
            return Stand.GOING, "going on"
        ending = read_ending(self.run)
        if ending is not None and ending.outcome is not Outcome.KILLED:
            error = f": {ending.error}" if ending.error else ""
            return Stand.ENDED, f"{ending.outcome}{error}"
        has_trace = self._session is not None and self._session.trace.exists()
        if ending is None and has_trace:
            return Stand.ENDED, "recorded, and over"
        has_begun = any(tail.info for tail in self._tails.values()) or self.last_step is not None
        if ending is None and not has_begun:
            return Stand.WAITING, "nothing is recorded yet"
        return self._death(is_known=ending is not None)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for tail in self._tails.values():
            tail.close()

    def _enter_session(self) -> None:
        """Take up the last session, its description, and ranks that have come since."""
        sessions = self.run.sessions()
        if sessions and sessions[-1] != self._session:
            self.close()
            self._tails, self._assembly, self._alarms = {}, Assembly(), None
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
                    self._tails[rank] = _opened(segments, most)

    def _read_trace(self) -> None:
        """Read the trace of a session that had ended before its records were looked at."""
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

    def _take(self, step: StepFigures, news: News) -> None:
        if self._alarms is None:
            self._alarms = Alarms(self._assembly.infos.values())
        news.alerts += self._alarms.take(step)
        news.steps.append(Seen(step, self._alarms.active))
        self.steps.append(step)
        self._last_step_s = self._now_s()

    def _is_going(self) -> bool:
        """Whether a process still runs or records the run.

        A file is asked only when its rank has begun to write it, and so holds it already: asking
        takes hold of it for a moment.
        """
        files = [tail.path for tail in self._tails.values() if tail.info is not None]
        if self.run.outcome.exists():
            files.append(self.run.outcome)
        return any(map(is_being_written, files))

    def _long_s(self) -> float:
        """How long is long, without a step."""
        recent = [step.window_s for step in list(self.steps)[-_RECENT:]]
        return max(_LEAST_SILENCE_S, _SILENT_STEPS * max(recent, default=0.0))

    def _first_wait(self) -> str:
        """Why no step is whole yet: it may be that some rank does not record."""
        ends = self._assembly.last_steps
        missing = sorted(expected_ranks(self.description) - ends.keys())
        if not (ends and missing):
            return "no step has ended yet"
        return (
            f"no step is whole: others are at step {max(ends.values())}, but not {_ranks(missing)}"
        )

    def _silent_s(self) -> float | None:
        """For how long no step has ended, if that is long."""
        if self._last_step_s is None or not self.steps:
            return None
        silent_s = self._now_s() - self._last_step_s
        return silent_s if silent_s > self._long_s() else None

    def _silence(self, silent_s: float) -> str:
        told = f"no step has ended for {silent_s:.0f} s"
        dead = [tail for tail in self._tails.values() if not self._writes(tail)]
        if dead:
            return f"{told}; {self._told_dead(dead)}"
        last_steps = self._assembly.last_steps
        behind = [rank for rank, step in last_steps.items() if step < max(last_steps.values())]
        if behind:
            step = max(last_steps.values())
            return f"{told}; step {step} is missing from {_ranks(behind)} only"
        return f"{told}, on any rank; 'rrfp trace import --flight-recorder' reads a job's dumps"

    def _death(self, *, is_known: bool) -> tuple[Stand, str]:
        """What is said of a run whose records stopped. Of a recorded job nobody writes how it ends,
        so it counts as killed only if its ranks ended apart."""
        grown = {tail: tail.grown_ns for tail in self._tails.values() if tail.grown_ns is not None}
        after = "" if self.last_step is None else f" after step {self.last_step}"
        if not grown:
            return Stand.KILLED, f"killed{after}; nobody wrote how it ended"
        ends = self._assembly.last_steps
        last = max(ends.values(), default=-1)
        first = [t for t in grown if t.info is not None and ends.get(t.info.rank, -1) < last]
        told = f"records stop at {_clock(max(grown.values()))}{after}"
        if first:
            return Stand.KILLED, f"killed; {told}; {self._told_dead(first)}"
        if is_known:
            return Stand.KILLED, f"killed; {told}, of all ranks alike"
        return Stand.ENDED, f"over; {told}"

    def _writes(self, tail: RecordsTail) -> bool:
        return tail.info is None or is_being_written(tail.path)

    def _told_dead(self, dead: list[RecordsTail]) -> str:
        """`rank 2 on node7 has written nothing since 12:03:04, after step 41`."""
        told = []
        for tail in dead[:3]:
            info = tail.info
            if info is None or tail.grown_ns is None:
                continue
            when = _clock(tail.grown_ns)
            step = self._assembly.last_steps.get(info.rank)
            after = "before its first step ended" if step is None else f"after step {step}"
            told.append(f"rank {info.rank} on {info.host} writes nothing since {when}, {after}")
        more = len(dead) - 3
        return "; ".join([*told, *([f"and {more} more ranks"] if more > 0 else [])])


def _clock(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / NS_PER_S))


def _ranks(ranks: list[int]) -> str:
    told = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {told}{more}"


def _opened(segments: list[Path], most: int) -> RecordsTail:
    try:
        return RecordsTail(segments, most)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise RrfpError(
                f"{segments[-1]} cannot be opened, as too many files are open; raise the limit "
                "first, with 'ulimit -n 65536'"
            ) from error
        raise
