"""A rank's own append-only file of records, `records/rank-<N>.jsonl`.

The first line is a header: format, version and who records. Every further line is one flush: a JSON
array of rows `[name, *fields]`, with the names of `RECORD_TYPES`. A line cut off by a crash or a
full disk is the last one and lacks its newline; only the step that was running is lost with it.

A writer holds a shared lock on its file as long as its process lives. So a reader knows whether the
run is still going, however it may end. Both open the file for reading and writing, because NFS
grants shared locks only to readers and exclusive ones only to writers.
"""

import fcntl
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from operator import gt
from pathlib import Path
from typing import IO, Any

from rrfp.errors import RrfpError
from rrfp.json_text import parsed
from rrfp.schedule.tasks import Kind
from rrfp.trace.perfetto.format import MOST_OF_A_KIND, bounds_of
from rrfp.trace.records import RECORD_TYPES, RankInfo, RankRecords, Record, num_times

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

_NUM_ROWS_OF_A_BATCH = 1000
"""Rows encoded per call. A call costs as much as ten rows; larger batches gain nothing."""

_MOST_HELD_S = 2.0
_RETRY_S = 0.001

Row = tuple[str | int, ...]
"""A record's name and its fields."""


def row_of(record: Record) -> Row:
    """The record as it is written: a plain tuple, which the garbage collector stops tracking. It
    would scan a million named tuples again and again."""
    return _BEGINNINGS[type(record)] + record


class SpillWriter:
    """Appends flushes to a new spill file. Every method may raise OSError."""

    def __init__(self, path: Path, info: RankInfo) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+", encoding="utf-8")
        hold(self._file)
        self._file.write(_encode({"format": FORMAT, "version": VERSION, "rank": asdict(info)}))
        self._file.write("\n")
        self._file.flush()
        self._separator = "["

    def append(self, rows: Iterable[Row]) -> None:
        """Add records to the current flush, as the iterator yields them."""
        remaining = iter(rows)
        while batch := list(islice(remaining, _NUM_ROWS_OF_A_BATCH)):
            self._file.write(self._separator)
            self._file.write(_encode(batch)[1:-1])
            self._separator = ","

    def flush(self) -> None:
        """End the current flush and pass it to the operating system; an empty one has no line."""
        if self._separator == ",":
            self._file.write("]\n")
            self._file.flush()
            self._separator = "["

    def close(self) -> None:
        """Closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self._file.flush()
        finally:
            # A process forked meanwhile also has the file open, and would keep the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def hold(file: IO[Any]) -> None:
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
    ask at once.

    May raise OSError.
    """
    with path.open("r+b") as file:
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
    with path.open("rb") as file:
        records = None
        for number, line in enumerate(file, start=1):
            try:
                value = parsed(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise _corrupt(path, number, "is not JSON") from error
            if records is None:
                records = RankRecords(header_of(path, value))
                lists = records.by_name()
            else:
                add_flush(path, number, value, lists)
        return records


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
        and isinstance(info.host, str)
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
        name = row[0] if isinstance(row, list) and row else None
        if not isinstance(name, str) or name not in RECORD_TYPES:
            raise _corrupt(path, number, f"has a row that is not a record: {str(row)[:60]}")
        fields = row[1:]
        num_missing = len(_FIELD_TYPES[name]) - len(fields)
        if 0 < num_missing <= len(_DEFAULTS[name]):
            fields += _DEFAULTS[name][-num_missing:]
        if tuple(map(type, fields)) != _FIELD_TYPES[name]:
            raise _corrupt(path, number, f"has a '{name}' with wrong fields: {str(row)[:60]}")
        found.setdefault(name, []).append(RECORD_TYPES[name](*fields))
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
