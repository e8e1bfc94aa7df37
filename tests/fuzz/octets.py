"""Damages that need not know what a file holds: bits, pieces, numbers and words of it."""

import random
import re
import struct
from collections.abc import Callable

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
    """The same with one to four damages; `others` are like files, to take pieces from."""
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        if others and draw.random() < 0.06:
            data = _spliced(draw, data, draw.choice(others))
        else:
            data = draw.choice(_DAMAGES)(draw, data)
    return data


def _place(draw: random.Random, data: bytes) -> int:
    """Somewhere; half the time near an end, where headers and footers are."""
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
    """A binary number of another value, such as a declared size."""
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
    """A line less, twice, moved, empty, or with another one's end."""
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
