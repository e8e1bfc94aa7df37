"""A rank's own append-only file of records, `records/rank-<N>.jsonl`.

The first line is a header: format, version and who records. Every further line is one flush: a JSON
array of rows `[name, *fields]`, with the names of `RECORD_TYPES`. A line that a crash tore is the
last one and lacks its newline; it held the step that was running, which is lost, and nothing else.

A writer holds a shared lock on its file for as long as its process lives, so that a reader can tell
a run that goes on from one that has ended, however it ended. Both open the file for reading and for
writing: NFS gives a shared lock to readers only and an exclusive one to writers only.
"""

import fcntl
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.records import RECORD_TYPES, RankInfo, RankRecords, Record

FORMAT = "rrfp records"
VERSION = 1

_NAMES = {record_type: name for name, record_type in RECORD_TYPES.items()}
_FIELD_TYPES = {
    name: tuple(record_type.__annotations__[field] for field in record_type._fields)
    for name, record_type in RECORD_TYPES.items()
}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode_rows(records: Iterable[Record]) -> list[str]:
    """Each record as one JSON row."""
    return [_encode((_NAMES[type(record)], *record)) for record in records]


class SpillWriter:
    """Appends flushes to a new spill file. Every method may raise OSError."""

    def __init__(self, path: Path, info: RankInfo) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._write({"format": FORMAT, "version": VERSION, "rank": asdict(info)})

    def append(self, rows: Iterable[str]) -> None:
        """Write one flush of encoded rows and hand it to the operating system."""
        self._write_line(f"[{','.join(rows)}]\n")

    def close(self) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        self._write_line(_encode(value) + "\n")

    def _write_line(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()


def is_being_written(path: Path) -> bool:
    """Whether the process that writes a spill file is still alive and has not closed it.

    May raise OSError.
    """
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_spill(path: Path) -> RankRecords | None:
    """Everything in a spill file, on the rank's own clock.

    None when the rank died before its header was whole. Raises RrfpError, with the line, for
    anything corrupt but a torn last line.
    """
    with path.open("rb") as file:
        records = None
        for number, line in enumerate(file, start=1):
            try:
                value = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise _corrupt(path, number, "is not JSON") from error
            if records is None:
                records = RankRecords(_read_header(path, value))
                lists = records.by_name()
            else:
                _read_flush(path, number, value, lists)
        return records


def _read_header(path: Path, value: Any) -> RankInfo:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _corrupt(path, 1, "is not the header of a records file")
    if value.get("version") != VERSION:
        raise _corrupt(path, 1, f"has version {value.get('version')} and not {VERSION}")
    try:
        return RankInfo(**{**value["rank"], "stages": tuple(value["rank"]["stages"])})
    except (KeyError, TypeError) as error:
        raise _corrupt(path, 1, "does not say which rank wrote it") from error


def _read_flush(path: Path, number: int, value: Any, lists: dict[str, list[Any]]) -> None:
    if not isinstance(value, list):
        raise _corrupt(path, number, "is not a list of records")
    for row in value:
        name = row[0] if isinstance(row, list) and row else None
        if not isinstance(name, str) or name not in RECORD_TYPES:
            raise _corrupt(path, number, f"has a row that is no record: {str(row)[:60]}")
        fields = row[1:]
        if tuple(map(type, fields)) != _FIELD_TYPES[name]:
            raise _corrupt(path, number, f"has a '{name}' with wrong fields: {str(row)[:60]}")
        lists[name].append(RECORD_TYPES[name](*fields))


def _corrupt(path: Path, number: int, fact: str) -> RrfpError:
    return RrfpError(f"{path}, line {number} {fact}; remove this file to read the other ranks")
