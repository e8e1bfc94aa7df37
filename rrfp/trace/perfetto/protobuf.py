"""Decodes many protocol-buffer messages at once, into columns.

Reading a trace with one Python object per packet is slow. Here the messages of a buffer are parsed
in parallel with NumPy: the first field of each message, then the second of each, and so on
(https://protobuf.dev/programming-guides/encoding).
"""

import mmap
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rrfp.errors import RrfpError
from rrfp.trace.perfetto.format import FIELDS, RANK, RUN
from rrfp.trace.records import EVALUATION, RECORD_TYPES
from rrfp.trace.safe_files import open_regular

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Rows = NDArray[np.intp]
Words = NDArray[np.uint64]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_BYTES_OF_A_VARINT = 10
_MOST_FIELDS = 4096
"""The greatest number of fields in a message. Each takes a round; a message in a trace has
dozens."""

_WORD = 8
"""The size of a word in bytes; texts are compared word by word."""
LONGEST_NAME = 2 * _WORD
"""The longest name, in bytes, that `find` can match."""
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], np.uint64)
"""By a text's length: the mask of its bytes in a word."""
_ODD, _ODD_TOO = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd, so that multiplying by it keeps different words different."""


class DecodeError(ValueError):
    """The bytes are not valid messages."""


class Spans(NamedTuple):
    """The positions of messages or texts in a buffer: arrays of equal length."""

    starts: Numbers
    ends: Numbers

    def take(self, rows: Rows) -> "Spans":
        """The spans at these indices."""
        return Spans(self.starts[rows], self.ends[rows])


class Fields(NamedTuple):
    """The fields of messages: arrays of equal length. Fields of one message are in order."""

    owners: Numbers
    """The index of the message of each field."""
    numbers: Numbers
    """The number of each field."""
    values: Numbers
    """The value of each numeric field, signed; 0 for other fields."""
    spans: Spans
    """The position of the content of each text or message field."""

    def take(self, rows: Rows) -> "Fields":
        """The fields at these indices."""
        return Fields(
            self.owners[rows], self.numbers[rows], self.values[rows], self.spans.take(rows)
        )

    def of(self, number: int) -> "Fields":
        """The fields with this number."""
        return self.take(np.flatnonzero(self.numbers == number))

    def last(self, number: int, count: int, default: int = 0) -> Numbers:
        """The value of the last field with this number in each of `count` messages; `default` for a
        message without one."""
        found = np.full(count, default, np.int64)
        chosen = self.of(number)
        found[chosen.owners] = chosen.values
        return found


def buffer_of(data: bytes) -> Bytes:
    """The bytes as an array, padded so that a word can be read at each position."""
    return np.frombuffer(data + bytes(_WORD), np.uint8)


def read_fields(data: Bytes, messages: Spans) -> Fields:
    """All fields of these messages in a buffer from `buffer_of`. Raises DecodeError if a field
    extends beyond its message or has a wire type that proto3 does not use, and for more than
    `_MOST_FIELDS` fields."""
    owners, (at, ends) = np.arange(len(messages.starts)), messages
    rounds: list[Fields] = []
    while len(rounds) <= _MOST_FIELDS:
        unread = np.flatnonzero(at < ends)
        if unread.size < at.size:
            owners, at, ends = owners[unread], at[unread], ends[unread]
        tags, starts = read_varints(data, at)
        values, spans = _read_contents(data, tags & 7, starts)
        if (spans.ends > ends).any():
            raise DecodeError
        rounds.append(Fields(owners, tags >> 3, values, spans))
        if not at.size:
            return _joined(rounds)
        at = spans.ends
    raise DecodeError


def find(data: Bytes, texts: Spans, names: tuple[str, ...]) -> Rows:
    """The index of the equal name for each text, or -1. A name has at most `LONGEST_NAME` bytes.
    Names are found by a hash; if names are crafted to collide, only one of them is found."""
    if not names:
        return np.full(len(texts.starts), -1, np.intp)
    found = _words_of(data, texts)
    order, known = _names(names)
    hashes = known.hashes[order]
    places = order[np.minimum(np.searchsorted(hashes, found.hashes), len(names) - 1)]
    is_same = (
        (found.firsts == known.firsts[places])
        & (found.lasts == known.lasts[places])
        & (found.lengths == known.lengths[places])
    )
    return np.where(is_same, places, -1)


class _TextWords(NamedTuple):
    """Words that identify texts of up to 16 bytes."""

    firsts: Words
    lasts: Words
    """The last word of each text that is longer than a word; else 0."""
    lengths: Words

    @property
    def hashes(self) -> Words:
        """A hash of each text."""
        return (self.firsts ^ (self.lasts * _ODD)) * _ODD ^ self.lengths * _ODD_TOO


@cache
def _names(names: tuple[str, ...]) -> tuple[Rows, _TextWords]:
    """The order of the names by hash, and their words (cached). Names have at most 16 bytes."""
    encoded = [name.encode() for name in names]
    assert max(map(len, encoded)) <= LONGEST_NAME
    ends = np.cumsum([len(name) for name in encoded])
    starts = np.concatenate(([0], ends[:-1]))
    words = _words_of(buffer_of(b"".join(encoded)), Spans(starts, ends))
    return np.argsort(words.hashes), words


def _words_of(data: Bytes, texts: Spans) -> _TextWords:
    """The identifying words of texts in a buffer."""
    lengths = (texts.ends - texts.starts).astype(np.uint64)
    words = _words(data, _WORD)
    firsts = words[texts.starts] & _MASKS[np.minimum(lengths, _WORD)]
    lasts = np.where(lengths > _WORD, words[np.maximum(texts.ends - _WORD, 0)], 0)
    return _TextWords(firsts, lasts, lengths)


def _read_contents(data: Bytes, wires: Numbers, at: Numbers) -> tuple[Numbers, Spans]:
    """The values and spans of fields, by their wire types and the positions of their contents.
    Raises DecodeError for a content beyond the buffer, or an unknown wire type."""
    present = np.flatnonzero(np.bincount(wires, minlength=8))
    if len(present) == 1:
        return _read_alike(data, int(present[0]), at)
    values, starts, ends = np.zeros(len(at), np.int64), at.copy(), at.copy()
    for wire in present.tolist():
        rows = np.flatnonzero(wires == wire)
        values[rows], (starts[rows], ends[rows]) = _read_alike(data, wire, at[rows])
    return values, Spans(starts, ends)


def _read_alike(data: Bytes, wire: int, at: Numbers) -> tuple[Numbers, Spans]:
    """Like `_read_contents`, for fields of one wire type."""
    if wire == _VARINT:
        values, ends = read_varints(data, at)
        return values, Spans(at, ends)
    if wire == _LENGTH:
        lengths, starts = read_varints(data, at)
        # Check huge lengths first, because adding them would overflow.
        if (lengths.view(np.uint64) > len(data)).any():
            raise DecodeError
        return np.zeros(len(at), np.int64), Spans(starts, starts + lengths)
    if wire in (_FIXED64, _FIXED32):
        size = 8 if wire == _FIXED64 else 4
        if at.max() + size > len(data):
            raise DecodeError
        return _words(data, size)[at].astype(np.int64), Spans(at, at + size)
    raise DecodeError


def read_varints(data: Bytes, at: Numbers) -> tuple[Numbers, Numbers]:
    """Decode the varints at these positions. Returns their values and the positions after them.
    Raises DecodeError for one beyond the buffer or of more than 10 bytes."""
    if at.size and at.max() >= len(data):
        raise DecodeError
    octets = data[at]
    values = (octets & 0x7F).astype(np.int64)
    at = at + 1
    rows = np.flatnonzero(octets >= 0x80)
    for place in range(1, _MOST_BYTES_OF_A_VARINT):
        if not rows.size:
            break
        where = at[rows]
        if where.max() >= len(data):
            raise DecodeError
        octets = data[where]
        values[rows] |= (octets & 0x7F).astype(np.int64) << (7 * place)
        at[rows] = where + 1
        rows = rows[octets >= 0x80]
    if rows.size:
        raise DecodeError
    return values, at


def _words(data: Bytes, size: int) -> Words:
    """A view of the buffer, not a copy, with the little-endian number of `size` bytes at each
    position."""
    return np.ndarray((len(data) - size + 1,), f"<u{size}", data, strides=(1,))


def _joined(rounds: Sequence[Fields]) -> Fields:
    """Concatenate the fields of all rounds."""
    owners, numbers, values = (
        np.concatenate([each[place] for each in rounds]) for place in range(3)
    )
    starts, ends = (np.concatenate([each.spans[place] for each in rounds]) for place in range(2))
    return Fields(owners, numbers, values, Spans(starts, ends))


# Decoding the track events of a trace into columns, one batch of packets at a time.


_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
INSTANT = pb.TrackEvent.TYPE_INSTANT

_PACKET_TAG = 0x0A
_GZIP_MAGIC = b"\x1f\x8b"


def _numbers(message: Any, *names: str) -> list[int]:
    """The field numbers of these fields of a message type."""
    fields = message.DESCRIPTOR.fields_by_name
    return [fields[name].number for name in names]


_TIMESTAMP, _SEQUENCE, _EVENT = _numbers(
    pb.TracePacket, "timestamp", "trusted_packet_sequence_id", "track_event"
)
_TYPE, _TRACK, _CATEGORIES, _NOTES, *_FLOWS = _numbers(
    pb.TrackEvent,
    *("type", "track_uuid", "categories", "debug_annotations"),
    *("flow_ids", "terminating_flow_ids"),
)
# An annotation's number or text is in one of these fields.
_NOTE_NAME, INT, TEXT = _numbers(pb.DebugAnnotation, "name", "int_value", "string_value")

CATEGORIES_READ = (*RECORD_TYPES, RUN, RANK)
"""The categories of events that are read; annotations of other events are skipped."""
_FIELD_NAMES = tuple(sorted({EVALUATION, *(n for fields in FIELDS.values() for n, _ in fields)}))


class Packets(NamedTuple):
    """Packets in one buffer, in order."""

    octets: bytes
    spans: Spans

    def behind(self, packets: Sequence[bytes]) -> "Packets":
        """These packets with the encoded `packets` before them."""
        if not packets:
            return self
        ends = np.cumsum([len(packet) for packet in packets])
        starts = np.concatenate(([0], ends, self.spans.starts + ends[-1]))
        return Packets(
            b"".join(packets) + self.octets,
            Spans(np.delete(starts, len(ends)), np.concatenate((ends, self.spans.ends + ends[-1]))),
        )


class EventBatch:
    """The track events of some packets, in columns."""

    def __init__(self, packets: Packets) -> None:
        self.octets = packets.octets
        self.data = data = buffer_of(packets.octets)
        self._spans = packets.spans
        fields = read_fields(data, self._spans)
        events = fields.of(_EVENT)
        num_packets, self._num_events = len(packets.spans.starts), len(events.owners)
        self._packets = events.owners
        self.times = fields.last(_TIMESTAMP, num_packets)[events.owners]
        self.sequences = fields.last(_SEQUENCE, num_packets)[events.owners]
        self._fields = read_fields(data, events.spans)
        self.types = self._fields.last(_TYPE, self._num_events)
        self._tracks = self._fields.last(_TRACK, self._num_events)
        self.categories = self._find_categories(data)
        """The index in `CATEGORIES_READ` of each event's first category, or -1."""
        self.num_stray_ends = 0
        self.unended: list[int] = []
        """The slices that begin in these packets and do not end in them."""
        self._read_notes(data)

    def packet(self, event: int) -> bytes:
        """The encoded packet that holds an event."""
        packet = self._packets[event]
        return self.octets[self._spans.starts[packet] : self._spans.ends[packet]]

    def instants_in(self, *categories: str) -> Rows:
        """The indices of the instant events of these categories."""
        chosen = [CATEGORIES_READ.index(name) for name in categories]
        return np.flatnonzero(np.isin(self.categories, chosen) & (self.types == INSTANT))

    def flows(self, num_packets_passed: int) -> Numbers:
        """The flow ids of all events, both passing and terminating ones, after the first
        `num_packets_passed` packets."""
        found = [self._fields.of(number) for number in _FLOWS]
        return np.concatenate(
            [each.values[self._packets[each.owners] >= num_packets_passed] for each in found]
        )

    def pair_slices(self) -> tuple[Rows, Rows]:
        """Pair the events that begin slices with those that end them on the same track, ordered by
        the end. Returns the indices of both; sets `unended` and `num_stray_ends`."""
        # Most slices end in the next event. The rest nest, like all slices of a track.
        slices = np.flatnonzero((self.types == _BEGIN) | (self.types == _END))
        begins, tracks = self.types[slices] == _BEGIN, self._tracks[slices]
        at_once = np.flatnonzero(begins[:-1] & ~begins[1:] & (tracks[:-1] == tracks[1:]))
        rest = np.delete(slices, np.concatenate((at_once, at_once + 1)))
        stacks: defaultdict[int, list[int]] = defaultdict(list)
        nested = []
        for event, track, event_type in zip(
            rest.tolist(), self._tracks[rest].tolist(), self.types[rest].tolist(), strict=True
        ):
            if event_type == _BEGIN:
                stacks[track].append(event)
            elif stacks[track]:
                nested.append((stacks[track].pop(), event))
            else:
                self.num_stray_ends += 1
        self.unended = sorted(chain.from_iterable(stacks.values()))
        pairs = np.concatenate(
            (
                np.stack((slices[at_once], slices[at_once + 1]), axis=1),
                np.array(nested, np.intp).reshape(-1, 2),
            )
        )
        pairs = pairs[np.argsort(pairs[:, 1])]
        return pairs[:, 0], pairs[:, 1]

    def notes(self, events: Rows, name: str, number: int) -> Rows:
        """The annotation of each event with this name and type (`INT` or `TEXT`), or -1."""
        found = self._notes[events, _FIELD_NAMES.index(name)]
        return np.where(self._note_types[found] == number, found, -1)

    def _find_categories(self, data: Bytes) -> Rows:
        """The index in `CATEGORIES_READ` of each event's first category; -1 for others."""
        categories = self._fields.of(_CATEGORIES)
        owners, firsts = np.unique(categories.owners, return_index=True)
        found = np.full(self._num_events, -1, np.intp)
        found[owners] = find(data, categories.spans.take(firsts), CATEGORIES_READ)
        return found

    def _read_notes(self, data: Bytes) -> None:
        """Read the integer and text annotations of events in known categories, and set the table of
        each event's annotation by name; others are skipped."""
        notes = self._fields.of(_NOTES)
        notes = notes.take(np.flatnonzero(self.categories[notes.owners] >= 0))
        num_notes = len(notes.owners)
        fields = read_fields(data, notes.spans)
        names = fields.of(_NOTE_NAME)
        columns = np.full(num_notes, -1, np.intp)
        columns[names.owners] = find(data, names.spans, _FIELD_NAMES)
        # An additional last entry, so that index -1 (no annotation) has no type.
        self._note_types = np.zeros(num_notes + 1, np.int64)
        for number in (INT, TEXT):
            self._note_types[fields.of(number).owners] = number
        self.note_values = fields.last(INT, num_notes)
        texts = fields.of(TEXT)
        starts, ends = np.zeros(num_notes, np.int64), np.zeros(num_notes, np.int64)
        starts[texts.owners], ends[texts.owners] = texts.spans
        self.note_texts = Spans(starts, ends)
        self._notes = np.full((self._num_events, len(_FIELD_NAMES)), -1, np.intp)
        known = np.flatnonzero(columns >= 0)
        self._notes[notes.owners[known], columns[known]] = known


