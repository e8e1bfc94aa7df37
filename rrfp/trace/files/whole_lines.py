"""A file that grows by whole lines: what cannot be written whole is taken back."""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rrfp.trace.files.whole_file import open_own

_PIECE_BYTES = 1 << 20


class WholeLines:
    """Appends to a file. Every method may raise OSError, which names the file."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """`anew` empties the file first."""
        self._path = path
        # Unbuffered: what is written has reached the system, and what is not was never begun.
        self._file = open_own(path, anew=anew, buffering=0)
        self._status = os.fstat(self._file.fileno())
        self.num_bytes = self._status.st_size
        """Its size up to the last whole line."""

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def write(self, octets: bytes) -> None:
        """Add a part of a line, or some whole ones; `end` makes them count."""
        rest = memoryview(octets)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def end(self) -> None:
        """The line that was written is whole. Raises FileNotFoundError if the file is not where it
        was any more: nobody will find what is written."""
        self.num_bytes = self._file.seek(0, os.SEEK_CUR)
        with suppress(FileNotFoundError):
            found = self._path.stat()
            if (found.st_ino, found.st_dev) == (self._status.st_ino, self._status.st_dev):
                return
        raise FileNotFoundError(errno.ENOENT, "it was removed or moved away", str(self._path))

    def take_back(self) -> None:
        """Remove what was written of a line that is not whole."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), self.num_bytes)
            self._file.seek(self.num_bytes)

    def read(self) -> Iterator[bytes]:
        """What was written, in pieces, also where nobody else finds the file any more."""
        offset = 0
        while piece := os.pread(self._file.fileno(), _PIECE_BYTES, offset):
            offset += len(piece)
            yield piece

    def close(self) -> None:
        """Closing twice is harmless."""
        self._file.close()
