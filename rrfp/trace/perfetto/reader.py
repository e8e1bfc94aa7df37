"""Reads a trace back into its recording; `rrfp.trace.perfetto` states the rules of the format.

An event's category and annotations identify its record; its track and position do not matter. Other
packets, and events of other categories, are skipped.

A trace is read in batches of packets, and a batch in columns. Slices that do not end in their batch
are read again with the next batch.
"""

import json
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import message
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.format import (
    END_MARK,
    FIELDS,
    MOST_OF_A_KIND,
    RANK,
    RUN,
    VERSION,
    bounds_of,
)
from rrfp.trace.perfetto.protobuf import (
    CATEGORIES_READ,
    INSTANT,
    INT,
    LONGEST_NAME,
    TEXT,
    Bytes,
    DecodeError,
    EventBatch,
    Numbers,
    Packets,
    Rows,
    Spans,
    cut_packets,
    find,
    foreign,
)
from rrfp.trace.records import (
    EVALUATION,
    RECORD_TYPES,
    STEP,
    RankInfo,
    RankRecords,
    Recording,
    evaluation_step,
)
from rrfp.trace.safe_files import open_regular

_NUM_BYTES_OF_A_BATCH = 1 << 20
_NUM_BYTES_FREED = 24 << 20
"""After a block of this size was freed, glibc reuses smaller blocks instead of returning each
array's memory to the system and requesting it again, which would take a tenth of the time of
reading."""

_MOST_NAMES = 64
"""The number of texts to find in bulk; there are fewer kinds, causes and stimuli."""
Table = dict[str, Numbers]
"""Records of one type in columns: `source`, the packet sequence of each, and the type's own fields.
A text is represented by its index in `TraceReader.texts`."""


@dataclass(slots=True)
class TraceContents:
    """The content of a trace: the recording, and signs of damage."""

    recording: Recording
    open_slices: list[str] = field(default_factory=list)
    """Names of slices that begin and never end."""
    num_stray_ends: int = 0
    """The number of slice ends without a beginning."""
    flow_lengths: Counter[int] = field(default_factory=Counter)
    """The number of events of each arrow, by flow id."""
    num_records_written: int | None = None
    """The number of records that were written; None if the closing mark is missing."""


def read_trace(path: Path) -> Recording:
    """Read a recording, exactly as it was written. Raises RrfpError if the file is missing, empty,
    truncated, damaged, or not a trace of one run."""
    reader = TraceReader(path)
    contents = reader.contents()
    reader.check_whole()
    return contents.recording


def read_contents(path: Path) -> TraceContents:
    """Read a trace that may lack events. Raises RrfpError if the file is missing, empty, cut within
    a packet, not a Perfetto trace of a run, of a later version, or has a record with a missing or
    impossible value."""
    return TraceReader(path).contents()


