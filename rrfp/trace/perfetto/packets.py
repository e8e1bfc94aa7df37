"""Assembles the packets of a trace and appends them to a file.

Concatenated protobuf messages are read as one message
(https://protobuf.dev/programming-guides/encoding/#last-one-wins). So a packet is assembled from
parts, and a part that recurs is encoded once. That takes a quarter of the time of one message
object per packet.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import starmap
from struct import pack
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.trace.perfetto.tracks import Node, Tracks

Fields = Iterable[tuple[str, int | str]]
"""Debug annotations."""

_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
_INSTANT = pb.TrackEvent.TYPE_INSTANT
_COUNTER = pb.TrackEvent.TYPE_COUNTER

_VARINT, _FIXED64, _LENGTH = 0, 1, 2

_NUM_BYTES_OF_A_BATCH = 1 << 20
_NUM_PARTS_KEPT = 1 << 14


# A varint has seven bits per byte, lowest first. Tables give two bytes at a time.
_LAST_BYTES = [
    bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    for number in range(1 << 14)
]
_FIRST_BYTES = [bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(1 << 14)]


def _varint(number: int) -> bytes:
    if number < 1 << 14:
        if number < 0:
            raise ValueError(f"a time must not be negative: {number}")
        return _LAST_BYTES[number]
    if number < 1 << 28:
        return _FIRST_BYTES[number & 0x3FFF] + _LAST_BYTES[number >> 14]
    return (
        _FIRST_BYTES[number & 0x3FFF]
        + _FIRST_BYTES[number >> 14 & 0x3FFF]
        + _kept_varint(number >> 28)
    )


_kept_varint = lru_cache(1 << 10)(_varint)
"""The rest of a long one: times that follow each other have it in common."""


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


_PACKET_TAG = _tag(pb.Trace.PACKET_FIELD_NUMBER, _LENGTH)
_EVENT_TAG = _tag(pb.TracePacket.TRACK_EVENT_FIELD_NUMBER, _LENGTH)
_TIME_TAG = _tag(pb.TracePacket.TIMESTAMP_FIELD_NUMBER, _VARINT)
_PASSES_TAG = _tag(pb.TrackEvent.FLOW_IDS_FIELD_NUMBER, _FIXED64)
_ENDS_TAG = _tag(pb.TrackEvent.TERMINATING_FLOW_IDS_FIELD_NUMBER, _FIXED64)
_NOTE_TAG = _tag(pb.TrackEvent.DEBUG_ANNOTATIONS_FIELD_NUMBER, _LENGTH)
_INT_TAG = _tag(pb.DebugAnnotation.INT_VALUE_FIELD_NUMBER, _VARINT)


class PacketWriter:
    """Appends packets to a file in batches; `flush` writes the rest. Its tracks are numbered from
    `first_track` on."""

    def __init__(self, file: IO[bytes], first_track: int = 1) -> None:
        self._file = file
        self._batch = bytearray()
        self._tracks = Tracks(first_track)
        self._begun: set[int] = set()
        self._sequence = self._timed = b""
        self._shift_ns = 0

    def go_to_sequence(self, sequence: int, shift_ns: int = 0) -> None:
        """Write the following packets to this sequence, and move their times by `shift_ns`."""
        self._shift_ns = shift_ns
        self._sequence = _encoded(pb.TracePacket(trusted_packet_sequence_id=sequence))
        self._timed = self._sequence + _TIME_TAG
        if sequence not in self._begun:
            self._begun.add(sequence)
            cleared = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._append(_encoded(pb.TracePacket(sequence_flags=cleared)))

    def track(self, *path: Node, lane: int = 0, is_counter: bool = False) -> int:
        """The uuid of the track at a path of (place, name); writes its descriptor at first use."""
        uuid = self._tracks.get(*path, lane=lane, is_counter=is_counter)
        for track in self._tracks.take_new():
            packet = pb.TracePacket()
            descriptor = packet.track_descriptor
            descriptor.uuid = track.uuid
            if track.parent:
                descriptor.parent_uuid = track.parent
            descriptor.name = _text(track.name)
            descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
            descriptor.sibling_order_rank = track.place
            if track.is_counter:
                descriptor.counter.unit = pb.CounterDescriptor.UNIT_COUNT
            self._append(_encoded(packet))
        return uuid

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
        """Write a slice with these annotations (`notes_of`), that some arrows pass through and
        others end at."""
        event = notes + _heading(_BEGIN, track, name, category)
        for flow in passes:
            event += _PASSES_TAG + pack("<Q", flow)
        for flow in ends:
            event += _ENDS_TAG + pack("<Q", flow)
        self._append_event(start_ns, _as_part(event))
        self._append_event(end_ns, _nameless_part(_END, track))

    def instant(self, time_ns: int, track: int, name: str, category: str, notes: bytes) -> None:
        self._append_event(time_ns, _as_part(notes + _heading(_INSTANT, track, name, category)))

    def count(self, time_ns: int, track: int, value: int) -> None:
        """Write a counter's value."""
        self._append_event(time_ns, _nameless_part(_COUNTER, track, value))

    def flush(self) -> None:
        self._file.write(self._batch)
        self._batch.clear()

    def _append_event(self, time_ns: int, part: bytes) -> None:
        packet = self._timed + _varint(time_ns + self._shift_ns) + part
        self._batch += _PACKET_TAG + _varint(len(packet)) + packet
        if len(self._batch) >= _NUM_BYTES_OF_A_BATCH:
            self.flush()

    def _append(self, packet: bytes) -> None:
        """Append a packet to the current sequence."""
        packet = self._sequence + packet
        self._batch += _PACKET_TAG + _varint(len(packet)) + packet


def notes_of(fields: Fields) -> bytes:
    """These annotations, as a part of an event."""
    return b"".join(starmap(note_of, fields))


def note_of(name: str, value: int | str) -> bytes:
    """One annotation, as a part of an event."""
    if isinstance(value, str):
        return _text_note(name, value)
    # A negative number is encoded as if it were unsigned.
    content = _INT_TAG + _varint(value & 0xFFFFFFFFFFFFFFFF) + _note_name(name)
    return _NOTE_TAG + _varint(len(content)) + content


@lru_cache(_NUM_PARTS_KEPT)
def _note_name(name: str) -> bytes:
    return _encoded(pb.DebugAnnotation(name=name))


@lru_cache(_NUM_PARTS_KEPT)
def _text_note(name: str, value: str) -> bytes:
    note = pb.DebugAnnotation(name=name, string_value=_text(value))
    return _encoded(pb.TrackEvent(debug_annotations=[note]))


@lru_cache(_NUM_PARTS_KEPT)
def _heading(event_type: int, track: int, name: str, category: str) -> bytes:
    return _encoded(
        pb.TrackEvent(type=event_type, track_uuid=track, name=_text(name), categories=[category])
    )


@lru_cache(_NUM_PARTS_KEPT)
def _nameless_part(event_type: int, track: int, value: int | None = None) -> bytes:
    return _as_part(_encoded(pb.TrackEvent(type=event_type, track_uuid=track, counter_value=value)))


def _text(value: str) -> str:
    """Text that can be encoded. JSON, and names of files, may hold halves of characters."""
    return value.encode(errors="replace").decode()


def _as_part(event: bytes) -> bytes:
    """This event, as a part of a packet."""
    return _EVENT_TAG + _varint(len(event)) + event


def _encoded(message: Any) -> bytes:
    return bytes(message.SerializeToString())
