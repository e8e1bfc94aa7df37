"""Writes a recording as a trace; `rrfp.trace.perfetto` states the rules of the format."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from io import BytesIO
from itertools import repeat, starmap
from pathlib import Path
from struct import pack
from typing import IO, Any, NamedTuple

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.format import (
    COUNTERS,
    COUNTERS_IN_ORDER,
    END_MARK,
    FIELDS,
    HINT,
    MAX_SKIPPED_NAMED,
    PATH_OF_CATEGORY,
    RANK,
    RUN,
    VERSION,
    Counters,
    HintedDispatch,
    MessageKey,
    Node,
    RowAssigner,
    TaskKey,
    compare_with_hint,
    key_of,
    received_by,
    sent_by,
    stage_name,
    stage_path,
    task_name,
    task_title,
)
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    Phase,
    RankInfo,
    RankRecords,
    Recording,
    StimulusRecord,
    TaskRecord,
    split_step,
)
from rrfp.trace.run_dir import RunDir, update_latest
from rrfp.trace.safe_files import open_whole, write_whole

# Encoding packets.
#
# Concatenated protobuf messages are read as one message
# (https://protobuf.dev/programming-guides/encoding/#last-one-wins). So a packet is assembled from
# encoded parts, and a part that recurs is encoded once. This takes a quarter of the time of one
# message object per packet.


Fields = Iterable[tuple[str, int | str]]
"""Debug annotations: names and values."""

_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
_INSTANT = pb.TrackEvent.TYPE_INSTANT
_COUNTER = pb.TrackEvent.TYPE_COUNTER

_VARINT, _FIXED64, _LENGTH = 0, 1, 2

_NUM_BYTES_OF_A_BATCH = 1 << 20
_NUM_PARTS_CACHED = 1 << 14


# A varint has seven bits per byte, lowest first. Tables give two bytes at a time.
_LAST_BYTES = [
    bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    for number in range(1 << 14)
]
_FIRST_BYTES = [bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(1 << 14)]


def _varint(number: int) -> bytes:
    """Encode a number. Raises ValueError if it is negative."""
    if number < 1 << 14:
        if number < 0:
            raise ValueError(f"a time must not be negative: {number}")
        return _LAST_BYTES[number]
    if number < 1 << 28:
        return _FIRST_BYTES[number & 0x3FFF] + _LAST_BYTES[number >> 14]
    return (
        _FIRST_BYTES[number & 0x3FFF]
        + _FIRST_BYTES[number >> 14 & 0x3FFF]
        + _cached_varint(number >> 28)
    )


_cached_varint = lru_cache(1 << 10)(_varint)
"""Encodes the upper bits of a long number, which successive times have in common."""


def _tag(field: int, wire: int) -> bytes:
    """Encode the tag of a field: its number and wire type."""
    return _varint(field << 3 | wire)


_PACKET_TAG = _tag(pb.Trace.PACKET_FIELD_NUMBER, _LENGTH)
_EVENT_TAG = _tag(pb.TracePacket.TRACK_EVENT_FIELD_NUMBER, _LENGTH)
_TIME_TAG = _tag(pb.TracePacket.TIMESTAMP_FIELD_NUMBER, _VARINT)
_PASSES_TAG = _tag(pb.TrackEvent.FLOW_IDS_FIELD_NUMBER, _FIXED64)
_ENDS_TAG = _tag(pb.TrackEvent.TERMINATING_FLOW_IDS_FIELD_NUMBER, _FIXED64)
_NOTE_TAG = _tag(pb.TrackEvent.DEBUG_ANNOTATIONS_FIELD_NUMBER, _LENGTH)
_INT_TAG = _tag(pb.DebugAnnotation.INT_VALUE_FIELD_NUMBER, _VARINT)


class PacketWriter:
    """Appends packets to a file in batches; `flush` writes the last batch. Tracks are numbered from
    `first_track`."""

    def __init__(self, file: IO[bytes], first_track: int = 1) -> None:
        self._file = file
        self._batch = bytearray()
        self._first_track = first_track
        self._tracks: dict[tuple[tuple[int, str, int], ...], int] = {}
        self._begun: set[int] = set()
        self._sequence = self._timed = b""
        self._shift_ns = 0

    def go_to_sequence(self, sequence: int, shift_ns: int = 0) -> None:
        """Write all following packets to this sequence, with their times moved by `shift_ns`. A new
        sequence begins with a packet that clears its incremental state."""
        self._shift_ns = shift_ns
        self._sequence = _encoded(pb.TracePacket(trusted_packet_sequence_id=sequence))
        self._timed = self._sequence + _TIME_TAG
        if sequence not in self._begun:
            self._begun.add(sequence)
            cleared = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._append(_encoded(pb.TracePacket(sequence_flags=cleared)))

    def track(self, *path: Node, row: int = 0, is_counter: bool = False) -> int:
        """The uuid of the track at a path; writes the descriptors of new tracks, parents first.
        Rows of one path are sibling tracks of the same name."""
        key: tuple[tuple[int, str, int], ...] = ()
        parent = 0
        for depth, (place, name) in enumerate(path, start=1):
            is_leaf = depth == len(path)
            key = (*key, (place, name, row if is_leaf else 0))
            if key not in self._tracks:
                self._tracks[key] = self._first_track + len(self._tracks)
                packet = pb.TracePacket()
                descriptor = packet.track_descriptor
                descriptor.uuid = self._tracks[key]
                if parent:
                    descriptor.parent_uuid = parent
                descriptor.name = _text(name)
                descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
                descriptor.sibling_order_rank = place
                if is_counter and is_leaf:
                    descriptor.counter.unit = pb.CounterDescriptor.UNIT_COUNT
                self._append(_encoded(packet))
            parent = self._tracks[key]
        return parent

    def slice(
        self,
        start_ns: int,
        end_ns: int,
        track: int,
        name: str,
        category: str,
        notes: bytes,
        *,
        passes: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> None:
        """Write a slice with encoded annotations (`notes_of`). `passes` and `ends` are the ids of
        the arrows that pass through it and that end at it."""
        event = notes + _heading(_BEGIN, track, name, category)
        for flow in passes:
            event += _PASSES_TAG + pack("<Q", flow)
        for flow in ends:
            event += _ENDS_TAG + pack("<Q", flow)
        self._append_event(start_ns, _as_part(event))
        self._append_event(end_ns, _nameless_part(_END, track))

    def instant(self, time_ns: int, track: int, name: str, category: str, notes: bytes) -> None:
        """Write an instant event with encoded annotations (`notes_of`)."""
        self._append_event(time_ns, _as_part(notes + _heading(_INSTANT, track, name, category)))

    def count(self, time_ns: int, track: int, value: int) -> None:
        """Write a counter's value."""
        self._append_event(time_ns, _nameless_part(_COUNTER, track, value))

    def flush(self) -> None:
        """Write the batch to the file, and empty it."""
        self._file.write(self._batch)
        self._batch.clear()

    def _append_event(self, time_ns: int, part: bytes) -> None:
        """Append an event at a time, and flush a full batch."""
        packet = self._timed + _varint(time_ns + self._shift_ns) + part
        self._batch += _PACKET_TAG + _varint(len(packet)) + packet
        if len(self._batch) >= _NUM_BYTES_OF_A_BATCH:
            self.flush()

    def _append(self, packet: bytes) -> None:
        """Append a packet to the current sequence."""
        packet = self._sequence + packet
        self._batch += _PACKET_TAG + _varint(len(packet)) + packet


