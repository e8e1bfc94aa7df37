"""Reads a large JSON file, compressed or not, one value at a time and in little memory."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError

_CHUNK_BYTES = 1 << 20
_LONGEST_VALUE = 64 << 20
"""The longest value in characters: an event, or a profile's description of itself."""
_MOST_EXPANSION = 200
"""The greatest expansion by gunzip: profiles expand tenfold, malicious files up to a
thousandfold."""
_GZIP = b"\x1f\x8b"
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def open_bytes(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks, decompressed if its name ends in .gz or it has gzip's
    magic number. Raises RrfpError if it cannot be read, is cut off, or expands too much."""
    num_bytes = 0
    try:
        is_packed = path.suffix == ".gz" or _begins(path) == _GZIP
        most_bytes = _MOST_EXPANSION * path.stat().st_size + _CHUNK_BYTES
        with gzip.open(path) if is_packed else path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if is_packed and num_bytes > most_bytes:
                    raise RrfpError(
                        f"{path} expands to more than {_MOST_EXPANSION} times its size, which no "
                        "profile does; if it is one all the same, expand it with gunzip and "
                        "import that"
                    )
                yield chunk
    except EOFError:
        raise RrfpError(f"{path} is cut off; copy it again from where it was written") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise RrfpError(f"{path} is no gzip file ({error}); export it again") from None
    except OSError as error:
        raise RrfpError(f"{path} cannot be read: {error.strerror or error}") from None


def _begins(path: Path) -> bytes:
    """Read the first two bytes of a file."""
    with path.open("rb") as file:
        return file.read(len(_GZIP))


def writable(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and UTF-8 cannot, by `?`."""
    return text.encode("utf-8", "replace").decode()


class JsonStream:
    """Reads a JSON document piece by piece: the members of an object, or the items of an array."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks = open_bytes(path)
        self._to_text = codecs.getincrementaldecoder("utf-8-sig")()
        self._decode = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0
        self._is_ended = False

    def first(self) -> str:
        """Skip white space and return the next character, which is not consumed; empty at the
        end."""
        while True:
            found = _NO_SPACE.search(self._text, self._position)
            if found is not None:
                self._position = found.start()
                return found[0]
            if self._is_ended:
                return ""
            self._position = len(self._text)
            self._read(1)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the object that begins here. Read each key's value before the next key.
        Raises RrfpError if the JSON is broken."""
        self._consume("{")
        if self.first() == "}":
            self._consume("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._broken()
            self._consume(":")
            yield key
            if self._consume(",}") == "}":
                return

    def items(self) -> Iterator[Any]:
        """Yield the items of the array that begins here. Raises RrfpError if the JSON is broken."""
        self._consume("[")
        if self.first() == "]":
            self._consume("]")
            return
        while True:
            yield self.value()
            if self._consume(",]") == "]":
                return

    def value(self) -> Any:
        """Read the value that begins here. Raises RrfpError if the JSON is broken, or the value is
        longer than 64 Mi characters."""
        if not self.first():
            raise self._broken()
        while True:
            size = len(self._text) - self._position
            try:
                value, end = self._decode(self._text, self._position)
            except (ValueError, RecursionError):
                if self._is_ended or size > _LONGEST_VALUE:
                    raise self._broken() from None
            else:
                # A number at the end of the buffer may continue.
                if end < len(self._text) or self._is_ended:
                    self._position = end
                    return value
            self._read(size)

    def _consume(self, allowed: str) -> str:
        """Consume and return the next character other than white space, which must be one of
        `allowed`. Raises RrfpError for any other."""
        found = self.first()
        if not found or found not in allowed:
            raise self._broken()
        self._position += 1
        return found

    def _read(self, at_least: int) -> None:
        """Read at least `at_least` more characters into the buffer, if the file has them, and drop
        those already consumed. Raises RrfpError if they are not UTF-8."""
        parts = [self._text[self._position :]]
        self._position = 0
        while at_least > 0 and not self._is_ended:
            chunk = next(self._chunks, b"")
            self._is_ended = not chunk
            try:
                parts.append(self._to_text.decode(chunk, final=self._is_ended))
            except UnicodeDecodeError:
                raise RrfpError(
                    f"{self._path} is not UTF-8 text; import what torch.profiler wrote"
                ) from None
            at_least -= len(parts[-1])
        self._text = "".join(parts)

    def _broken(self) -> RrfpError:
        """The error for a file that is not whole JSON."""
        return RrfpError(
            f"{self._path} is empty, cut off or no profile: its JSON is not whole; import what "
            "torch.profiler's export_chrome_trace wrote"
        )
