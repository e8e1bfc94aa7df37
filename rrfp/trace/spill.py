"""A rank's own append-only file of records, `records/rank-<N>.jsonl`.

The first line is a header: format, version and the rank that records. Every further line is one
flush: a JSON array of rows `[name, *fields]`, with the names of `RECORD_TYPES`. A crash may cut off
the last line, which then lacks its newline; only the records of the running step are lost.

If the size of a rank's records is limited, they go into several such files, its segments. When a
segment is long enough the writer begins the next one and removes the oldest. Every segment has the
header, and begins with a new flush.

A writer locks its file exclusively until its process ends, so a reader can find out whether the run
is still going, however it ends. A reader only needs a shared lock and read access, so it may be
another user.
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
    split_step,
)
from rrfp.trace.run_json import FIRST_KEPT_STEP, first_step_of
from rrfp.trace.safe_files import WholeLines, lines_of, make_directory, open_regular

# The disk budget of a run's records and trace.


DEFAULT_TRACE_MB = 2048
LEAST_MB_OF_A_RANK = 8
"""The least budget of a rank in MiB: its flight record, and some steps."""
_TRACE_PER_RECORDS = 5
"""The most bytes of trace per byte of records; measured ratios are 3 to 5."""


def records_bytes(trace_mb: int | None, num_ranks: int) -> int:
    """The limit on each rank's records in bytes, without its flight record, such that the records
    and the trace made of them, which exist together for a moment, take `trace_mb` MiB (None: the
    default) in all. A rank gets at least `LEAST_MB_OF_A_RANK`."""
    least_mb = LEAST_MB_OF_A_RANK * num_ranks
    most_bytes = max(trace_mb or DEFAULT_TRACE_MB, least_mb) << 20
    return (most_bytes // num_ranks - FILE_BYTES) // (1 + _TRACE_PER_RECORDS)


# The segments of a rank: `rank-N.jsonl`, `rank-N.2.jsonl` and so on, of which the oldest are
# removed.


_NAME = re.compile(r"(rank-(\d+))(?:\.(\d+))?\.jsonl")


def segment_path(first: Path, number: int) -> Path:
    """The path of a rank's segment by its number, counted from 1; `first` is the first one's
    path."""
    return first if number == 1 else first.with_name(f"{first.stem}.{number}.jsonl")


def segment_number(segment: Path) -> int:
    """The number of a segment, counted from 1; 1 for any other name too."""
    match = _NAME.fullmatch(segment.name)
    return int(match[3] or 1) if match is not None else 1


def segments_in(records: Path) -> dict[int, list[Path]]:
    """The segments of each rank in a directory of records, by rank and in their order; empty
    without such a directory."""
    found: dict[int, list[Path]] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in records.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.setdefault(int(match[2]), []).append(path)
    return {rank: sorted(found[rank], key=segment_number) for rank in sorted(found)}


def segment_after(segment: Path) -> Path | None:
    """The rank's next segment that exists; if `segment` was removed, those after it may be missing
    too and are passed over. None without a later one, or for a name that is not a segment's."""
    match = _NAME.fullmatch(segment.name)
    if match is None:
        return None
    following = segment.with_name(f"{match[1]}.{segment_number(segment) + 1}.jsonl")
    if following.exists():
        return following
    if segment.exists():
        return None
    segments = segments_in(segment.parent).get(int(match[2]), [])
    return next((each for each in segments if segment_number(each) > segment_number(segment)), None)


# The steps in the trace of a run that removed old records: the last ones, each on all ranks.


DROPPED_STEPS = "dropped_steps"
"""In a trace's description: the number of the session's training steps whose records were removed
to stay within the disk budget."""


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The recorded steps: all training steps and all evaluations from these numbers on."""

    step: int
    evaluation: int

    def has(self, step: int) -> bool:
        """True if a step is one of the recorded ones."""
        _, number = split_step(step)
        return number >= (self.evaluation if is_evaluation(step) else self.step)

    def described(self, description: Mapping[str, Any]) -> dict[str, object]:
        """The entries to add to the description of the trace: the first kept training step, and the
        number of the session's steps before it."""
        num_dropped = self.step - first_step_of(description)
        return {DROPPED_STEPS: num_dropped, FIRST_KEPT_STEP: self.step}