def notes_of(fields: Fields) -> bytes:
    """Encode annotations as a part of an event."""
    return b"".join(starmap(note_of, fields))


def note_of(name: str, value: int | str) -> bytes:
    """Encode one annotation as a part of an event."""
    if isinstance(value, str):
        return _text_note(name, value)
    # Protobuf encodes a negative number as the unsigned number of the same bits.
    content = _INT_TAG + _varint(value & 0xFFFFFFFFFFFFFFFF) + _note_name(name)
    return _NOTE_TAG + _varint(len(content)) + content


@lru_cache(_NUM_PARTS_CACHED)
def _note_name(name: str) -> bytes:
    """Encode an annotation's name (cached)."""
    return _encoded(pb.DebugAnnotation(name=name))


@lru_cache(_NUM_PARTS_CACHED)
def _text_note(name: str, value: str) -> bytes:
    """Encode an annotation with a text as a part of an event (cached)."""
    note = pb.DebugAnnotation(name=name, string_value=_text(value))
    return _encoded(pb.TrackEvent(debug_annotations=[note]))


@lru_cache(_NUM_PARTS_CACHED)
def _heading(event_type: int, track: int, name: str, category: str) -> bytes:
    """Encode an event's type, track, name and category (cached)."""
    return _encoded(
        pb.TrackEvent(type=event_type, track_uuid=track, name=_text(name), categories=[category])
    )