class TraceReader:
    """Reads one trace once: as a whole with `contents`, or in batches with `tables`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.settings: dict[str, object] = {}
        self.infos: dict[int, RankInfo] = {}
        """The ranks, by packet sequence."""
        self.texts: list[str] = []
        """The distinct texts of the records."""
        self._vocabulary = _Vocabulary(self.texts)
        self._is_of_a_run = False
        self._num_records_written: int | None = None
        self._open: list[bytes] = []
        self._num_stray_ends = 0
        self._num_backward = 0
        self._num_records = 0
        self._flows: list[Numbers] | None = None
        """The flow ids of each batch's arrows; None if they are not needed."""

    def contents(self) -> TraceContents:
        """Read the whole trace, with signs of damage: open slices, stray ends, a missing closing
        mark. These raise nothing; raises RrfpError as `tables` does."""
        flows: list[Numbers] = []
        self._flows = flows
        found: defaultdict[str, list[Table]] = defaultdict(list)
        for tables in self.tables():
            for name, table in tables.items():
                found[name].append(table)
        texts = np.array([*self.texts, ""], object)
        ranks = {sequence: RankRecords(info) for sequence, info in self.infos.items()}
        for name, parts in found.items():
            table = {key: np.concatenate([each[key] for each in parts]) for key in parts[0]}
            sources = table.pop("source")
            are_texts = {key for key, is_text in FIELDS[name] if is_text}
            for sequence, records in ranks.items():
                own = sources == sequence
                columns = (
                    (texts[each[own]] if key in are_texts else each[own]).tolist()
                    for key, each in table.items()
                )
                records.by_name()[name].extend(map(RECORD_TYPES[name], *columns))
        return TraceContents(
            Recording(self.settings, list(ranks.values())),
            [self._parse(packet).track_event.name for packet in self._open],
            self._num_stray_ends,
            _count(flows),
            self._num_records_written,
        )

    def tables(self) -> Iterator[dict[str, Table]]:
        """Yield the records of a batch by the name of their type. Records of one type and sequence
        come in the order in which they were recorded. `settings` and `infos` are complete after the
        last batch.

        Raises RrfpError if the file is missing, empty, cut within a packet, not a Perfetto trace of
        a run, of a later version, or has a record with a missing or impossible value.
        """
        np.empty(_NUM_BYTES_FREED, np.uint8)
        try:
            with open_regular(self._path) as file:
                if file.seek(0, 2) == 0:
                    raise RrfpError(f"the trace {self._path} is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    position = 0
                    while position < len(data):
                        # With many open slices use larger batches, as each batch reads them again.
                        size = max(_NUM_BYTES_OF_A_BATCH, sum(map(len, self._open)))
                        packets, position = cut_packets(self._path, data, position, size)
                        yield self._read(packets)
        except DecodeError as error:
            raise foreign(self._path) from error
        except OSError as error:
            raise RrfpError(
                f"the trace {self._path} could not be read: {error.strerror}"
            ) from error
        if not self._is_of_a_run:
            raise RrfpError(f"{self._path} is a Perfetto trace, but not one of an rrfp run")

    def check_whole(self) -> None:
        """Raise RrfpError if results from this trace, which has been read, would be wrong: the
        closing mark or other events are missing, two sequences belong to one rank, or events end
        before they begin."""
        if self._num_records_written is None:
            raise RrfpError(f"the trace {self._path} is truncated: its last events are missing")
        if self._num_records < self._num_records_written:
            raise RrfpError(
                f"the trace {self._path} lacks {self._num_records_written - self._num_records} of "
                f"the {self._num_records_written} records that were written; 'rrfp trace check' "
                "says more"
            )
        counts = Counter(info.rank for info in self.infos.values())
        twice = sorted(rank for rank, count in counts.items() if count > 1)
        if twice:
            raise RrfpError(
                f"the trace {self._path} has the records of rank {twice[0]} twice, as if two runs "
                "were joined; take the trace of one run"
            )
        if self._num_backward:
            raise RrfpError(
                f"the trace {self._path} is damaged: {self._num_backward} of its events end before "
                "they begin; 'rrfp trace check' names them"
            )

    def _read(self, packets: Packets) -> dict[str, Table]:
        """Read a batch, after the slices that earlier batches left open, and return its records by
        type. Also updates the settings, the ranks, the open slices and the counts."""
        num_read_before = len(self._open)
        batch = EventBatch(packets.behind(self._open))
        begins, ends = batch.pair_slices()
        self._num_stray_ends += batch.num_stray_ends
        self._open = [batch.packet(event) for event in batch.unended]
        if self._flows is not None:
            self._flows.append(batch.flows(num_read_before))
        for event in batch.instants_in(RUN, RANK):
            self._read_mark(self._parse(batch.packet(event)))
        return {
            name: table
            for name in RECORD_TYPES
            if (table := self._table(name, batch, begins, ends)) is not None
        }

    def _table(self, name: str, batch: EventBatch, begins: Rows, ends: Rows) -> Table | None:
        """The records of one type, slices in the order of their ends, instants in that of the file;
        None without records of it. Optional annotations get their defaults. Raises RrfpError for a
        record with a missing or impossible value."""
        is_slice = "end_ns" in RECORD_TYPES[name]._fields
        own = batch.categories == CATEGORIES_READ.index(name)
        slices = own[begins]
        instants = np.flatnonzero(own & (batch.types == INSTANT))
        if slices.any() if not is_slice else instants.size:
            raise self._damaged(name, batch, begins[slices] if not is_slice else instants, "times")
        events = begins[slices] if is_slice else instants
        if not events.size:
            return None
        self._num_records += events.size
        table = {"source": batch.sequences[events]}
        if is_slice:
            starts_ns, ends_ns = batch.times[events], batch.times[ends[slices]]
            table |= {"start_ns": starts_ns, "end_ns": ends_ns}
            self._num_backward += int(np.count_nonzero(ends_ns < starts_ns))
        else:
            table["time_ns"] = batch.times[events]
        for key, is_text in FIELDS[name]:
            notes = batch.notes(events, key, TEXT if is_text else INT)
            if key == STEP:
                table[key] = self._read_steps(name, batch, events, notes)
                continue
            is_missing = notes < 0
            default = RECORD_TYPES[name]._field_defaults.get(key)
            if default is None and is_missing.any():
                raise self._damaged(name, batch, events[is_missing], f"'{key}'")
            if isinstance(default, str):
                table[key] = np.full(len(notes), self._vocabulary.place_of(default.encode()))
                table[key][~is_missing] = self._read_texts(batch, notes[~is_missing])
            elif is_text:
                table[key] = self._read_texts(batch, notes)
            else:
                table[key] = np.where(is_missing, default or 0, batch.note_values[notes])
        for key in RECORD_TYPES[name]._fields:
            if (key, True) in FIELDS[name]:
                continue
            least, most = bounds_of(key)
            strange = (table[key] < least) | (table[key] > most)
            if strange.any():
                problem = f"'{key}' is {table[key][strange][0]}"
                raise self._damaged(name, batch, events[strange], problem)
        return table

    def _read_steps(self, name: str, batch: EventBatch, events: Rows, notes: Rows) -> Numbers:
        """The step number of each event, from its annotation `step` or `evaluation`; evaluations
        become negative. Raises RrfpError if an event has neither, or a negative evaluation."""
        are_evaluations = notes < 0
        if not are_evaluations.any():
            return batch.note_values[notes]
        notes = np.where(are_evaluations, batch.notes(events, EVALUATION, INT), notes)
        if notes.min() < 0:
            raise self._damaged(name, batch, events[notes < 0], f"'{STEP}'")
        numbers = batch.note_values[notes]
        strange = are_evaluations & (numbers < 0)
        if strange.any():
            problem = f"'{EVALUATION}' is {numbers[strange][0]}"
            raise self._damaged(name, batch, events[strange], problem)
        return np.where(are_evaluations, evaluation_step(0) - numbers, numbers)

    def _read_texts(self, batch: EventBatch, notes: Rows) -> Numbers:
        """The index in `texts` of each annotation's text; new texts are added. Raises RrfpError for
        invalid UTF-8."""
        spans = batch.note_texts.take(notes)
        found = self._vocabulary.find(batch.data, spans)
        new = np.flatnonzero(found < 0)
        try:
            for row, start, end in zip(new, *spans.take(new), strict=True):
                found[row] = self._vocabulary.place_of(batch.octets[start:end])
        except UnicodeDecodeError as error:
            raise RrfpError(
                f"the trace {self._path} has a text that is not UTF-8: {error.object!r:.60}"
            ) from error
        return found

    def _damaged(self, name: str, batch: EventBatch, events: Rows, problem: str) -> RrfpError:
        """The error for a damaged record, named by the first of `events`."""
        event = self._parse(batch.packet(events[0])).track_event.name
        return RrfpError(f"the trace {self._path} has a damaged {name} '{event}': {problem}")

    def _read_mark(self, packet: Any) -> None:
        """Read the run's settings, a rank's place, or the closing mark, and store it. Raises
        RrfpError if it is damaged, or the trace's version is too new."""
        event = packet.track_event
        notes = {note.name: note for note in event.debug_annotations}
        try:
            if event.name == END_MARK:
                self._num_records_written = notes["num_records"].int_value
            elif event.categories[0] == RUN:
                self._check_version(notes)
                self.settings = dict(json.loads(notes["settings"].string_value))
                self._is_of_a_run = True
            else:
                self.infos[packet.trusted_packet_sequence_id] = _rank_info(notes)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RrfpError(
                f"the trace {self._path} has a damaged '{event.name}': {error}"
            ) from error

    def _parse(self, packet: bytes) -> Any:
        """Decode a packet. Raises RrfpError if it is invalid."""
        try:
            return pb.TracePacket.FromString(packet)
        except message.DecodeError as error:
            raise foreign(self._path) from error

    def _check_version(self, notes: dict[str, Any]) -> None:
        """Raise RrfpError for a later version. A trace without a version has version 1."""
        version = notes["version"].int_value if "version" in notes else 1
        if version > VERSION:
            raise RrfpError(
                f"the trace {self._path} is of version {version}, and this rrfp reads up to "
                f"{VERSION}; update rrfp to read it"
            )


class _Vocabulary:
    """Looks up the index of each text in a list, and adds new texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._places: dict[bytes, int] = {}
        self._names: tuple[str, ...] = ()
        """The first texts that are short enough to be found in bulk."""
        self._places_of_names = np.array([-1])
        """The index of each of these names, and a final -1 for all other texts."""

    def find(self, data: Bytes, spans: Spans) -> Numbers:
        """The index of each text; -1 if it is unknown or must be looked up with `place_of`."""
        return self._places_of_names[find(data, spans, self._names)]

    def place_of(self, encoded: bytes) -> int:
        """The index of a text, which is added if it is new. Raises UnicodeDecodeError if it is not
        UTF-8."""
        place = self._places.get(encoded)
        if place is None:
            self._texts.append(encoded.decode())
            self._places[encoded] = place = len(self._texts) - 1
            if len(encoded) <= LONGEST_NAME and len(self._names) < _MOST_NAMES:
                self._names += (self._texts[-1],)
                self._places_of_names = np.insert(self._places_of_names, -1, place)
        return place


def _count(flows: Sequence[Numbers]) -> Counter[int]:
    """Count the events of each flow id."""
    ids, counts = np.unique(np.concatenate(flows), return_counts=True)
    return Counter(dict(zip(ids.view(np.uint64).tolist(), counts.tolist(), strict=True)))


def _rank_info(notes: dict[str, Any]) -> RankInfo:
    """Decode a rank's place from annotations. Raises KeyError or ValueError if they are damaged."""
    number = {name: note.int_value for name, note in notes.items()}
    stages = tuple(map(int, notes["stages"].string_value.split()))
    places = {name: number[name] for name in ("rank", "pp_rank", "tp_rank", "dp_rank")}
    for name, place in (*places.items(), *(("stages", stage) for stage in stages)):
        if not 0 <= place < MOST_OF_A_KIND:
            raise ValueError(f"'{name}' is {place}")
    return RankInfo(
        **places,
        stages=stages,
        host=notes["host"].string_value,
        pid=number["pid"],
        clock_offset_ns=number["clock_offset_ns"],
        clock_error_ns=number["clock_error_ns"],
    )