def cut_packets(path: Path, data: mmap.mmap, start: int, num_bytes: int) -> tuple[Packets, int]:
    """The next packets of a trace, at least `num_bytes` in all if there are as many, and the
    position of their end. Raises RrfpError if it is not a Perfetto trace or ends within a packet.
    This loop runs once per packet and dominates the time of reading."""
    octets = data[start : start + num_bytes]
    size = len(octets)
    tags: list[int] = []
    end = 0
    while end < size:
        tags.append(end)
        if octets[end] != _PACKET_TAG:
            raise foreign(path)
        begin = end + 2
        # Decode a length of one or two bytes here; read a longer one, or one that is cut off,
        # below.
        if begin < size:
            length = octets[begin - 1]
            if length >= 0x80:
                length += (octets[begin] << 7) - 0x80
                begin += 1
        if begin >= size or length >= 1 << 14:
            begin, length = _read_length(path, data, start + end + 1)
            begin -= start
        end = begin + length
    if start + end > len(data):
        raise truncated(path)
    if end > size:
        octets = data[start : start + end]
    starts = np.array(tags)
    _, begins = read_varints(buffer_of(octets), starts + 1)
    return Packets(octets, Spans(begins, np.append(starts[1:], end))), start + end


def _read_length(path: Path, data: mmap.mmap, position: int) -> tuple[int, int]:
    """Read a packet's length. Returns the position of its content, and the length. Raises RrfpError
    if the trace ends there, or the number is too long."""
    length = 0
    for shift in range(0, 35, 7):
        if position >= len(data):
            raise truncated(path)
        octet = data[position]
        position += 1
        length |= (octet & 0x7F) << shift
        if octet < 0x80:
            return position, length
    raise foreign(path)


def foreign(path: Path) -> RrfpError:
    """The error for a file that is not a Perfetto trace. Reads its beginning, to suggest gunzip for
    a compressed one."""
    with open_regular(path) as file:
        is_gzipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    remedy = "; unpack it first, with gunzip" if is_gzipped else ""
    return RrfpError(f"{path} is not an uncompressed Perfetto trace{remedy}")


def truncated(path: Path) -> RrfpError:
    """The error for a trace that ends within a packet."""
    return RrfpError(f"the trace {path} is truncated: it ends in the middle of a packet")