@lru_cache(_NUM_PARTS_CACHED)
def _nameless_part(event_type: int, track: int, value: int | None = None) -> bytes:
    """Encode a whole event without a name: the end of a slice, or a counter's value."""
    return _as_part(_encoded(pb.TrackEvent(type=event_type, track_uuid=track, counter_value=value)))


def _text(value: str) -> str:
    """Replace characters that cannot be encoded by `?`: JSON and file names may contain lone
    surrogates."""
    return value.encode(errors="replace").decode()


def _as_part(event: bytes) -> bytes:
    """Encode an event as a part of a packet."""
    return _EVENT_TAG + _varint(len(event)) + event


def _encoded(message: Any) -> bytes:
    """Serialize a protobuf message."""
    return bytes(message.SerializeToString())


# Additional tracks for a viewer, which are not part of the trace.
#
# Perfetto reads concatenated traces as one. So these packets are appended to a trace as it is sent
# to a viewer, and the file does not change.


_SEQUENCE = 1 << 30
"""Above the packet sequences of all traces of rrfp, which have one per rank."""
_FIRST_TRACK = 1 << 40
"""Above the track uuids of all traces of rrfp."""
_GROUP = "analysis"
_CATEGORY = "derived"


class Slice(NamedTuple):
    """A slice of an additional track. Slices are in order of time and do not overlap."""

    start_ns: int
    end_ns: int
    name: str
    notes: tuple[tuple[str, int | str], ...]


def encode_track(name: str, slices: Iterable[Slice]) -> bytes:
    """Encode a track of this name, shown above all others, to append to a trace; empty without
    slices."""
    file = BytesIO()
    out = PacketWriter(file, first_track=_FIRST_TRACK)
    track = None
    for each in slices:
        if track is None:
            out.go_to_sequence(_SEQUENCE)
            # The viewer moves a track without a group into "Global Track Events".
            track = out.track((-1, _GROUP), (0, name))
        notes = notes_of(each.notes)
        out.slice(each.start_ns, each.end_ns, track, each.name, _CATEGORY, notes)
    out.flush()
    return file.getvalue()


_RUN_SEQUENCE = 1
_FIRST_RANK_SEQUENCE = 2
_RUN_PATH = ((1_000_000, RUN), (0, "settings"))
"""Below every pipeline. The viewer would move a top-level track without children above them."""


# Writing recordings.


def write_trace(path: Path, recording: Recording) -> None:
    """Write a recording as a trace, atomically. Its times must not be negative. Raises RrfpError if
    the file cannot be written."""
    infos = [records.info for records in recording.ranks]
    with trace_writer(path, recording.settings, infos) as writer:
        writer.write(recording.ranks, is_last=True)


@contextmanager
def trace_writer(
    path: Path,
    settings: Mapping[str, object],
    infos: Sequence[RankInfo],
    shifts_ns: Sequence[int] | None = None,
) -> Iterator["TraceWriter"]:
    """Write a trace one part at a time. The file appears when the block ends, and not if it raises.
    The times of each rank are moved by its entry in `shifts_ns` (None: not moved). Raises RrfpError
    if the file cannot be written."""
    try:
        with open_whole(path) as file:
            writer = TraceWriter(file, settings, infos, shifts_ns or [0] * len(infos))
            yield writer
            writer.finish()
    except OSError as error:
        raise RrfpError(f"the trace {path} could not be written: {error.strerror}") from error


class TraceWriter:
    """Writes a recording to a file, part by part."""

    def __init__(
        self,
        file: IO[bytes],
        settings: Mapping[str, object],
        infos: Sequence[RankInfo],
        shifts_ns: Sequence[int],
    ) -> None:
        self._out = out = PacketWriter(file)
        self._num_records = 0
        out.go_to_sequence(_RUN_SEQUENCE)
        self._run_track = out.track(*_RUN_PATH)
        notes = notes_of([("version", VERSION), ("settings", json.dumps(settings))])
        out.instant(0, self._run_track, RUN, RUN, notes)
        self._ranks = [
            _RankWriter(out, _FIRST_RANK_SEQUENCE + place, shift_ns, info, infos)
            for place, (info, shift_ns) in enumerate(zip(infos, shifts_ns, strict=True))
        ]
        # A viewer orders tracks by their first events, so write an event for every stage first.
        for rank in self._ranks:
            rank.write_info()

    def write(self, part: Sequence[RankRecords], *, is_last: bool) -> None:
        """Write the next part of every rank's records, in the order of the ranks. A part may end
        within a step, whose tasks are then written with the next part."""
        # Arrows follow time, and at equal times the order of writing. So write an arrow's events in
        # its direction, across all ranks.
        for write in (_RankWriter.write_sends, _RankWriter.write_receives):
            for rank, records in zip(self._ranks, part, strict=True):
                write(rank, records)
        for rank, records in zip(self._ranks, part, strict=True):
            rank.write_rest(records, is_last=is_last)
        self._num_records += sum(
            len(found) for records in part for found in records.by_name().values()
        )

    def finish(self) -> None:
        """Write the closing mark, after the last part."""
        self._out.go_to_sequence(_RUN_SEQUENCE)
        notes = notes_of([("num_records", self._num_records)])
        self._out.instant(0, self._run_track, END_MARK, RUN, notes)
        self._out.flush()


