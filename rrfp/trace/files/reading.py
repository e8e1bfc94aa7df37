"""Opens files that others may have made: in a run's directory anything may have any name.

A pipe, a device or a socket in the place of a file is refused and not waited for, and what is read
whole has a bound. A link is followed: what a reader sees through it, its user may read anyway.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MOST_SMALL_BYTES = 64 << 20
"""More than any description or note of a run has."""
LONGEST_LINE_BYTES = 256 << 20
"""More than the records of a step take."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> IO[bytes]:
    """A regular file to read. Raises OSError for anything else, without waiting."""
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
    """The content of a regular file. Raises OSError for anything else, and for a file of more than
    `most_bytes`."""
    with open_regular(path) as file:
        # The system's own files state no size, and some of them never end.
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, most_bytes)
        content = file.read(most_bytes + 1)
    # None if the system would have waited.
    if content is None or len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def lines_of(file: IO[bytes], path: Path, num_bytes: int | None = None) -> Iterator[bytes]:
    """The lines of an open file from its position on, the last one perhaps without its end; with
    `num_bytes` those that begin in so many bytes. Raises OSError for a line that is longer than any
    of a run's."""
    num_read = 0
    while num_bytes is None or num_read < num_bytes:
        line = file.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if len(line) == LONGEST_LINE_BYTES:
            told = f"it has a line of {LONGEST_LINE_BYTES >> 20} MiB or more"
            raise OSError(errno.EFBIG, told, str(path))
        num_read += len(line)
        yield line


def _check_regular(path: Path, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        told = f"it is {_KINDS.get(kind, 'something else')} and not a regular file"
        raise OSError(errno.EINVAL, told, str(path))


def _too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
