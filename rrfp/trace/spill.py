"""A rank's own append-only file of records, `records/rank-<N>.jsonl`.

The first line is a header: format, version and who records. Every further line is one flush: a JSON
array of rows `[name, *fields]`, with the names of `RECORD_TYPES`. A line cut off by a crash is the
last one and lacks its newline; only the step that was running is lost with it.

Where the records of a rank are bounded they go into several such files, its segments
(`rrfp.trace.spill`): once a segment is long enough the next one begins, and the oldest is
removed. Every segment has the header, and begins with a flush of its own.

A writer holds a shared lock on its file as long as its process lives. So a reader knows whether the
run is still going, however it may end. The writer takes an exclusive lock and opens the file for
writing, too; a reader takes a shared one and only reads, so that it may be another user.
"""

import fcntl
import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, dropwhile, islice
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Kind
from rrfp.strict_json import parsed
from rrfp.trace.flight_record import FILE_BYTES
from rrfp.trace.perfetto.format import MOST_OF_A_KIND, bounds_of
from rrfp.trace.records import (
    EVALUATION,
    RECORD_TYPES,
    STEP,
    Phase,
    PhaseRecord,
    RankInfo,
    RankRecords,
    Record,
    is_evaluation,
    num_times,
    told_step,
)
from rrfp.trace.run_json import FIRST_KEPT_STEP, first_step_of
from rrfp.trace.safe_files import WholeLines, lines_of, make_directory, open_regular

# How much of a disk a run may take for what it records.


DEFAULT_TRACE_MB = 2048
LEAST_MB_OF_A_RANK = 8
"""Room for a rank's flight record, and for some steps."""
_TRACE_PER_RECORDS = 5
"""At most: a trace takes three to five times as much as the records that it is made of."""


def records_bytes(trace_mb: int | None, num_ranks: int) -> int:
    """The most bytes of records that each rank keeps, so that they and their trace, of which there
    are both for a moment, take `trace_mb` MiB in all. None means the default; a rank needs some
    room in any case."""
    least_mb = LEAST_MB_OF_A_RANK * num_ranks
    most_bytes = max(trace_mb or DEFAULT_TRACE_MB, least_mb) << 20
    return (most_bytes // num_ranks - FILE_BYTES) // (1 + _TRACE_PER_RECORDS)


# The files of records of a rank: `rank-N.jsonl`, and in a run whose records are bounded then
# `rank-N.2.jsonl` and so on, of which the oldest go (`rrfp.trace.spill`).


_NAME = re.compile(r"(rank-(\d+))(?:\.(\d+))?\.jsonl")


def segment_of(first: Path, number: int) -> Path:
    """The path of a rank's segment, counted from 1, by that of its first one."""
    return first if number == 1 else first.with_name(f"{first.stem}.{number}.jsonl")


def number_of(segment: Path) -> int:
    """The number of a segment, counted from 1."""
    match = _NAME.fullmatch(segment.name)
    return int(match[3] or 1) if match is not None else 1


def segments_in(records: Path) -> dict[int, list[Path]]:
    """The segments of each rank in a directory of records, by rank and in their order; empty where
    there is no such directory."""
    found: dict[int, list[Path]] = {}
    for path in _files_in(records):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[2]), []).append(path)
    return {rank: sorted(found[rank], key=number_of) for rank in sorted(found)}


def segment_after(segment: Path) -> Path | None:
    """The rank's next segment that is there; those between may have gone."""
    match = _NAME.fullmatch(segment.name)
    if match is None:
        return None
    following = segment.with_name(f"{match[1]}.{number_of(segment) + 1}.jsonl")
    if following.exists():
        return following
    if segment.exists():
        return None
    segments = segments_in(segment.parent).get(int(match[2]), [])
    return next((each for each in segments if number_of(each) > number_of(segment)), None)