def _stimulus_title(stimulus: StimulusRecord) -> str:
    """Format a stimulus: `input arrived F3` for the class InputArrived."""
    words = _words_of(stimulus.name)
    return f"{words} {task_name(stimulus)}" if stimulus.kind else words


def _begun_title(begun: BegunRecord) -> str:
    """Format an unended activity: `never ended: F3`, `never ended: backward_input`. It differs from
    a task's title, because the task did not finish."""
    doing = task_name(begun) if begun.doing == Doing.TASK else begun.doing
    return f"never ended: {doing}"


@lru_cache
def _words_of(class_name: str) -> str:
    """Split a class name into lower-case words: `input arrived`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", class_name).lower()


_NAMES = {category: tuple(name for name, _ in fields) for category, fields in FIELDS.items()}
_DEFAULTS = {name: record_type._field_defaults for name, record_type in RECORD_TYPES.items()}
_NUM_NOTES_CACHED = 1 << 13
_UNIQUE = ("send", "receive", "cost")
"""Records that are too different to cache their annotations."""


def _notes_of(category: str, values: tuple[int | str, ...]) -> bytes:
    """Encode a record's fields other than times, without defaults of optional fields. `values`
    begins with the step; an evaluation's is named `evaluation`."""
    step, *_ = values
    assert isinstance(step, int)
    rest = _rest_of_notes if category in _UNIQUE else _cached_rest_of_notes
    return _step_note(step) + rest(category, values[1:])


@lru_cache(_NUM_NOTES_CACHED)
def _step_note(step: int) -> bytes:
    """Encode the annotation of a step, named `step` or `evaluation` (cached)."""
    return note_of(*split_step(step))


def _rest_of_notes(category: str, values: tuple[int | str, ...]) -> bytes:
    """Encode a record's fields after the step, without defaults."""
    names, defaults = _NAMES[category][1:], _DEFAULTS[category]
    return notes_of(
        (name, value)
        for name, value in zip(names, values, strict=True)
        if name not in defaults or value != defaults[name]
    )


_cached_rest_of_notes = lru_cache(_NUM_NOTES_CACHED)(_rest_of_notes)


@lru_cache(_NUM_NOTES_CACHED)
def _notes_of_wanted(kind: str, stage: int, chunk: int, microbatch: int) -> bytes:
    """Encode the annotations of the task in the hint's order (cached)."""
    return notes_of(
        [("kind", kind), ("stage", stage), ("chunk", chunk), ("microbatch", microbatch)]
    )


@lru_cache(_NUM_NOTES_CACHED)
def _notes_of_places(hint_position: int, dispatch_position: int) -> bytes:
    """Encode the annotations of a task's positions in the hint and in the dispatch (cached)."""
    return notes_of([("hint_position", hint_position), ("dispatch_position", dispatch_position)])


