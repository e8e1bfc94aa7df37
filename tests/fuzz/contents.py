"""Damages inside of a container, which would otherwise only break its checksum or its form."""

import gzip
import io
import json
import random
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import polars as pl
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.fuzz.octets import damaged

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63),
    *(2**70, -(2**63), -(2**70), 10**400, float("nan"), float("inf"), "", "x", "0", "9" * 30),
    *("\x1b[2J", "\u202e", "=1+1", "</script>", "a" * 70_000, "\ud800", "../.."),
    *([], {}, [[]], {"": 0}, [0], [None] * 9),
)
"""Values that few expect."""


def damaged_inside(name: str, draw: random.Random, data: bytes) -> bytes | None:
    """The contents of a file of that name with something in them changed; None where this knows no
    more of such files than that they are octets."""
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
    """A document of JSON with another value, or none, in one of its places, or in its own."""
    places = list(_places(document))
    if not places or draw.random() < 0.03:
        return draw.choice(ODD)
    # As often one near the top as one of the many below.
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
    told = json.dumps(document, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.1 and told.startswith("{"):
        told = f'{{"settings": 1, {told[1:]}'  # Twice, perhaps.
    return told.encode("utf-8", "surrogatepass")


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
    """Chunks changed and sealed again."""
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
    """Fields of packets changed, whole packets moved, doubled or lost."""
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
                event.type = draw.choice((0, 1, 2, 3, 4))
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
    """Cells changed, columns and tables lost."""
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
    """Columns of other types and values, or missing; None where there can be no such file."""
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
