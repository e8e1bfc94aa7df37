"""A rank's flight record, `records/rank-<N>.ring`: its last records, which survive its death.

The file is mapped, so what is in it outlives the process, however that ends. It is a header and a
ring of slots of one size, with a record each. A slot begins with the number of its record and ends
with that number's complement: one that was being written when the process died has no such pair,
and is left out. Texts stand once, in the header.

The header also takes a note of why recording was switched off. The file has all of its blocks from
the start, so this can be written where the disk is full, and a full disk kills nobody.
"""

import itertools
import mmap
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rrfp.trace.perfetto.format import bounds_of
from rrfp.trace.records import RECORD_TYPES, Record, num_times
from rrfp.trace.safe_files import open_own, open_regular

_MAGIC = b"rrfpring"
_VERSION = 1
FILE_BYTES = 4 * 2**20
"""Room for 29,000 records: seconds of most runs, and 0.3 s of 100,000 a second."""
_HEADER_BYTES = 4096
_HEAD = struct.Struct("<8sI?")
"""Magic, version, and whether the rank has closed its records."""
_OFF_AT, _OFF = 64, struct.Struct("<?q400p")
"""Whether recording was switched off, in which step, and why."""
_TEXTS_AT, _TEXT = 1024, struct.Struct("<32p")
_MOST_TEXTS = (_HEADER_BYTES - _TEXTS_AT) // _TEXT.size
_LONGEST_TEXT = _TEXT.size - 1

_BEGIN = struct.Struct("<qB")
"""A record's number, counted from 1, and its type."""
_SLOT_BYTES = 144
MOST_RECORDS = (FILE_BYTES - _HEADER_BYTES) // _SLOT_BYTES


class _Form:
    """How a type of record lies in a slot: its texts by their places in the header, then its
    numbers. A single text stands there twice."""

    def __init__(self, code: int, record_type: type[Record]) -> None:
        fields = record_type._fields
        are_texts = [record_type.__annotations__[name] is str for name in fields]
        texts = [place for place, is_text in enumerate(are_texts) if is_text]
        self.code = code
        self.record_type: type[Any] = record_type
        self.first_text, self.last_text = texts[0], texts[-1]
        self.numbers = [place for place, is_text in enumerate(are_texts) if not is_text]
        self.bounds = [bounds_of(fields[place]) for place in self.numbers]
        self.numbers_of = itemgetter(*self.numbers)
        self.layout = struct.Struct(f"{_BEGIN.format}BB{len(self.numbers)}qq")
        assert self.layout.size <= _SLOT_BYTES


_FORMS = [
    _Form(code, record_type)
    for code, (name, record_type) in enumerate(RECORD_TYPES.items(), start=1)
    if name not in ("cost", "loss")
]
"""Of what is taken while a step runs; what a flush adds is in the file that it writes."""


def ring_of(spill: Path) -> Path:
    """The flight record that lies next to a rank's records."""
    return spill.with_suffix(".ring")


class FlightRing:
    """Keeps a rank's last records in its mapped file. Any thread may put one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot have all of its blocks."""
        self._path = path
        with open_own(path, anew=True) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            except OSError:
                path.unlink()
                raise
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        self._view = memoryview(self._map)
        _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION, False)
        self._texts = _Texts(self._map)
        self._packers: dict[type[Any], tuple[Any, ...]] = {
            form.record_type: (
                form.layout.pack_into,
                form.code,
                form.first_text,
                form.last_text,
                form.numbers_of,
            )
            for form in _FORMS
        }
        self.clear()

    def clear(self) -> None:
        """Forget all records; nobody may put one meanwhile. It also brings all pages into memory,
        so that no later record waits for one."""
        self._map[_HEADER_BYTES:] = bytes(FILE_BYTES - _HEADER_BYTES)
        # One call of a C function, so that no two threads get the same place.
        offsets = [_HEADER_BYTES + slot * _SLOT_BYTES for slot in range(MOST_RECORDS)]
        places = zip(itertools.count(1), itertools.count(-2, -1), itertools.cycle(offsets))
        self._next_place = places.__next__

    def put(self, record: Any) -> None:
        """Keep a record in the place of the oldest one. One that does not fit, or is of a type that
        has no form here, is left out."""
        number, complement, offset = self._next_place()
        texts = self._texts
        try:
            pack_into, code, first, last, numbers_of = self._packers[type(record)]
            pack_into(
                self._view,
                offset,
                number,
                code,
                texts[record[first]],
                texts[record[last]],
                *numbers_of(record),
                complement,
            )
        except (struct.error, KeyError):
            return

    def note_off(self, step: int, reason: str) -> None:
        """Note that the records of this step could not be written, so that recording was switched
        off, and why."""
        told = reason.encode(errors="replace")
        _OFF.pack_into(self._map, _OFF_AT, True, step, told)

    def close(self) -> None:
        """The rank has ended well, and its records are in their file. What is left of the ring is a
        note, if there is one."""
        if self._map[_OFF_AT]:
            _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION, True)
            return
        with suppress(OSError):
            self._path.unlink()


