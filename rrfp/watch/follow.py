"""Follows a run by its directory: what is new since the last look, and how the run stands."""

import errno
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.trace.outcome import Outcome, read_ending
from rrfp.trace.records import NS_PER_S
from rrfp.trace.rundir import RunDir, expected_ranks
from rrfp.trace.sessions import description_of
from rrfp.trace.spills.segments import segments_in
from rrfp.trace.spills.spill import is_being_written
from rrfp.watch.alarms import Alarm, Alarms, Alert
from rrfp.watch.figures import Assembly, StepFigures
from rrfp.watch.tail import LinesTail, RecordsTail

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