class _RankWriter:
    """Writes one rank's records to the tracks of its stage, each list in its own order."""

    def __init__(
        self,
        out: PacketWriter,
        sequence: int,
        shift_ns: int,
        info: RankInfo,
        infos: Sequence[RankInfo],
    ) -> None:
        self._out = out
        self._sequence = sequence
        self._shift_ns = shift_ns
        self._info = info
        self._stage_path = stage_path(info, infos)
        self._has_chunks = any(len(other.stages) > 1 for other in infos)
        self._peer_names = {other.rank: stage_name(other) for other in infos}
        self._row_assigners: defaultdict[tuple[Node, ...], RowAssigner] = defaultdict(RowAssigner)
        self._counters = Counters()
        self._counts: dict[str, int] = {}
        """The last written value of each counter."""
        self._arrows: defaultdict[TaskKey, list[int]] = defaultdict(list)
        """The arrows of received messages whose task is not written yet."""
        self._begun: list[TaskRecord] = []
        """The tasks of a step that continues in the next part."""

    def write_info(self) -> None:
        """Write the rank's place as an instant."""
        self._out.go_to_sequence(self._sequence)
        fields = asdict(self._info) | {"stages": " ".join(map(str, self._info.stages))}
        track = self._out.track(*self._stage_path, *PATH_OF_CATEGORY[RANK])
        self._out.instant(0, track, f"rank {self._info.rank}", RANK, notes_of(fields.items()))

    def write_sends(self, records: RankRecords) -> None:
        """Write a part's sends, where the messages' arrows begin, one track per receiver."""
        self._write_messages("send", records.sends, "send", "send to", sent_by)

    def write_receives(self, records: RankRecords) -> None:
        """Write a part's receives, through which the messages' arrows pass, one track per
        sender."""
        self._write_messages("receive", records.receives, "recv", "receive from", received_by)

    def write_rest(self, records: RankRecords, *, is_last: bool) -> None:
        """Write all records of a part other than messages. The tasks of a step that has not ended
        are stored for the next part, unless `is_last`."""
        self._out.go_to_sequence(self._sequence, self._shift_ns)
        tasks = self._ended_tasks(records, is_last=is_last)
        self._write_tasks(tasks, records)
        self._write_counters(replace(records, tasks=tasks), is_last=is_last)
        waits, agreements, phases = records.waits, records.agreements, records.phases
        self._write_slices("wait", waits, (wait.cause for wait in waits))
        self._write_slices("agreement", agreements, (f"agree {task_name(a)}" for a in agreements))
        self._write_slices("phase", phases, (phase.phase for phase in phases))
        self._write_slices("begun", records.begun, map(_begun_title, records.begun))
        self._write_instants("stimulus", records.stimuli, _stimulus_title)
        self._write_instants("cost", records.costs, lambda _: "recording cost")
        self._write_instants("loss", records.losses, lambda loss: f"lost {loss.num_lost} records")

    def _ended_tasks(self, records: RankRecords, *, is_last: bool) -> list[TaskRecord]:
        """The tasks to write now, after those stored from the part before. Unless `is_last`, stores
        those of the last step for the next part if that step has not ended."""
        tasks, self._begun = self._begun + records.tasks, []
        if is_last or not tasks:
            return tasks
        last = tasks[-1].step
        if any(phase.step == last and phase.phase == Phase.SCHEDULE for phase in records.phases):
            return tasks
        self._begun = [task for task in tasks if task.step == last]
        return [task for task in tasks if task.step != last]

    def _write_tasks(self, tasks: Sequence[TaskRecord], records: RankRecords) -> None:
        """Write tasks with the ends of their messages' arrows, and the hint's tasks beside them."""
        for receive in records.receives:
            flow = received_by(self._info.rank, receive).flow_id
            self._arrows[key_of(receive)].append(flow)
        dispatches = compare_with_hint(tasks)
        self._write_slices(
            "task",
            tasks,
            map(self._title, tasks),
            extra=map(self._notes_of_dispatch, dispatches),
            ends=(self._arrows.pop(key_of(task), ()) for task in tasks),
        )
        self._write_hints(tasks, dispatches)

    def _title(self, task: TaskRecord) -> str:
        """Format a task, with its chunk if any rank of the run has several."""
        return task_title(task, self._has_chunks)

    def _notes_of_dispatch(self, dispatch: HintedDispatch | None) -> bytes:
        """Encode a task's annotations besides its record: its rank, and if it skipped tasks, the
        names of at most 8 of them, with `...` for more."""
        rank = note_of("rank", self._info.rank)
        if dispatch is None or not dispatch.skipped:
            return rank
        names = [self._title(task) for task in dispatch.skipped]
        if len(names) > MAX_SKIPPED_NAMED:
            names[MAX_SKIPPED_NAMED:] = ["..."]
        return rank + note_of("skipped_tasks", " ".join(names))

    def _write_hints(
        self, tasks: Sequence[TaskRecord], dispatches: Sequence[HintedDispatch | None]
    ) -> None:
        """Write a slice for the task in the hint's order at the time of each dispatched task; none
        where the hint's order is unknown."""
        found = [
            (task, dispatch)
            for task, dispatch in zip(tasks, dispatches, strict=True)
            if dispatch is not None
        ]
        tracks = self._tracks_of(HINT, [task for task, _ in found])
        for (task, dispatch), track in zip(found, tracks, strict=True):
            wanted = dispatch.wanted
            notes = (
                _notes_of_wanted(wanted.kind, wanted.stage, wanted.chunk, wanted.microbatch)
                + _step_note(wanted.step)
                + _notes_of_places(wanted.hint_position, dispatch.wanted_place)
            )
            title = f"hint {self._title(wanted)}"
            self._out.slice(task.start_ns, task.end_ns, track, title, HINT, notes)

    def _write_counters(self, records: RankRecords, *, is_last: bool) -> None:
        """Write the counters of a part; a point that repeats the last value is skipped."""
        for name, points in self._counters.add(records, is_last=is_last).items():
            if not points:
                continue
            place = COUNTERS_IN_ORDER.index(name)
            track = self._out.track(*self._stage_path, COUNTERS, (place, name), is_counter=True)
            last = self._counts.get(name)
            for time_ns, value in points:
                if value != last:
                    self._out.count(time_ns, track, value)
                    last = value
            self._counts[name] = points[-1][1]

    def _write_messages(
        self,
        category: str,
        messages: Sequence[Any],
        verb: str,
        direction: str,
        key: Callable[[int, Any], MessageKey],
    ) -> None:
        """Write a slice per message, on one track per peer, and its arrow. `key` makes the
        message's key, from which the arrow's id follows."""
        self._out.go_to_sequence(self._sequence, self._shift_ns)
        links = {
            peer: ((peer, f"{direction} {self._peer_names.get(peer, f'rank {peer}')}"),)
            for peer in {message.peer for message in messages}
        }
        self._write_slices(
            category,
            messages,
            (f"{verb} {task_name(message)}" for message in messages),
            branches=[links[message.peer] for message in messages],
            passes=((key(self._info.rank, message).flow_id,) for message in messages),
        )

    def _write_slices(
        self,
        category: str,
        records: Sequence[Any],
        titles: Iterable[str],
        *,
        branches: Sequence[tuple[Node, ...]] | None = None,
        extra: Iterable[bytes] = repeat(b""),
        passes: Iterable[Sequence[int]] = repeat(()),
        ends: Iterable[Sequence[int]] = repeat(()),
    ) -> None:
        """Write a slice per record, below the category's track of the stage or its branch;
        overlapping slices get different rows. `extra` are encoded annotations, `passes` and `ends`
        arrows."""
        tracks = self._tracks_of(category, records, branches)
        rows = zip(records, tracks, titles, extra, passes, ends, strict=False)
        for record, track, title, more, passed, ended in rows:
            start_ns, end_ns, *_ = record
            notes = _notes_of(category, record[2:]) + more
            self._out.slice(
                start_ns, end_ns, track, title, category, notes, passes=passed, ends=ended
            )

    def _write_instants(
        self, category: str, records: Sequence[Any], title: Callable[[Any], str]
    ) -> None:
        """Write an instant per record on the category's track; nothing without records."""
        if not records:
            return
        track = self._out.track(*self._stage_path, *PATH_OF_CATEGORY[category])
        for record in records:
            notes = _notes_of(category, record[1:])
            self._out.instant(record.time_ns, track, title(record), category, notes)

    def _tracks_of(
        self,
        category: str,
        records: Sequence[Any],
        branches: Sequence[tuple[Node, ...]] | None = None,
    ) -> list[int]:
        """The track of each record: its branch's, in a row where no other slice overlaps it. Writes
        the descriptors of new tracks."""
        members: defaultdict[tuple[Node, ...], list[int]] = defaultdict(list)
        for index, branch in enumerate(branches or repeat((), len(records))):
            members[branch].append(index)
        tracks = [0] * len(records)
        for branch, indices in members.items():
            path = (*self._stage_path, *PATH_OF_CATEGORY[category], *branch)
            rows = self._row_assigners[path].assign([records[index][:2] for index in indices])
            track_of = [self._out.track(*path, row=row) for row in range(max(rows) + 1)]
            for index, row in zip(indices, rows, strict=True):
                tracks[index] = track_of[row]
        return tracks


def write_run_files(run: RunDir, recording: Recording) -> None:
    """Write run.json and the trace of an imported or simulated run, and update the link `latest`
    beside its directory. Raises RrfpError if the trace cannot be written; may raise OSError."""
    write_trace(run.trace, recording)
    write_whole(run.run_json, f"{json.dumps(recording.settings, indent=2)}\n".encode())
    update_latest(run.path.parent)
