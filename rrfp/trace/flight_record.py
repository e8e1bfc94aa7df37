"""A rank's flight record, `records/rank-<N>.ring`: its last records, which survive its death.

The file is memory-mapped, so its content survives any end of the process. It consists of a header
and a ring of slots of equal size, with one record each. A slot begins with the number of its record
and ends with that number's complement; a slot that was being written when the process died does
not, and is skipped. Texts are stored once, in the header.

The header can also hold the reason why recording was switched off. All blocks of the file are
allocated at the start, so that this can be written on a full disk, and no write to the mapping can
fail.
"""

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rrfp.schedule.tasks import Cause
from rrfp.trace.perfetto.format import bounds_of
from rrfp.trace.records import (
    RECORD_TYPES,
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    RankRecords,
    Record,
    TaskRecord,
    WaitRecord,
    num_times,
)
from rrfp.trace.safe_files import open_own, open_regular

_MAGIC = b"rrfpring"
_VERSION = 2
FILE_BYTES = 4 * 2**20
"""29,000 records: seconds of most runs, or 0.3 s at 100,000 records per second."""
_HEADER_BYTES = 4096
_HEAD = struct.Struct("<8sI?")
"""Magic, version, and true if the rank has closed its records."""
_OFF_AT, _OFF = 64, struct.Struct("<?q400s")
"""True if recording was switched off, the step, and the reason, padded with zeros."""
_OFF_OF_VERSION = {1: struct.Struct("<?q400p"), _VERSION: _OFF}
"""The layout of each version that can be read. Version 1 cut the reason after 255 bytes."""
_TEXTS_AT, _TEXT = 1024, struct.Struct("<32p")
_MOST_TEXTS = (_HEADER_BYTES - _TEXTS_AT) // _TEXT.size
_LONGEST_TEXT = _TEXT.size - 1

_BEGIN = struct.Struct("<qB")
"""A record's number, counted from 1, and its type."""
_SLOT_BYTES = 144
MOST_RECORDS = (FILE_BYTES - _HEADER_BYTES) // _SLOT_BYTES


class _SlotLayout:
    """The layout of one record type in a slot: the indices of its two texts in the header, then its
    numbers. A type with a single text repeats its index."""

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


_LAYOUTS = [
    _SlotLayout(code, record_type)
    for code, (name, record_type) in enumerate(RECORD_TYPES.items(), start=1)
    if name not in ("cost", "loss")
]
"""The layouts of records made while a step runs; others are made by a flush and only spilled."""


def ring_of(spill: Path) -> Path:
    """The path of the flight record next to a rank's spill file."""
    return spill.with_suffix(".ring")


class FlightRing:
    """Writes a rank's last records into its mapped file. Any thread may call `put`."""

    def __init__(self, path: Path) -> None:
        """Create or empty the file, and allocate its blocks. Raises OSError if either fails."""
        self._path = path
        with open_own(path, truncate=True) as file:
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
            each.record_type: (
                each.layout.pack_into,
                each.code,
                each.first_text,
                each.last_text,
                each.numbers_of,
            )
            for each in _LAYOUTS
        }
        self.clear()

    def clear(self) -> None:
        """Remove all records; no thread may call `put` meanwhile. Touches all pages, so that no
        later `put` causes a page fault."""
        self._map[_HEADER_BYTES:] = bytes(FILE_BYTES - _HEADER_BYTES)
        # A single call of a C function, so that no two threads get the same slot.
        offsets = [_HEADER_BYTES + slot * _SLOT_BYTES for slot in range(MOST_RECORDS)]
        slots = zip(itertools.count(1), itertools.count(-2, -1), itertools.cycle(offsets))
        self._next_slot = slots.__next__

    def put(self, record: Any) -> None:
        """Write a record into the next slot of the ring, over the oldest record once the ring is
        full. A record whose texts or numbers do not fit, or whose type has no layout, is
        skipped."""
        number, complement, offset = self._next_slot()
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
        """Store in the header that recording was switched off, because the records of this step
        could not be written. A reason is cut after 400 bytes."""
        _OFF.pack_into(self._map, _OFF_AT, True, step, reason.encode(errors="replace"))

    def close(self) -> None:
        """Remove the file, because all records are in the spill file; errors are ignored. If
        recording was switched off, mark the file as closed instead, so that the reason stays."""
        if self._map[_OFF_AT]:
            _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION, True)
            return
        with suppress(OSError):
            self._path.unlink()


class _Texts(dict[str, int]):
    """The index of each text in the header. Looking up a new text writes it there, or raises
    KeyError if it does not fit."""

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
    """The content of a flight record."""

    records: list[Record]
    """The records in the order in which they were made, on the rank's own clock. Empty if the rank
    closed its records."""
    is_whole: bool
    """True if no record was overwritten."""
    off: tuple[int, str] | None
    """The step in which recording was switched off, and the reason; None if it was not."""


