"""Decodes protocol-buffer messages into columns, very many messages at once.

One message object per packet and one attribute per field is what makes reading a trace in Python
slow. Here the messages of a buffer are parsed side by side: the first field of each, then the
second of each, and so on, with arrays where a parser has variables
(https://protobuf.dev/programming-guides/encoding).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Rows = NDArray[np.intp]
Words = NDArray[np.uint64]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_BYTES_OF_A_VARINT = 10
_MOST_FIELDS = 4096
"""Of one message; each takes a round of its own, and one of a trace has a few dozen."""

_WORD = 8
"""Bytes of a word; texts are compared word by word."""
LONGEST_NAME = 2 * _WORD
"""The longest name, in bytes, that `find` can match."""
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], np.uint64)
"""By length of a text: a mask of the bytes of a word that belong to it."""
_ODD, _ODD_TOO = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd, so that multiplying by it keeps different words different."""


class DecodeError(ValueError):
    """The bytes are not valid messages."""


class Spans(NamedTuple):
    """Where messages or texts are in a buffer: arrays of equal length."""

    starts: Numbers
    ends: Numbers

    def take(self, rows: Rows) -> "Spans":
        return Spans(self.starts[rows], self.ends[rows])


class Fields(NamedTuple):
    """Fields of messages: arrays of equal length, the fields of one message in their order."""

    owners: Numbers
    """The message that each belongs to."""
    numbers: Numbers
    """The field's number."""
    values: Numbers
    """A number's value, signed; 0 if the field is not a number."""
    spans: Spans
    """Where the contents of a text or a message are."""

    def take(self, rows: Rows) -> "Fields":
        return Fields(
            self.owners[rows], self.numbers[rows], self.values[rows], self.spans.take(rows)
        )

    def of(self, number: int) -> "Fields":
        """The fields with this number."""
        return self.take(np.flatnonzero(self.numbers == number))

    def last(self, number: int, count: int, default: int = 0) -> Numbers:
        """By message (of `count`): the value of its last field with this number."""
        found = np.full(count, default, np.int64)
        chosen = self.of(number)
        found[chosen.owners] = chosen.values
        return found


def buffer_of(data: bytes) -> Bytes:
    """The bytes as an array, padded so that a word can be read at each of them."""
    return np.frombuffer(data + bytes(_WORD), np.uint8)


def read_fields(data: Bytes, messages: Spans) -> Fields:
    """All fields of these messages in a buffer from `buffer_of`.

    Raises DecodeError if a field extends beyond its message or has a wire type that proto3 does not
    use, and for a message of more fields than any has.
    """
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
    """By text: the index of the name that equals it, or -1. A name has at most `LONGEST_NAME`
    bytes. Names are matched by a mixed word; of names crafted to collide, only one is found."""
    if not names:
        return np.full(len(texts.starts), -1, np.intp)
    found = _words_of(data, texts)
    order, known = _names(names)
    mixed = known.mixed[order]
    places = order[np.minimum(np.searchsorted(mixed, found.mixed), len(names) - 1)]
    is_same = (
        (found.firsts == known.firsts[places])
        & (found.lasts == known.lasts[places])
        & (found.lengths == known.lengths[places])
    )
    return np.where(is_same, places, -1)


class _TextWords(NamedTuple):
    """What identifies texts of up to 16 bytes."""

    firsts: Words
    lasts: Words
    """The last word of texts longer than one word."""
    lengths: Words

    @property
    def mixed(self) -> Words:
        """Everything mixed into one word, to search by."""
        return (self.firsts ^ (self.lasts * _ODD)) * _ODD ^ self.lengths * _ODD_TOO


@cache
def _names(names: tuple[str, ...]) -> tuple[Rows, _TextWords]:
    """The names' identities, and the names' order by mixed word."""
    encoded = [name.encode() for name in names]
    assert max(map(len, encoded)) <= LONGEST_NAME
    ends = np.cumsum([len(name) for name in encoded])
    starts = np.concatenate(([0], ends[:-1]))
    words = _words_of(buffer_of(b"".join(encoded)), Spans(starts, ends))
    return np.argsort(words.mixed), words


def _words_of(data: Bytes, texts: Spans) -> _TextWords:
    lengths = (texts.ends - texts.starts).astype(np.uint64)
    words = _words(data, _WORD)
    firsts = words[texts.starts] & _MASKS[np.minimum(lengths, _WORD)]
    lasts = np.where(lengths > _WORD, words[np.maximum(texts.ends - _WORD, 0)], 0)
    return _TextWords(firsts, lasts, lengths)


def _read_contents(data: Bytes, wires: Numbers, at: Numbers) -> tuple[Numbers, Spans]:
    """The numbers and contents of the fields of these wire types that begin at these places."""
    present = np.flatnonzero(np.bincount(wires, minlength=8))
    if len(present) == 1:
        return _read_alike(data, int(present[0]), at)
    values, starts, ends = np.zeros(len(at), np.int64), at.copy(), at.copy()
    for wire in present.tolist():
        rows = np.flatnonzero(wires == wire)
        values[rows], (starts[rows], ends[rows]) = _read_alike(data, wire, at[rows])
    return values, Spans(starts, ends)


def _read_alike(data: Bytes, wire: int, at: Numbers) -> tuple[Numbers, Spans]:
    """The same, for fields of one wire type."""
    if wire == _VARINT:
        values, ends = read_varints(data, at)
        return values, Spans(at, ends)
    if wire == _LENGTH:
        lengths, starts = read_varints(data, at)
        # A length greater than the buffer must not wrap around.
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
    """The numbers that begin at these places, and the places after them."""
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
    """The number of `size` bytes that begins at each byte."""
    return np.ndarray((len(data) - size + 1,), f"<u{size}", data, strides=(1,))


def _joined(rounds: Sequence[Fields]) -> Fields:
    owners, numbers, values = (
        np.concatenate([each[place] for each in rounds]) for place in range(3)
    )
    starts, ends = (np.concatenate([each.spans[place] for each in rounds]) for place in range(2))
    return Fields(owners, numbers, values, Spans(starts, ends))