class _Texts(dict[str, int]):
    """The place of each text in the header, where a new one is written when it is first asked for.
    Raises KeyError for one that does not fit."""

    def __init__(self, header: mmap.mmap) -> None:
        super().__init__()
        self._header = header
        self._lock = threading.Lock()

    def __missing__(self, text: str) -> int:
        encoded = text.encode(errors="replace")
        with self._lock:
            place = len(self)
            if place == _MOST_TEXTS or len(encoded) > _LONGEST_TEXT:
                raise KeyError(text)
            _TEXT.pack_into(self._header, _TEXTS_AT + place * _TEXT.size, encoded)
            return self.setdefault(text, place)


@dataclass(frozen=True, slots=True)
class Flight:
    """What a flight record holds."""

    records: list[Record]
    """In the order in which they were taken, on the rank's own clock. Empty if the rank has closed
    its records."""
    is_whole: bool
    """Whether it goes back to the first record of all."""
    off: tuple[int, str] | None
    """The step in which recording was switched off, and why."""


def read_flight(path: Path) -> Flight | None:
    """What is in a flight record, however its rank ended; None if it is not one. Slots that are not
    whole or hold numbers that no run has are left out. May raise OSError."""
    with open_regular(path) as file:
        data = file.read(FILE_BYTES + 1)
    if len(data) != FILE_BYTES:
        return None
    magic, version, is_closed = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    is_off, step, reason = _OFF.unpack_from(data, _OFF_AT)
    off = (step, _readable(reason)) if is_off else None
    if is_closed:
        return Flight([], True, off)
    texts = [_readable(text) for (text,) in _TEXT.iter_unpack(data[_TEXTS_AT:_HEADER_BYTES])]
    forms = {form.code: form for form in _FORMS}
    found: dict[int, Record] = {}
    for slot in range(MOST_RECORDS):
        offset = _HEADER_BYTES + slot * _SLOT_BYTES
        number, code = _BEGIN.unpack_from(data, offset)
        if number > 0 and (number - 1) % MOST_RECORDS == slot and code in forms:
            record = _record_at(data, offset, number, forms[code], texts)
            if record is not None:
                found[number] = record
    return Flight([found[number] for number in sorted(found)], min(found, default=1) == 1, off)


def _record_at(data: bytes, offset: int, number: int, form: _Form, texts: list[str]) -> Any:
    """The record of a slot, or None if the slot is not whole."""
    _, _, first, last, *numbers, complement = form.layout.unpack_from(data, offset)
    if complement != ~number or max(first, last) >= len(texts):
        return None
    fields: list[Any] = [None] * len(form.record_type._fields)
    for place, value, (least, most) in zip(form.numbers, numbers, form.bounds, strict=True):
        if not least <= value <= most:
            return None
        fields[place] = value
    fields[form.first_text], fields[form.last_text] = texts[first], texts[last]
    record = form.record_type(*fields)
    is_backward = num_times(record) == 2 and record.end_ns < record.start_ns
    return None if is_backward else record


def _readable(text: bytes) -> str:
    """The text of a file that anybody may have damaged."""
    return "".join(each if each.isprintable() else "?" for each in text.decode(errors="replace"))
