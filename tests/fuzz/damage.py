"""Damages files: their bytes, or the content of the container that they are."""

import gzip
import io
import json
import random
import re
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import polars as pl
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

# Damage to a file of any format: to bits, pieces, numbers and words.


_NUMBERS = (
    *(0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**20, 2**24, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
_WORDS = (
    *(b"-1", b"0", b"1", b"99", b"1000000", b"4294967296", b"9223372036854775807"),
    *(b"9223372036854775808", b"-9223372036854775809", b"1180591620717411303424", b"1" * 400),
    *(b"9" * 5000, b"0.5", b"-0.0", b"1e308", b"1e-320", b"1e400", b"nan", b"NaN", b"-Infinity"),
    *(b"inf", b"", b"null", b"true", b"[]", b"{}", b"''", b'""', b"x", b"=1+1", b"../../etc", b"/"),
    *(b"\x1b[2J", b"\x1b]0;x\x07", "\u202e".encode(), b"\xff", b"\xc0\x80", b"\xed\xa0\x80"),
    *(b"\\ud800", b"\\u0000", b"\x00", b"a" * 70_000, b"<script>", b"%s{}", b"\r", b"\n\n"),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(rb'"[^"\n]{0,80}"|[A-Za-z_]{1,40}')
_BRACKETS = ((b"[", b"]"), (b"{", b"}"), (b'{"a":', b"}"), (b"(", b")"), (b"[[", b"]]"))

Damage = Callable[[random.Random, bytes], bytes]


def damaged(draw: random.Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """The data with one to four damages; `others` are similar files to take pieces from."""
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        if others and draw.random() < 0.06:
            data = _spliced(draw, data, draw.choice(others))
        else:
            data = draw.choice(_DAMAGES)(draw, data)
    return data


def _place(draw: random.Random, data: bytes) -> int:
    """A random position; half the time near an end, where headers and footers are."""
    near = min(len(data), 64)
    where = draw.random()
    if where < 0.25:
        return draw.randrange(near + 1)
    if where < 0.5:
        return len(data) - draw.randrange(near + 1)
    return draw.randrange(len(data) + 1)


def _flipped(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        if found:
            place = min(_place(draw, data), len(found) - 1)
            found[place] ^= 1 << draw.randrange(8)
    return bytes(found)


def _overwritten(draw: random.Random, data: bytes) -> bytes:
    """Overwrite a few bytes with a binary number, as if a declared size had changed."""
    size, order = draw.choice((1, 2, 4, 8)), draw.choice("<>")
    value = draw.choice(_NUMBERS) & ((1 << 8 * size) - 1)
    octets = struct.pack(f"{order}{ {1: 'B', 2: 'H', 4: 'I', 8: 'Q'}[size] }", value)
    place = _place(draw, data)
    return data[:place] + octets + data[place + size :]


def _long_varint(draw: random.Random, data: bytes) -> bytes:
    value, octets = draw.choice(_NUMBERS), bytearray()
    while value > 127:
        octets.append(value & 127 | 128)
        value >>= 7
    place = _place(draw, data)
    return data[:place] + bytes((*octets, value)) + data[place + draw.choice((0, 1, 2)) :]


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _without(draw: random.Random, data: bytes) -> bytes:
    place = _place(draw, data)
    return data[:place] + data[place + draw.choice((1, 1, 4, 16, 100, 1000)) :]


def _doubled(draw: random.Random, data: bytes) -> bytes:
    place = _place(draw, data)
    piece = data[place : place + draw.choice((1, 8, 64, 1000))]
    return data[:place] + piece * draw.choice((2, 2, 3, 50)) + data[place + len(piece) :]


def _inserted(draw: random.Random, data: bytes) -> bytes:
    place = _place(draw, data)
    return data[:place] + draw.randbytes(draw.choice((1, 2, 8, 60))) + data[place:]


def _other_number(draw: random.Random, data: bytes) -> bytes:
    return _replaced(draw, data, _NUMBER)


def _other_word(draw: random.Random, data: bytes) -> bytes:
    return _replaced(draw, data, _WORD)


def _replaced(draw: random.Random, data: bytes, pattern: re.Pattern[bytes]) -> bytes:
    found = list(pattern.finditer(data[:200_000]))
    if not found:
        return _inserted(draw, data)
    match = draw.choice(found)
    word = draw.choice(_WORDS) if draw.random() < 0.8 else draw.choice(found)[0]
    if match[0].startswith(b'"') and draw.random() < 0.5:
        word = b'"' + word + b'"'
    return data[: match.start()] + word + data[match.end() :]


def _other_lines(draw: random.Random, data: bytes) -> bytes:
    """Remove, repeat, swap or empty a line, or replace its second half by another line's."""
    lines = data.split(b"\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines[one] = b""
        case _:
            lines[one] = lines[one][: len(lines[one]) // 2] + lines[other][len(lines[other]) // 2 :]
    return b"\n".join(lines)


def _nested(draw: random.Random, data: bytes) -> bytes:
    left, right = draw.choice(_BRACKETS)
    depth = draw.choice((1, 50, 1000, 100_000))
    place = _place(draw, data)
    return data[:place] + left * depth + right * draw.choice((0, depth)) + data[place:]


def _spliced(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _place(draw, data)] + other[_place(draw, other) :]


def _emptied(draw: random.Random, data: bytes) -> bytes:
    return draw.choice((b"", b"\n", b"\0" * 4096, data[:1], b"\xef\xbb\xbf" + data, data * 2))


_DAMAGES: tuple[Damage, ...] = (
    *(_flipped, _flipped, _overwritten, _overwritten, _long_varint, _cut, _without, _doubled),
    *(_inserted, _other_number, _other_number, _other_word, _other_word, _other_lines, _nested),
    _emptied,
)


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63),
    *(2**70, -(2**63), -(2**70), 10**400, float("nan"), float("inf"), "", "x", "0", "9" * 30),
    *("\x1b[2J", "\u202e", "=1+1", "</script>", "a" * 70_000, "\ud800", "../.."),
    *([], {}, [[]], {"": 0}, [0], [None] * 9),
)
"""Values that readers may not expect."""


def damaged_inside(name: str, draw: random.Random, data: bytes) -> bytes | None:
    """Change a part of a file's content according to its format; None for an unknown format."""
    for ending, damage in _OF_ENDINGS.items():
        if name.endswith(ending):
            return damage(draw, data)
    return None


def _json(draw: random.Random, data: bytes) -> bytes | None:
    try:
        document = json.loads(data)
    except ValueError:
        return None
    return _encoded(draw, changed(draw, document))


def _json_lines(draw: random.Random, data: bytes) -> bytes | None:
    lines = data.splitlines()
    if not lines:
        return None
    place = draw.randrange(len(lines))
    line = _json(draw, lines[place])
    if line is None:
        return None
    return b"\n".join((*lines[:place], line, *lines[place + 1 :], b""))


def changed(draw: random.Random, document: Any) -> Any:
    """Change or remove a random value of a JSON document, or replace the whole document."""
    places = list(_places(document))
    if not places or draw.random() < 0.03:
        return draw.choice(ODD)
    # Choose the depth first, because most values are at the bottom.
    depth = draw.randint(1, max(map(len, places)))
    *above, last = draw.choice([place for place in places if len(place) == depth] or places)
    holder = document
    for key in above:
        holder = holder[key]
    match draw.randrange(5):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, holder[last])
        case 2:
            holder[last] = draw.choice(([holder[last]], {"a": holder[last]}, str(holder[last])))
        case _:
            holder[last] = draw.choice(ODD)
    return document


def _places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            yield (*above, key)
            yield from _places(document[key], (*above, key))


def _encoded(draw: random.Random, document: Any) -> bytes:
    text = json.dumps(document, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.1 and text.startswith("{"):
        text = f'{{"settings": 1, {text[1:]}'  # The key may be there twice now.
    return text.encode("utf-8", "surrogatepass")


def _gzip(draw: random.Random, data: bytes) -> bytes:
    try:
        inside = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return damaged(draw, data)
    if draw.random() < 0.02:
        return gzip.compress(inside + bytes(draw.choice((1, 300)) << 20), mtime=0)
    found = _json(draw, inside) if draw.random() < 0.5 else None
    return gzip.compress(damaged(draw, inside) if found is None else found, 1, mtime=0)


def _png(draw: random.Random, data: bytes) -> bytes:
    """Change chunks, with correct checksums."""
    chunks, place = [], 8
    while place + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    index = draw.randrange(len(chunks))
    kind, content = chunks[index]
    if kind == b"IHDR" and draw.random() < 0.7:
        edges = (0, 1, 7, 5000, 9000, 16_000, 2**31 - 1, 2**32 - 1)
        content = struct.pack(">II", draw.choice(edges), draw.choice(edges)) + content[8:]
    elif kind == b"IDAT" and draw.random() < 0.7:
        content = zlib.compress(damaged(draw, zlib.decompress(content)))
    else:
        content = damaged(draw, content)
    chunks[index] = kind, content
    if draw.random() < 0.2:
        chunks.insert(index, draw.choice(chunks))
    return data[:8] + b"".join(
        struct.pack(">I", len(content)) + kind + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )  # fmt: skip


def _perfetto(draw: random.Random, data: bytes) -> bytes:
    """Change fields of packets; move, repeat or remove whole packets."""
    trace = pb.Trace.FromString(data)
    packets = list(trace.packet)
    for _ in range(draw.choice((1, 1, 2, 5))):
        index = draw.randrange(len(packets))
        event = packets[index].track_event
        notes = list(event.debug_annotations)
        match draw.randrange(9):
            case 0:
                del packets[index]
            case 1:
                packets.insert(draw.randrange(len(packets)), packets[index])
            case 2:
                packets[index].timestamp = draw.choice((0, 1, 2**53, 2**53 + 1, 2**63, 2**64 - 1))
            case 3:
                packets[index].trusted_packet_sequence_id = draw.choice((0, 1, 2, 2**32 - 1))
            case 4:
                event.type = draw.choice((0, 1, 2, 3, 4))  # pyright: ignore[reportAttributeAccessIssue]
            case 5:
                event.categories[:] = [draw.choice(("task", "wait", "run", "rank", "loss", "x"))]
            case _ if notes:
                note = draw.choice(notes)
                _set_note(draw, note)
            case _:
                event.track_uuid = draw.choice((0, 1, 2, 2**64 - 1))
    return bytes(pb.Trace(packet=packets).SerializeToString())


def _set_note(draw: random.Random, note: Any) -> None:
    match draw.randrange(4):
        case 0:
            note.name = draw.choice(("step", "kind", "stage", "evaluation", "x"))
        case 1 if note.string_value.startswith("{"):
            note.string_value = _text(json.dumps(changed(draw, json.loads(note.string_value))))
        case 2:
            note.string_value = _text(draw.choice([each for each in ODD if isinstance(each, str)]))
        case _:
            numbers = (-(2**63), -1, 0, 1, 2, 3, 7, 2**20, 2**20 + 1, 2**31, 2**53, 2**63 - 1)
            note.int_value = draw.choice(numbers)


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _sqlite(draw: random.Random, data: bytes) -> bytes:
    """Change cells; remove rows; rename columns and tables."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        for _ in range(draw.choice((1, 2, 5))):
            table = draw.choice(tables)
            columns = database.execute(f"PRAGMA table_info({table})").fetchall()
            if not columns:  # It was renamed before.
                continue
            _, column, *_ = draw.choice(columns)
            value = draw.choice(
                (None, -1, 0, 1, 2**62, 2**63 - 1, -(2**63), 0.5, 1e308, "x", "\x1b[2J", b"\xff")
            )
            row = draw.randrange(60)
            update = f"UPDATE OR IGNORE {table} SET {column} = ?"
            commands: tuple[tuple[str, tuple[Any, ...]], ...] = (
                *((f"{update} WHERE rowid = ?", (value, row)),) * 2,
                (f"{update} WHERE rowid % 7 = ?", (value, row % 7)),
                (f"DELETE FROM {table} WHERE rowid = ?", (row,)),
                (f"ALTER TABLE {table} RENAME COLUMN {column} TO other", ()),
                (f"ALTER TABLE {table} RENAME TO other", ()),
                (f"INSERT INTO {table} SELECT * FROM {table} WHERE rowid = ?", (row,)),
            )
            command, values = draw.choice(commands)
            try:
                database.execute(command, values)
            except sqlite3.Error:
                continue
        database.commit()
        return bytes(database.serialize())


def _parquet(draw: random.Random, data: bytes) -> bytes | None:
    """Change a column's type or values, or remove it; None if Parquet cannot hold the result."""
    frame = pl.read_parquet(io.BytesIO(data))
    octets = io.BytesIO()
    with suppress(pl.exceptions.PolarsError, TypeError, OverflowError, UnicodeEncodeError):
        _other_column(draw, frame, draw.choice(frame.columns)).write_parquet(octets)
        return octets.getvalue()
    return None


def _other_column(draw: random.Random, frame: pl.DataFrame, name: str) -> pl.DataFrame:
    column = frame[name]
    match draw.randrange(6):
        case 0:
            return frame.drop(name)
        case 1:
            return frame.with_columns(pl.lit(None).alias(name))
        case 2:
            types = (pl.String, pl.Float64, pl.Int8, pl.UInt64, pl.Binary, pl.Boolean)
            return frame.with_columns(column.cast(draw.choice(types), strict=False))
        case 3:
            return frame.rename({name: draw.choice(("x", "", "\x1b[2J"))})
        case 4:
            return frame.sample(fraction=0.5, seed=draw.randrange(99))
    values: list[Any] = column.to_list()
    if values:
        values[draw.randrange(len(values))] = draw.choice(ODD)
    return frame.with_columns(pl.Series(name, values, strict=False))


_OF_ENDINGS: dict[str, Callable[[random.Random, bytes], bytes | None]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".gz": _gzip,
    ".png": _png,
    ".pftrace": _perfetto,
    ".sqlite": _sqlite,
    ".parquet": _parquet,
}