def read_flight(path: Path) -> Flight | None:
    """Read a flight record; None if the file has another size, format or version. Slots that are
    incomplete or contain impossible values are skipped. A record that its rank closed has no
    records. May raise OSError."""
    with open_regular(path) as file:
        data = file.read(FILE_BYTES + 1)
    if len(data) != FILE_BYTES:
        return None
    magic, version, is_closed = _HEAD.unpack_from(data)
    if magic != _MAGIC or version not in _OFF_OF_VERSION:
        return None
    is_off, step, reason = _OFF_OF_VERSION[version].unpack_from(data, _OFF_AT)
    off = (step, _readable(reason.rstrip(b"\0"))) if is_off else None
    if is_closed:
        return Flight([], True, off)
    texts = [_readable(text) for (text,) in _TEXT.iter_unpack(data[_TEXTS_AT:_HEADER_BYTES])]
    layouts = {each.code: each for each in _LAYOUTS}
    found: dict[int, Record] = {}
    for slot in range(MOST_RECORDS):
        offset = _HEADER_BYTES + slot * _SLOT_BYTES
        number, code = _BEGIN.unpack_from(data, offset)
        if number > 0 and (number - 1) % MOST_RECORDS == slot and code in layouts:
            record = _record_at(data, offset, number, layouts[code], texts)
            if record is not None:
                found[number] = record
    return Flight([found[number] for number in sorted(found)], min(found, default=1) == 1, off)


def _record_at(data: bytes, offset: int, number: int, layout: _SlotLayout, texts: list[str]) -> Any:
    """The record in the slot at `offset`. None if the slot is incomplete, the index of a text is
    invalid, a number is out of its bounds, or the record ends before it begins."""
    _, _, first, last, *numbers, complement = layout.layout.unpack_from(data, offset)
    if complement != ~number or max(first, last) >= len(texts):
        return None
    fields: list[Any] = [None] * len(layout.record_type._fields)
    for place, value, (least, most) in zip(layout.numbers, numbers, layout.bounds, strict=True):
        if not least <= value <= most:
            return None
        fields[place] = value
    fields[layout.first_text], fields[layout.last_text] = texts[first], texts[last]
    record = layout.record_type(*fields)
    is_backward = num_times(record) == 2 and record.end_ns < record.start_ns
    return None if is_backward else record


def _readable(text: bytes) -> str:
    """Decode a text, with `?` for each character that is not printable."""
    return "".join(each if each.isprintable() else "?" for each in text.decode(errors="replace"))


# Records that only a flight record has: those of the running step.


_CAUSES = frozenset(Cause)
_NAMES = {record_type: name for name, record_type in RECORD_TYPES.items()}


def missing_from(recent: RankRecords, flight: Flight) -> RankRecords:
    """The records of a flight record that are not among `recent`, the rank's last spilled ones, and
    the activity that the rank had begun. If records between the two may have been overwritten, only
    the running step is returned, without the phase that would mark it as finished."""
    added = RankRecords(recent.info)
    lists = added.by_name()
    begun = _last_begun(flight.records)
    known = {record for found in recent.by_name().values() for record in found}
    made = [r for r in flight.records if not isinstance(r, BegunRecord)]
    missing = [record for record in made if record not in known]
    if missing and not flight.is_whole and missing[0] is made[0]:
        # Earlier records were overwritten, so some steps are incomplete. Return only the running
        # step, without its closing phase, so that it does not count as finished.
        step = (begun or missing[-1]).step
        missing = [
            record
            for record in missing
            if record.step == step
            and not (isinstance(record, PhaseRecord) and record.phase == Phase.SCHEDULE)
        ]
    for record in missing:
        lists[_NAMES[type(record)]].append(record)
    if begun is not None:
        added.begun.append(begun)
    return added


def _last_begun(records: Iterable[Record]) -> BegunRecord | None:
    """The innermost activity that the rank began and did not end: a task or a wait, or else the
    phase or other activity around them; `BETWEEN` after a phase that ended. None if there is
    none."""
    around: BegunRecord | None = None
    within: BegunRecord | None = None
    for record in records:
        if isinstance(record, BegunRecord):
            if record.doing == Doing.TASK or record.doing in _CAUSES:
                # A wait is recorded again, with a later start, when a message did not end it.
                if within is not None and within.doing == record.doing != Doing.TASK:
                    record = record._replace(start_ns=within.start_ns)
                within = record
            else:
                around, within = record, None
        elif isinstance(record, TaskRecord | WaitRecord):
            # On a GPU the records of a step may follow the beginning of the next step.
            if within is not None and within.step == record.step:
                within = None
        elif isinstance(record, PhaseRecord) and (
            around is not None and (around.doing, around.step) == (record.phase, record.step)
        ):
            between = record.end_ns, record.end_ns, record.step, Doing.BETWEEN
            around, within = BegunRecord(*between), None
    return within or around
