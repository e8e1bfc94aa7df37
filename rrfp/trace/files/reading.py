"""Opens files that others may have made: in a run's directory anything may have any name.

A pipe, a device or a socket in the place of a file is refused and not waited for, and what is read
whole has a bound. A link is followed: what a reader sees through it, its user may read anyway.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from rrfp.errors import RrfpError

MOST_SMALL_BYTES = 64 << 20
"""More than any description or note of a run has."""
LONGEST_LINE_BYTES = 256 << 20
"""More than the records of a step take."""

_SYSTEM = Path("/proc")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFileError(RrfpError, OSError):
    """What has the name of a run's file is none."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be read: {self.strerror}; move it away first"


def open_regular(path: Path) -> BufferedReader:
    """A regular file to read. Raises UnfitFileError for anything else, without waiting, and
    OSError."""
    # Opening a device may already do something, so look before.
    _check_regular(path, path.stat())

    def checked(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check_regular(path, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "rb", opener=checked)


def read_small(path: Path, most_bytes: int = MOST_SMALL_BYTES) -> bytes:
    """The content of a regular file. Raises UnfitFileError for anything else, and for a file of
    more than `most_bytes`, and OSError."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, most_bytes)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def lines_of(file: BufferedReader, path: Path, num_bytes: int | None = None) -> Iterator[bytes]:
    """The lines of an open file from its position on, the last one perhaps without its end; with
    `num_bytes` those that begin in so many bytes. Raises UnfitFileError for a line that is longer
    than any of a run's, and OSError."""
    num_read = 0
    while num_bytes is None or num_read < num_bytes:
        if file.peek(1)[:1] == b"\0":
            # A hole, as a crash leaves at the end; it may be of any size and has no line.
            yield file.read(1)
            return
        line = file.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if len(line) == LONGEST_LINE_BYTES:
            told = f"it has a line of {LONGEST_LINE_BYTES >> 20} MiB or more"
            raise UnfitFileError(errno.EFBIG, told, str(path))
        num_read += len(line)
        yield line


def _check_regular(path: Path, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    told = "" if kind == stat.S_IFREG else _KINDS.get(kind, "something else")
    # The system's own files pass for regular ones; some wait for news, some never end.
    if not told and _SYSTEM.exists() and status.st_dev == _SYSTEM.stat().st_dev:
        told = "a file of the system's"
    if told:
        told = f"it is {told} and not a regular file"
        raise UnfitFileError(errno.EINVAL, told, str(path))


def _too_large(path: Path, most_bytes: int) -> UnfitFileError:
    return UnfitFileError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
