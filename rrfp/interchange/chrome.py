"""Writes a recording as Chrome trace events, for viewers and scripts that read these.

A pipeline is a process, and each track of a stage is a thread of it. Times are microseconds with
fractions. A message's arrow goes from its send through its receive to the task that consumes it.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.format import (
    assign_rows,
    counters_of,
    key_of,
    received_by,
    sent_by,
    stage_name,
    stage_path,
    task_name,
    task_title,
)
from rrfp.trace.records import STEP, RankRecords, Recording, split_step
from rrfp.trace.safe_files import open_whole

_NS_PER_US = 1_000
_Event = dict[str, object]

_TRACKS = {
    "task": "compute",
    "wait": "wait",
    "agreement": "agreement",
    "send": "send",
    "receive": "receive",
    "phase": "phases",
    "stimulus": "stimuli",
    "cost": "recording",
    "loss": "recording",
}
"""The name of the track of each record type, in the order in which they are shown."""
_OTHERS = tuple(category for category in _TRACKS if category not in ("send", "receive"))


def write_chrome(path: Path, recording: Recording) -> None:
    """Write a recording atomically as one JSON file, compressed if its name ends in .gz. Activities
    that were never ended are left out. Raises RrfpError if the file cannot be written."""
    try:
        with open_whole(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    packed.writelines(_lines(recording))
            else:
                file.writelines(_lines(recording))
    except OSError as error:
        raise RrfpError(f"the file {path} could not be written: {error.strerror}") from error


def _lines(recording: Recording) -> Iterator[bytes]:
    """Yield the JSON document in pieces: the settings, then one event per line."""
    yield b'{"displayTimeUnit":"ms","metadata":'
    yield json.dumps(recording.settings).encode()
    yield b',"traceEvents":[\n'
    for index, event in enumerate(_events(recording)):
        yield (b",\n" if index else b"") + json.dumps(event, separators=(",", ":")).encode()
    yield b"\n]}\n"


def _events(recording: Recording) -> Iterator[_Event]:
    """Yield all events: records by category, sends first, as viewers order an arrow's events by
    their place in the file; then counters, and the names of processes and threads."""
    infos = [records.info for records in recording.ranks]
    pipelines: dict[int, str] = {}
    threads = _Threads()
    has_chunks = any(len(info.stages) > 1 for info in infos)
    # A viewer orders events of an arrow at equal times by their order in the file.
    for category in ("send", "receive", *_OTHERS):
        for records in recording.ranks:
            (number, name), _ = stage_path(records.info, infos)
            pipelines[number] = name
            yield from _of_rank(category, records, number, threads, has_chunks)
    for records in recording.ranks:
        (number, _), (_, stage) = stage_path(records.info, infos)
        yield from _counters(records, number, stage)
    for number, name in pipelines.items():
        yield _named("process_name", number, 0, {"name": name})
    yield from threads.described()


def _of_rank(
    category: str, records: RankRecords, pid: int, threads: "_Threads", has_chunks: bool
) -> Iterator[_Event]:
    """Yield the events of a rank's records of one category: a slice or an instant each, and for
    messages and the tasks that consume them also a part of the message's arrow."""
    rank = records.info.rank
    received = records.receives if category == "task" else ()
    arrows = {key_of(receive): received_by(rank, receive) for receive in received}
    stage = records.info.pp_rank, stage_name(records.info)
    found = records.by_name()[category]
    tracks = threads.of(pid, stage, category, found)
    for record, tid in zip(found, tracks, strict=True):
        fields = dict(_fields(record))
        start_ns = fields.pop("start_ns", None)
        place: _Event = {"pid": pid, "tid": tid}
        if start_ns is None:
            time_us = fields.pop("time_ns") / _NS_PER_US
            name = fields.get("name", category)
            yield {
                "ph": "i",
                "s": "t",
                "cat": category,
                "name": name,
                "ts": time_us,
                **place,
                "args": fields,
            }
            continue
        end_ns = fields.pop("end_ns")
        when: _Event = {"ts": start_ns / _NS_PER_US, **place}
        yield {
            "ph": "X",
            "cat": category,
            "name": _title(category, record, has_chunks),
            **when,
            "dur": (end_ns - start_ns) / _NS_PER_US,
            "args": fields,
        }
        key = None
        if category == "send":
            phase, key = "s", sent_by(rank, record)
        elif category == "receive":
            phase, key = "t", received_by(rank, record)
        elif category == "task":
            phase, key = "f", arrows.get(key_of(record))
        if key is not None:
            # Attach the arrow's end to the slice that begins at this time, not to the next one.
            bound = {"bp": "e"} if phase == "f" else {}
            flow = {"ph": phase, "cat": "message", "name": "message", "id": hex(key.flow_id)}
            yield {**flow, **bound, **when}


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a record's fields, times included; an evaluation's `step`
    becomes `evaluation`."""
    for name, value in record._asdict().items():
        yield split_step(value) if name == STEP else (name, value)


def _title(category: str, record: Any, has_chunks: bool) -> str:
    """The name of a record's slice, as in the Perfetto trace."""
    match category:
        case "wait":
            return str(record.cause)
        case "phase":
            return str(record.phase)
        case "task":
            return task_title(record, has_chunks)
    verb = {"agreement": "agree", "send": "send", "receive": "recv"}[category]
    return f"{verb} {task_name(record)}"


def _counters(records: RankRecords, pid: int, stage: str) -> Iterator[_Event]:
    """Yield the points of a rank's counters, each named by its stage."""
    for name, points in counters_of(records).items():
        for time_ns, value in points:
            yield {
                "ph": "C",
                "name": f"{stage} {name}",
                "pid": pid,
                "tid": 0,
                "ts": time_ns / _NS_PER_US,
                "args": {"value": value},
            }


class _Threads:
    """Assigns a thread id to each track and row. Slices of a thread must nest, so overlapping
    slices get different rows."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, str], str, int], int] = {}

    def of(
        self, pid: int, stage: tuple[int, str], category: str, found: Sequence[Any]
    ) -> Iterable[int]:
        """The thread id of each of these records of one category; overlapping slices get different
        threads. New ids are assigned as needed."""
        if not found:
            return ()
        rows = [0] * len(found)
        if hasattr(found[0], "end_ns"):
            rows = assign_rows([record[:2] for record in found])
        track = _TRACKS[category]
        numbers = [
            self._numbers.setdefault((pid, stage, track, row), len(self._numbers) + 1)
            for row in range(max(rows) + 1)
        ]
        return [numbers[row] for row in rows]

    def described(self) -> Iterator[_Event]:
        """The metadata events that name and order all threads assigned so far."""
        order = list(dict.fromkeys(_TRACKS.values()))
        keys = sorted(self._numbers, key=lambda key: (key[0], key[1], order.index(key[2]), key[3]))
        return chain.from_iterable(
            (
                _named(
                    "thread_name", key[0], self._numbers[key], {"name": f"{key[1][1]} {key[2]}"}
                ),
                _named("thread_sort_index", key[0], self._numbers[key], {"sort_index": place}),
            )
            for place, key in enumerate(keys)
        )


def _named(what: str, pid: int, tid: int, arguments: _Event) -> _Event:
    """A metadata event, which names or orders a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}