def steps_on_all_ranks(ended: Sequence[Sequence[int]]) -> RecordedSteps | None:
    """The steps that all ranks still have, if some removed their first steps: all from the first
    shared one on. None, for all steps, without a shared step or without such ranks. `ended` has,
    for each of those ranks, the steps whose ends it still has, in the order of the run; the first
    of them is never a shared one."""
    if not ended:
        return None
    # Early messages of a rank's first step were recorded with the step before, and are removed.
    shared = {*ended[0][1:]}.intersection(*(steps[1:] for steps in ended[1:]))
    kept = list(dropwhile(lambda step: step not in shared, ended[0]))
    if not kept:
        return None
    gone = ended[0][: -len(kept)]
    return RecordedSteps(*(_first_of(sort, kept, gone) for sort in (STEP, EVALUATION)))


def _first_of(sort: str, kept: Iterable[int], gone: Iterable[int]) -> int:
    """The first recorded number of a sort of steps (training steps or evaluations); if none was
    kept, the one after the last that is gone."""

    def numbers(steps: Iterable[int]) -> Iterator[int]:
        return (number for each, number in map(split_step, steps) if each == sort)

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
"""The defaults of each type's last fields, which rows of earlier versions lack."""
_new: Any = tuple.__new__
_MOST_CLOCK_NS = 1 << 62
"""The greatest time on a rank's own clock, which may have started long before the run."""
_MOST_TIME_NS = bounds_of("end_ns")[1]
_BOUNDS = {
    name: tuple(
        (index, field, *bounds_of(field))
        for index, field in enumerate(record_type._fields)
        if record_type.__annotations__[field] is int and index >= num_times(record_type)
    )
    for name, record_type in RECORD_TYPES.items()
}
"""For each type: index, name, least and greatest value of its numbers other than times."""
_KIND_AT = {
    name: record_type._fields.index("kind")
    for name, record_type in RECORD_TYPES.items()
    if "kind" in record_type._fields
}
_KINDS = {*Kind, ""}
"""The allowed kinds; empty for a stimulus without a task."""
_encode = json.JSONEncoder(separators=(",", ":")).encode

NUM_SEGMENTS = 8
"""The number of segments of a rank whose records are limited. More segments are smaller ones, so
that less is removed at a time."""

_NUM_ROWS_OF_A_BATCH = 1000
"""Rows encoded per call. A call costs as much as ten rows; larger batches gain nothing."""

_NUM_BYTES_READ = 1 << 16
"""Bytes read at a time, if they hold at least one line."""

_MOST_HELD_S = 2.0
_RETRY_S = 0.001

Row = tuple[str | int, ...]
"""A record's name and its fields."""


def row_of(record: Record) -> Row:
    """The record as a row to write: a plain tuple, which the garbage collector stops tracking. It
    would scan a million named tuples repeatedly."""
    return _BEGINNINGS[type(record)] + record


def step_of(row: Row) -> int:
    """The step of a row."""
    return int(row[1 + RECORD_TYPES[str(row[0])]._fields.index("step")])