def _files_in(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from directory.iterdir()


# The steps that a trace keeps of a run whose records are bounded: the last ones, each on all
# ranks.


DROPPED_STEPS = "dropped_steps"
"""In a trace's description: how many training steps of the session have gone, for room."""


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """What is kept: the training steps and the evaluations from these numbers on."""

    step: int
    evaluation: int

    def has(self, step: int) -> bool:
        _, number = told_step(step)
        return number >= (self.evaluation if is_evaluation(step) else self.step)

    def described(self, description: Mapping[str, Any]) -> dict[str, object]:
        """What the description of the trace says of it."""
        num_dropped = self.step - first_step_of(description)
        return {DROPPED_STEPS: num_dropped, FIRST_KEPT_STEP: self.step}


def kept_steps(ended: Sequence[Sequence[int]]) -> KeptSteps | None:
    """What is kept where these ranks have lost their first steps; `ended` are the steps that each
    still has the end of, in the order of the run. Each rank loses its own, so that what is kept
    begins with the first step that they all have. None if there is no such step: then all is."""
    if not ended:
        return None
    # What arrived early of a rank's first step was recorded with the step before, and is gone.
    shared = {*ended[0][1:]}.intersection(*(steps[1:] for steps in ended[1:]))
    kept = list(dropwhile(lambda step: step not in shared, ended[0]))
    if not kept:
        return None
    gone = ended[0][: -len(kept)]
    return KeptSteps(*(_first_of(sort, kept, gone) for sort in (STEP, EVALUATION)))


def _first_of(sort: str, kept: Iterable[int], gone: Iterable[int]) -> int:
    """The first number of a sort of step that is kept."""

    def numbers(steps: Iterable[int]) -> Iterator[int]:
        return (number for told, number in map(told_step, steps) if told == sort)

    first = min(numbers(kept), default=None)
    return max(numbers(gone), default=-1) + 1 if first is None else first


FORMAT = "rrfp records"
VERSION = 1

_BEGINNINGS = {record_type: (name,) for name, record_type in RECORD_TYPES.items()}
_FIELD_TYPES = {
    name: tuple(record_type.__annotations__[field] for field in record_type._fields)
    for name, record_type in RECORD_TYPES.items()
}
_DEFAULTS = {
    name: tuple(record_type._field_defaults.values()) for name, record_type in RECORD_TYPES.items()
}
"""Of the last fields of each type, which rows of earlier versions lack."""
_new: Any = tuple.__new__
_MOST_CLOCK_NS = 1 << 62
"""Of a rank's own clock, which may have run since long before the run."""
_MOST_TIME_NS = bounds_of("end_ns")[1]
_BOUNDS = {
    name: tuple(
        (index, field, *bounds_of(field))
        for index, field in enumerate(record_type._fields)
        if record_type.__annotations__[field] is int and index >= num_times(record_type)
    )
    for name, record_type in RECORD_TYPES.items()
}
"""Of the numbers of each type that are not times."""
_KIND_AT = {
    name: record_type._fields.index("kind")
    for name, record_type in RECORD_TYPES.items()
    if "kind" in record_type._fields
}
_KINDS = {*Kind, ""}
"""A stimulus may be of no task."""
_encode = json.JSONEncoder(separators=(",", ":")).encode

NUM_SEGMENTS = 8
"""Of a rank whose records are bounded. With more of them, less is removed at a time."""

_NUM_ROWS_OF_A_BATCH = 1000
"""Rows encoded per call. A call costs as much as ten rows; larger batches gain nothing."""

_NUM_BYTES_READ = 1 << 16
"""At a time, and one line at least."""

_MOST_HELD_S = 2.0
_RETRY_S = 0.001

Row = tuple[str | int, ...]
"""A record's name and its fields."""


def row_of(record: Record) -> Row:
    """The record as it is written: a plain tuple, which the garbage collector stops tracking. It
    would scan a million named tuples again and again."""
    return _BEGINNINGS[type(record)] + record


def step_of(row: Row) -> int:
    """The step of a record as it is written."""
    return int(row[1 + RECORD_TYPES[str(row[0])]._fields.index("step")])


class SpillWriter:
    """Appends flushes to a new spill file, or to a rank's segments. Every method may raise
    OSError."""

    def __init__(self, path: Path, info: RankInfo, most_bytes: int | None = None) -> None:
        """With `most_bytes`, at most so many are kept, and the last segment at least."""
        make_directory(path.parent)
        self._first = path
        self._most_bytes = most_bytes
        self._header = _header(info)
        self._number = 1
        self._older: deque[tuple[Path, int]] = deque()
        """The segments before this one that are there, each with its size."""
        self._file = self._begin()
        self._separator = "["

    def append(self, rows: Iterable[Row]) -> None:
        """Add records to the current flush, as the iterator yields them."""
        remaining = iter(rows)
        while batch := list(islice(remaining, _NUM_ROWS_OF_A_BATCH)):
            self._file.write(f"{self._separator}{_encode(batch)[1:-1]}".encode())
            self._separator = ","

    def flush(self) -> None:
        """End the current flush and pass it to the operating system; an empty one has no line."""
        if self._separator == ",":
            self._file.write(b"]\n")
            self._file.end()
            self._separator = "["
            if self._most_bytes is not None:
                self._keep_within(self._most_bytes)

    def close(self) -> None:
        """Take back a flush that was not ended, and close; closing twice is harmless."""
        if not self._file.is_closed:
            self._file.take_back()
            _close(self._file)

    def _begin(self) -> WholeLines:
        file = WholeLines(segment_of(self._first, self._number), anew=True)
        hold(file)
        file.write(self._header)
        file.end()
        return file

    def _keep_within(self, most_bytes: int) -> None:
        """Begin the next segment if this one is long, and remove the oldest ones beyond the
        bound."""
        size, share = self._file.num_bytes, most_bytes // NUM_SEGMENTS
        if size >= share:
            last, self._number = self._file, self._number + 1
            # Held before the last one is left: somebody may ask whether the rank still writes.
            self._file = self._begin()
            _close(last)
            self._older.append((segment_of(self._first, self._number - 1), size))
        while self._older and sum(each for _, each in self._older) + share > most_bytes:
            oldest, _ = self._older.popleft()
            oldest.unlink(missing_ok=True)


def _header(info: RankInfo) -> bytes:
    told = {"format": FORMAT, "version": VERSION, "rank": asdict(info)}
    return f"{_encode(told)}\n".encode()


def _close(file: WholeLines) -> None:
    # A process forked meanwhile also has the file open, and would keep the lock.
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


class Held(Protocol):
    """An open file with a name."""

    @property
    def name(self) -> Any: ...
    def fileno(self) -> int: ...


def hold(file: Held) -> None:
    """Mark an open file as being written, until it is closed or its process ends.

    Whoever asks whether it is has it for a moment only. Raises TimeoutError if somebody else keeps
    it for longer.
    """
    until = time.monotonic() + _MOST_HELD_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another process holds {file.name}") from None
            time.sleep(_RETRY_S)
        else:
            return


def is_being_written(path: Path) -> bool:
    """Whether a process is alive that still writes this file, which it holds (`hold`). Several may
    ask at once. Nobody writes a file that is not there.

    May raise OSError.
    """
    with suppress(FileNotFoundError), open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_spill(path: Path) -> RankRecords | None:
    """Everything in a spill file, on the rank's own clock.

    None if the rank died before its header was complete. Raises RrfpError, with the line, for any
    corruption other than a torn last line.
    """
    lines = iter_lines(path)
    first = next(lines, None)
    if first is None:
        return None
    records = RankRecords(header_of(path, first.value))
    lists = records.by_name()
    for line in lines:
        add_flush(path, line.number, line.value, lists)
    return records


class Line(NamedTuple):
    """A decoded line of a spill file."""

    number: int
    """Counted from 1."""
    value: Any


def iter_lines(path: Path) -> Iterator[Line]:
    """The lines of a spill file, up to one that is torn at its end. Raises RrfpError for one that
    is not JSON, and OSError."""
    offset = number = 0
    while True:
        # Open for some lines at a time, for there may be more ranks than files may be open.
        with open_regular(path) as file:
            file.seek(offset)
            lines = [*lines_of(file, path, _NUM_BYTES_READ)]
            offset = file.tell()
        if not lines:
            return
        for line in lines:
            number += 1
            try:
                yield Line(number, parsed(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise _corrupt(path, number, "is not JSON") from error


def header_of(path: Path, value: Any) -> RankInfo:
    """Who records, from the decoded first line. Raises RrfpError for anything else."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _corrupt(path, 1, "is not the header of a records file")
    if value.get("version") != VERSION:
        raise _corrupt(path, 1, f"has version {value.get('version')} and not {VERSION}")
    try:
        info = RankInfo(**{**value["rank"], "stages": tuple(value["rank"]["stages"])})
    except (KeyError, TypeError) as error:
        raise _corrupt(path, 1, "does not say which rank wrote it") from error
    if not _is_possible(info):
        raise _corrupt(path, 1, f"names a rank that cannot be: {str(value['rank'])[:60]}")
    return info


def _is_possible(info: RankInfo) -> bool:
    """Whether all fields are of their types, and within what any run has."""
    places = (info.rank, info.pp_rank, info.tp_rank, info.dp_rank, *info.stages)
    clocks_ns = (info.clock_offset_ns, info.clock_error_ns)
    return (
        all(type(each) is int for each in (*places, *clocks_ns, info.pid))
        and type(info.host) is str
        and all(0 <= place < MOST_OF_A_KIND for place in places)
        and all(abs(each) < _MOST_CLOCK_NS for each in (*clocks_ns, info.pid))
    )


def add_flush(path: Path, number: int, value: Any, lists: dict[str, list[Any]]) -> None:
    """Add the records of a decoded line, counted from 1, to the lists of their types
    (`RankRecords.by_name`). Raises RrfpError for what is no flush."""
    if not isinstance(value, list):
        raise _corrupt(path, number, "is not a list of records")
    found: dict[str, list[Any]] = {}
    for row in value:
        try:
            name, fields = row[0], row[1:]
            types = _FIELD_TYPES[name]
        except (TypeError, LookupError):
            raise _corrupt(
                path, number, f"has a row that is not a record: {str(row)[:60]}"
            ) from None
        num_missing = len(types) - len(fields)
        if 0 < num_missing <= len(_DEFAULTS[name]):
            fields += _DEFAULTS[name][-num_missing:]
        if tuple(map(type, fields)) != types:
            raise _corrupt(path, number, f"has a '{name}' with wrong fields: {str(row)[:60]}")
        # Their number is right, which is all that the type's own constructor would see to.
        found.setdefault(name, []).append(_new(RECORD_TYPES[name], fields))
    for name, records in found.items():
        problem = _impossible(name, records)
        if problem:
            raise _corrupt(path, number, f"has a '{name}' {problem}")
        lists[name] += records


def _impossible(name: str, records: list[Any]) -> str:
    """What no record of that type can hold and one of these does; empty if there is nothing. Looks
    at a column at a time, for a record at a time would take as long as reading it."""
    columns = tuple(zip(*records, strict=True))
    for index, field, least, most in _BOUNDS[name]:
        for value in (min(columns[index]), max(columns[index])):
            if not least <= value <= most:
                return f"whose {field} is {value}"
    if name in _KIND_AT:
        unknown = set(columns[_KIND_AT[name]]) - _KINDS
        if unknown:
            return f"of the kind {min(unknown)[:20]!r}"
    first_ns, last_ns = min(columns[0]), max(columns[0])
    if num_times(RECORD_TYPES[name]) == 2:
        if any(map(gt, columns[0], columns[1])):
            return "that ends before it begins"
        last_ns = max(columns[1])
    if max(-first_ns, last_ns) > _MOST_CLOCK_NS or last_ns - first_ns > _MOST_TIME_NS:
        return f"at a time that no clock shows: {first_ns if -first_ns > last_ns else last_ns} ns"
    return ""


def _corrupt(path: Path, number: int, fact: str) -> RrfpError:
    return RrfpError(f"{path}, line {number} {fact}; remove this file to read the other ranks")


# What one rank has spilled, read without keeping it: once for what must be known first, and once
# for the records.


_Flush = tuple[Path, int, Any]
"""A line with the file and the number that name it in an error."""

_PHASE = next(name for name, each in RECORD_TYPES.items() if each is PhaseRecord)
_STEP_OF_PHASE, _NAME_OF_PHASE = (1 + PhaseRecord._fields.index(f) for f in ("step", "phase"))
_TIME = 1
_END = {name: num_times(each) for name, each in RECORD_TYPES.items()}
"""The place of the last time in a row of each type, whose first entry is its name."""


class SpilledRank:
    """The segments of one rank. Every method may raise OSError, and RrfpError for a damaged
    file."""

    def __init__(self, info: RankInfo, segments: Sequence[Path]) -> None:
        self.info = info
        self._segments = segments
        self.first_ns: int | None = None
        """When its first record began, on its own clock; None without any. Of all that `survey`
        finds."""
        self.last_ns = 0
        """When its last record ended."""
        self.num_bytes = sum(path.stat().st_size for path in segments)
        self.num_flushes = 0
        self.ended_steps: list[int] = []
        """The steps that it ended, in their order, if earlier ones were removed; else empty."""

    @classmethod
    def of(cls, segments: Sequence[Path]) -> Self | None:
        """The rank with these segments; None if it died before its header was complete."""
        for path in segments:
            for line in iter_lines(path):
                return cls(header_of(path, line.value), segments)
        return None

    @property
    def begins_late(self) -> bool:
        """Whether earlier segments were removed."""
        return number_of(self._segments[0]) > 1

    def survey(self, num_recent: int) -> RankRecords:
        """Find out what there is; returns the last records, at least so many."""
        recent: deque[_Flush] = deque()
        num_rows = 0
        for flush in self._flushes():
            *_, rows = flush
            self._take(flush)
            if num_recent:
                recent.append(flush)
                num_rows += len(rows)
                while num_rows - len(recent[0][-1]) >= num_recent:
                    num_rows -= len(recent.popleft()[-1])
        return self._records(recent)

    def parts(self, num_flushes: int) -> Iterator[RankRecords]:
        """The records of so many flushes at a time."""
        flushes = self._flushes()
        while part := list(islice(flushes, num_flushes)):
            yield self._records(part)

    def _flushes(self) -> Iterator[_Flush]:
        return chain.from_iterable(map(_flushes_of, self._segments))

    def _take(self, flush: _Flush) -> None:
        *_, rows = flush
        found = _told_in(rows)
        if found is None:
            # This says what is wrong with it, and takes an empty one for what it is.
            self._records([flush])
            return
        first_ns, last_ns, ended_steps = found
        self.num_flushes += 1
        self.first_ns = first_ns if self.first_ns is None else min(first_ns, self.first_ns)
        self.last_ns = max(last_ns, self.last_ns)
        if self.begins_late:
            self.ended_steps += ended_steps

    def _records(self, flushes: Sequence[_Flush] | deque[_Flush]) -> RankRecords:
        records = RankRecords(self.info)
        lists = records.by_name()
        for path, number, value in flushes:
            add_flush(path, number, value, lists)
        return records


def _told_in(rows: Any) -> tuple[int, int, list[int]] | None:
    """The first and the last time in a flush, and the steps that it ends; None for an empty one,
    and for what is none."""
    try:
        first_ns = min(row[_TIME] for row in rows)
        last_ns = max(row[_END[row[0]]] for row in rows)
        ended_steps = [
            row[_STEP_OF_PHASE]
            for row in rows
            if row[0] == _PHASE and row[_NAME_OF_PHASE] == Phase.SCHEDULE
        ]
    except (TypeError, LookupError, ValueError):
        return None
    is_of_numbers = all(type(each) is int for each in (first_ns, last_ns, *ended_steps))
    return (first_ns, last_ns, ended_steps) if is_of_numbers else None


def _flushes_of(path: Path) -> Iterator[_Flush]:
    for line in islice(iter_lines(path), 1, None):
        yield path, line.number, line.value
