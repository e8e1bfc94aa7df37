"""Reads a trace back into the recording it was made of; `rrfp.trace.perfetto` states the rules.

An event is known by what is in it: its category and annotations say which record it is, whatever
its track and wherever it stands. Packets and events of other makers are passed over.
"""

import json
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.perfetto_format import END_MARK, FIELDS, RANK, RUN
from rrfp.trace.records import RECORD_TYPES, RankInfo, RankRecords, Recording

_PACKET_TAG = 0x0A
_NUM_BYTES_OF_A_BATCH = 1 << 20

_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
_INSTANT = pb.TrackEvent.TYPE_INSTANT

_SPECS: dict[str, tuple[Any, tuple[tuple[str, bool], ...]]] = {
    name: (RECORD_TYPES[name], fields) for name, fields in FIELDS.items()
}


@dataclass(slots=True)
class TraceContents:
    """A trace as it was found: the recording, and what does not belong to a whole one."""

    recording: Recording
    open_slices: list[str] = field(default_factory=list)
    """Names of slices that begin and never end."""
    num_stray_ends: int = 0
    """Ends of slices that never began."""
    flow_lengths: Counter[int] = field(default_factory=Counter)
    """How many events each arrow passes, by flow id."""
    num_records_written: int | None = None
    """The number of records that were written, or None where the closing mark is missing."""


def read_trace(path: Path) -> Recording:
    """Read a recording back, exactly as it was written.

    Raises RrfpError for a file that is missing, empty, truncated, or not a trace of a run.
    """
    contents = read_contents(path)
    if contents.num_records_written is None:
        raise RrfpError(f"the trace {path} is truncated: its last events are missing")
    return contents.recording


def read_contents(path: Path) -> TraceContents:
    """Read all of a trace, damaged or not, as far as it is Perfetto and of a run.

    Raises RrfpError for a file that is missing, empty, cut within a packet, or foreign.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise RrfpError(f"the trace {path} is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for batch in _batches(path, data):
                    reader.read(pb.Trace.FromString(batch))
    except DecodeError as error:
        raise _foreign(path) from error
    except OSError as error:
        raise RrfpError(f"the trace {path} could not be read: {error.strerror}") from error
    return reader.contents()


def _batches(path: Path, data: mmap.mmap) -> Iterator[bytes]:
    """Cut the file between packets into pieces of about a megabyte."""
    start = position = 0
    num_bytes = len(data)
    while position < num_bytes:
        if data[position] != _PACKET_TAG:
            raise _foreign(path)
        position += 1
        length = shift = 0
        while True:
            if position >= num_bytes or shift > 28:
                raise _foreign(path) if shift > 28 else _truncated(path)
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        position += length
        if position > num_bytes:
            raise _truncated(path)
        if position - start >= _NUM_BYTES_OF_A_BATCH or position == num_bytes:
            yield data[start:position]
            start = position


class _Reader:
    """Gathers what the packets of one trace hold."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settings: dict[str, object] | None = None
        self._infos: dict[int, RankInfo] = {}
        self._records: defaultdict[int, dict[str, list[Any]]] = defaultdict(
            lambda: {name: [] for name in RECORD_TYPES}
        )
        self._open: defaultdict[int, list[Any]] = defaultdict(list)
        self._contents = TraceContents(Recording({}, []))

    def read(self, trace: Any) -> None:
        for packet in trace.packet:
            if not packet.HasField("track_event"):
                continue
            event = packet.track_event
            event_type = event.type
            if event_type == _BEGIN:
                self._count_arrows(event)
                self._open[event.track_uuid].append(packet)
            elif event_type == _END:
                stack = self._open[event.track_uuid]
                if stack:
                    self._take_slice(stack.pop(), packet.timestamp)
                else:
                    self._contents.num_stray_ends += 1
            elif event_type == _INSTANT:
                self._take_instant(packet)

    def contents(self) -> TraceContents:
        """What was read, once all of it was."""
        if self._settings is None:
            raise RrfpError(f"{self._path} is a Perfetto trace, but not one of an rrfp run")
        contents = self._contents
        contents.recording.settings = self._settings
        contents.open_slices = [
            packet.track_event.name for stack in self._open.values() for packet in stack
        ]
        for sequence, info in self._infos.items():
            records = RankRecords(info)
            for name, found in records.by_name().items():
                found.extend(self._records[sequence][name])
            contents.recording.ranks.append(records)
        return contents

    def _count_arrows(self, event: Any) -> None:
        for flow_id in event.flow_ids:
            self._contents.flow_lengths[flow_id] += 1
        for flow_id in event.terminating_flow_ids:
            self._contents.flow_lengths[flow_id] += 1

    def _take_slice(self, packet: Any, end_ns: int) -> None:
        category = _category(packet.track_event)
        if category in _SPECS:
            self._take(packet, category, packet.timestamp, end_ns)

    def _take_instant(self, packet: Any) -> None:
        category = _category(packet.track_event)
        if category in _SPECS:
            self._take(packet, category, packet.timestamp)
        elif category in (RUN, RANK):
            self._take_mark(packet.trusted_packet_sequence_id, category, packet.track_event)

    def _take(self, packet: Any, category: str, *times_ns: int) -> None:
        record_type, spec = _SPECS[category]
        annotations = {note.name: note for note in packet.track_event.debug_annotations}
        try:
            fields = [
                annotations[name].string_value if is_text else annotations[name].int_value
                for name, is_text in spec
            ]
            record = record_type(*times_ns, *fields)
        except (KeyError, TypeError) as error:
            name = packet.track_event.name
            raise RrfpError(
                f"the trace {self._path} has a damaged {category} '{name}': {error}"
            ) from error
        self._records[packet.trusted_packet_sequence_id][category].append(record)

    def _take_mark(self, sequence: int, category: str, event: Any) -> None:
        notes = {note.name: note for note in event.debug_annotations}
        try:
            if event.name == END_MARK:
                self._contents.num_records_written = notes["num_records"].int_value
            elif category == RUN:
                self._settings = dict(json.loads(notes["settings"].string_value))
            else:
                self._infos[sequence] = _rank_info(notes)
        except (KeyError, TypeError, ValueError) as error:
            raise RrfpError(
                f"the trace {self._path} has a damaged '{event.name}': {error}"
            ) from error


def _category(event: Any) -> str:
    categories = event.categories
    return categories[0] if categories else ""


def _rank_info(notes: dict[str, Any]) -> RankInfo:
    number = {name: note.int_value for name, note in notes.items()}
    return RankInfo(
        rank=number["rank"],
        pp_rank=number["pp_rank"],
        tp_rank=number["tp_rank"],
        dp_rank=number["dp_rank"],
        stages=tuple(map(int, notes["stages"].string_value.split())),
        host=notes["host"].string_value,
        pid=number["pid"],
        clock_offset_ns=number["clock_offset_ns"],
        clock_error_ns=number["clock_error_ns"],
    )


def _foreign(path: Path) -> RrfpError:
    return RrfpError(f"{path} is not an uncompressed Perfetto trace")


def _truncated(path: Path) -> RrfpError:
    return RrfpError(f"the trace {path} is truncated: it ends in the middle of a packet")