class SpillWriter:
    """Appends flushes to a new spill file, or to a rank's segments. Every method may raise
    OSError."""

    def __init__(self, path: Path, info: RankInfo, most_bytes: int | None = None) -> None:
        """With `most_bytes`, remove the oldest segments beyond this total size, except the last
        one."""
        make_directory(path.parent)
        self._first = path
        self._most_bytes = most_bytes
        self._header = _header(info)
        self._number = 1
        self._older: deque[tuple[Path, int]] = deque()
        """The existing segments before the current one, each with its size in bytes."""
        self._file = self._begin()
        self._separator = "["

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows to the current flush, in batches, as the iterator yields them."""
        remaining = iter(rows)
        while batch := list(islice(remaining, _NUM_ROWS_OF_A_BATCH)):
            self._file.write(f"{self._separator}{_encode(batch)[1:-1]}".encode())
            self._separator = ","

    def flush(self) -> None:
        """End the current flush and pass it to the operating system; an empty flush writes nothing.
        If the size is limited, it may also begin the next segment and remove the oldest ones."""
        if self._separator == ",":
            self._file.write(b"]\n")
            self._file.end()
            self._separator = "["
            if self._most_bytes is not None:
                self._keep_within(self._most_bytes)

    def close(self) -> None:
        """Remove a flush that was not ended, unlock the file and close it; closing twice is
        harmless."""
        if not self._file.is_closed:
            self._file.discard_partial()
            _close(self._file)

    def _begin(self) -> WholeLines:
        """Create (or empty) the current segment, lock it, and write its header."""
        file = WholeLines(segment_path(self._first, self._number), truncate=True)
        lock_for_writing(file)
        file.write(self._header)
        file.end()
        return file

    def _keep_within(self, most_bytes: int) -> None:
        """Begin the next segment if this one has an eighth of the bound, and remove the oldest ones
        while all might exceed it. The current segment is never removed."""
        size, share = self._file.num_bytes, most_bytes // NUM_SEGMENTS
        if size >= share:
            last, self._number = self._file, self._number + 1
            # Lock it before unlocking the last one, as others may check whether the rank still
            # writes.
            self._file = self._begin()
            _close(last)
            self._older.append((segment_path(self._first, self._number - 1), size))
        while self._older and sum(each for _, each in self._older) + share > most_bytes:
            oldest, _ = self._older.popleft()
            oldest.unlink(missing_ok=True)


def _header(info: RankInfo) -> bytes:
    """The first line of a spill file: format, version and rank."""
    content = {"format": FORMAT, "version": VERSION, "rank": asdict(info)}
    return f"{_encode(content)}\n".encode()


def _close(file: WholeLines) -> None:
    """Unlock and close a file. Closing alone does not unlock it, if a forked process has it open
    too."""
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


class LockableFile(Protocol):
    """An open file with a name."""

    @property
    def name(self) -> Any: ...
    def fileno(self) -> int: ...


def lock_for_writing(file: LockableFile) -> None:
    """Lock an open file exclusively, which marks it as being written until it is closed or this
    process ends. Waits for readers that check it. Raises TimeoutError if another process holds the
    lock for 2 s."""
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
    """True if a living process writes this file and so has it locked (`lock_for_writing`); False
    for a missing file. Takes a shared lock for a moment. May raise OSError."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Line(NamedTuple):
    """A decoded line of a spill file."""

    number: int
    """Counted from 1."""
    value: Any


def iter_lines(path: Path) -> Iterator[Line]:
    """Yield the decoded lines of a spill file, without a torn last one. The file is opened for some
    lines at a time. Raises RrfpError for a line that is not JSON, and OSError."""
    offset = number = 0
    while True:
        # Open the file for some lines at a time: there may be more ranks than a process may open
        # files.
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
    """The rank that records, from the decoded first line. Raises RrfpError for an invalid
    header."""
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
    """True if all fields have the right types, and values that a run can have."""
    places = (info.rank, info.pp_rank, info.tp_rank, info.dp_rank, *info.stages)
    clocks_ns = (info.clock_offset_ns, info.clock_error_ns)
    return (
        all(type(each) is int for each in (*places, *clocks_ns, info.pid))
        and type(info.host) is str
        and all(0 <= place < MOST_OF_A_KIND for place in places)
        and all(abs(each) < _MOST_CLOCK_NS for each in (*clocks_ns, info.pid))
    )


def add_flush(path: Path, number: int, value: Any, lists: dict[str, list[Any]]) -> None:
    """Add the records of line `number`, counted from 1, to the lists of their types
    (`RankRecords.by_name`). `value` is the decoded line; fields that earlier versions lack get
    their defaults. Raises RrfpError if it is not a valid flush."""
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
        # Skip the type's constructor, which only checks the number of fields.
        found.setdefault(name, []).append(_new(RECORD_TYPES[name], fields))
    for name, records in found.items():
        problem = _impossible(name, records)
        if problem:
            raise _corrupt(path, number, f"has a '{name}' {problem}")
        lists[name] += records


def _impossible(name: str, records: list[Any]) -> str:
    """Describe an impossible value in these records of one type; empty if all are possible. Checks
    column by column, because record by record would take as long as reading them."""
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
    """The error for an invalid line of a spill file; `fact` is the rest of the sentence."""
    return RrfpError(f"{path}, line {number} {fact}; remove this file to read the other ranks")


# The segments of one rank, read twice without holding them in memory: once for an overview, and
# once for the records.


_Flush = tuple[Path, int, Any]
"""A decoded line, after the file and the line number to name in an error."""

_PHASE = next(name for name, each in RECORD_TYPES.items() if each is PhaseRecord)
_STEP_OF_PHASE, _NAME_OF_PHASE = (1 + PhaseRecord._fields.index(f) for f in ("step", "phase"))
_TIME = 1
_END = {name: num_times(each) for name, each in RECORD_TYPES.items()}
"""The index of the last time in a row of each type; index 0 is the type's name."""


class SpilledRank:
    """The segments of one rank. Methods that read them may raise OSError, and RrfpError for a
    damaged file."""

    def __init__(self, info: RankInfo, segments: Sequence[Path]) -> None:
        self.info = info
        self._segments = segments
        self.first_ns: int | None = None
        """The start of its first record on its own clock; None without records. `survey` sets
        it."""
        self.last_ns = 0
        """The end of its last record. `survey` sets it."""
        self.num_bytes = sum(path.stat().st_size for path in segments)
        self.num_flushes = 0
        self.ended_steps: list[int] = []
        """The steps that it ended, in order, if earlier segments were removed; else empty."""

    @classmethod
    def of(cls, segments: Sequence[Path]) -> Self | None:
        """The rank with these segments; None if none of them has a complete header, as its process
        died before that. Raises RrfpError for an invalid header."""
        for path in segments:
            for line in iter_lines(path):
                return cls(header_of(path, line.value), segments)
        return None

    @property
    def begins_late(self) -> bool:
        """True if earlier segments were removed."""
        return segment_number(self._segments[0]) > 1

    def survey(self, num_recent: int) -> RankRecords:
        """Read all segments and set this object's times, `num_flushes` and `ended_steps`. Returns
        the last records: at least `num_recent`, if there are as many; none if that is 0."""
        recent: deque[_Flush] = deque()
        num_rows = 0
        for flush in self._flushes():
            *_, rows = flush
            self._survey(flush)
            if num_recent:
                recent.append(flush)
                num_rows += len(rows)
                while num_rows - len(recent[0][-1]) >= num_recent:
                    num_rows -= len(recent.popleft()[-1])
        return self._records(recent)

    def parts(self, num_flushes: int) -> Iterator[RankRecords]:
        """Yield the records of `num_flushes` flushes at a time, read from the segments again."""
        flushes = self._flushes()
        while part := list(islice(flushes, num_flushes)):
            yield self._records(part)

    def _flushes(self) -> Iterator[_Flush]:
        """Yield the flushes of all segments in order."""
        return chain.from_iterable(map(_flushes_of, self._segments))

    def _survey(self, flush: _Flush) -> None:
        """Update this object's times, `num_flushes` and `ended_steps` by one flush; an empty one
        changes nothing. Raises RrfpError if it is damaged."""
        *_, rows = flush
        found = _summary_of(rows)
        if found is None:
            # Decode it fully, which raises the right error unless it is just empty.
            self._records([flush])
            return
        first_ns, last_ns, ended_steps = found
        self.num_flushes += 1
        self.first_ns = first_ns if self.first_ns is None else min(first_ns, self.first_ns)
        self.last_ns = max(last_ns, self.last_ns)
        if self.begins_late:
            self.ended_steps += ended_steps

    def _records(self, flushes: Sequence[_Flush] | deque[_Flush]) -> RankRecords:
        """Decode these flushes into records of this rank. Raises RrfpError if one is damaged."""
        records = RankRecords(self.info)
        lists = records.by_name()
        for path, number, value in flushes:
            add_flush(path, number, value, lists)
        return records


def _summary_of(rows: Any) -> tuple[int, int, list[int]] | None:
    """The first and the last time in a flush, and the steps whose `SCHEDULE` phase it has; None for
    an empty or invalid flush."""
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
    """The lines of a segment after its header."""
    for line in islice(iter_lines(path), 1, None):
        yield path, line.number, line.value
