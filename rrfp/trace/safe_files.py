"""Creates and opens every file that rrfp writes. No other module opens a file for writing;
`tests/trace/test_safe_files.py` finds those that do.

A directory may belong to another user, or let others write, so a file's name in it proves nothing.
A new file gets an unpredictable name, is created exclusively, and is renamed into place. An
existing file is opened for writing only if it belongs to this user, and never through a link.
"""

import errno
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from rrfp.errors import RrfpError, reason_of

# Reading files that others may have made.
#
# A pipe, a device or a socket in the place of a file is refused without waiting for it, and reading
# a whole file has a size limit. Links are followed, because the user may read their targets anyway.


MOST_SMALL_BYTES = 64 << 20
"""Size limit of a file that is read whole; descriptions of runs are much smaller."""
LONGEST_LINE_BYTES = 256 << 20
"""Size limit of a line; the records of a step are much smaller."""

_SYSTEM = Path("/proc")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFileError(RrfpError, OSError):
    """A path that should be a run's file is not a regular file, or is too large."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be read: {self.strerror}; move it away first"


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; a link is followed. Raises UnfitFileError, without waiting, for
    anything else and for a file in /proc, and OSError."""
    # Check before opening too, as opening a device can have side effects.
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
    """Read a regular file. Raises UnfitFileError for anything else and for a file of more than
    `most_bytes`, and OSError."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, most_bytes)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def lines_of(file: BufferedReader, path: Path, num_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of an open file from its current position; the last one may lack its newline.
    With `num_bytes`, only lines that begin within the next `num_bytes` bytes. At a line that begins
    with a NUL byte it yields that byte and stops. Raises UnfitFileError for too long a line."""
    num_read = 0
    while num_bytes is None or num_read < num_bytes:
        if file.peek(1)[:1] == b"\0":
            # A crash may leave a hole of any size at the end; it contains no line.
            yield file.read(1)
            return
        line = file.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if len(line) == LONGEST_LINE_BYTES:
            why = f"it has a line of {LONGEST_LINE_BYTES >> 20} MiB or more"
            raise UnfitFileError(errno.EFBIG, why, str(path))
        num_read += len(line)
        yield line


def _check_regular(path: Path, status: os.stat_result) -> None:
    """Raise UnfitFileError if a file is not regular, or is in /proc."""
    kind = stat.S_IFMT(status.st_mode)
    found = "" if kind == stat.S_IFREG else _KINDS.get(kind, "something else")
    # Files in /proc claim to be regular; some of them block, some never end.
    if not found and _SYSTEM.exists() and status.st_dev == _SYSTEM.stat().st_dev:
        found = "a file of the system's"
    if found:
        raise UnfitFileError(errno.EINVAL, f"it is {found} and not a regular file", str(path))


def _too_large(path: Path, most_bytes: int) -> UnfitFileError:
    """The error for a file of more than `most_bytes` bytes."""
    return UnfitFileError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))


_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE, _GROUP_WRITES = 0o002, 0o020
_NUM_NAME_BYTES = 200
"""How many bytes of a file's name its temporary file repeats; a name has at most 255 bytes."""


# Writing files.


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` atomically when the block ends. If the block
    raises, `path` stays as it was. A link at `path` is replaced, not followed. May raise
    OSError."""
    part = _part_of(path)
    try:
        with create_new(part) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically by one with this content. May raise OSError."""
    with open_whole(path) as file:
        file.write(content)


def create_new(path: Path) -> IO[bytes]:
    """Create a file to write and read. Raises FileExistsError if the name exists, even as a
    dangling link, and OSError."""

    def exclusively(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | _SAFELY, 0o666)

    return open(path, "w+b", opener=exclusively)


def open_own(path: Path, *, truncate: bool = False, buffering: int = -1) -> IO[Any]:
    """Open a file of this user to append and read, or with `truncate` emptied to write and read. A
    missing file is created.

    Raises OSError, also for a link, for anything but a regular file, and for a file of a user who
    owns neither this process nor the directory.
    """

    def checked(name: str, flags: int) -> int:
        descriptor = os.open(name, flags & ~os.O_TRUNC | _SAFELY, 0o666)
        try:
            _check_own(path, os.fstat(descriptor), stat.S_ISREG)
            if truncate:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    mode = "w+b" if truncate else "a+b"
    return open(path, mode, buffering, opener=checked)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, or accept an existing one. Raises OSError for a link, for
    anything but a directory, and for one of a user who owns neither this process nor its parent."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        _check_own(path, path.lstat(), stat.S_ISDIR)


def link_whole(path: Path, target: str) -> None:
    """Create a link with this target, or replace one atomically. May raise OSError, for example if
    `path` is a directory."""
    part = _part_of(path)
    try:
        part.symlink_to(target, target_is_directory=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def why_not_own(directory: Path) -> str:
    """Explain why other users may replace the files in a directory, as a phrase that follows its
    name; empty if only this user (and root) may. Raises OSError without such a directory.

    A group counts as other users, except a user's own group, which has the user's number: many
    systems let that group write wherever its user does.
    """
    status, user = directory.stat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if status.st_uid != user:
        return f"belongs to user {status.st_uid}"
    is_own_group = status.st_gid == user != 0
    others = _OTHERS_WRITE if is_own_group else _OTHERS_WRITE | _GROUP_WRITES
    return "is writable by other users" if status.st_mode & others else ""


def is_own(directory: Path) -> bool:
    """True if only this user may replace the files in a directory; False without a directory."""
    try:
        return not why_not_own(directory)
    except OSError:
        return False


def unfinished(path: Path) -> list[Path]:
    """List the temporary files of writers of `path`, running or killed. May raise OSError."""
    return [entry for entry in path.parent.iterdir() if entry.name.startswith(_prefix(path))]


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of killed writers of `path`. No process may be writing it now. May
    raise OSError."""
    for entry in unfinished(path):
        entry.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    """A new unpredictable name for the temporary file of `path`."""
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")


def _prefix(path: Path) -> str:
    """The beginning of the names of temporary files of `path`: a dot, and up to 200 bytes of its
    name."""
    return f".{os.fsdecode(os.fsencode(path.name)[:_NUM_NAME_BYTES])}."


def _check_own(path: Path, status: os.stat_result, is_expected: Any) -> None:
    """Raise OSError for another type of file, and PermissionError for a file of a user who owns
    neither this process nor the directory."""
    if not is_expected(status.st_mode):
        why = "it is a link, or not of the kind that is written there"
        raise OSError(errno.EINVAL, why, str(path))
    # A file server may map the owners of a directory and of its files alike.
    if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))


# A file that grows by whole lines.


_PIECE_BYTES = 1 << 20


class WholeLines:
    """Appends whole lines to a file: a partly written line can be removed again. Methods other than
    `discard_partial` may raise OSError."""

    def __init__(self, path: Path, *, truncate: bool = False) -> None:
        """`truncate` empties the file first."""
        self._path = path
        # Unbuffered, so that a failed write leaves nothing to be written later.
        self._file = open_own(path, truncate=truncate, buffering=0)
        self._status = os.fstat(self._file.fileno())
        self.num_bytes = self._status.st_size
        """The size of the file up to its last whole line."""

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def write(self, octets: bytes) -> None:
        """Write a part of a line, or several lines. They count as written after `end`."""
        rest = memoryview(octets)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def end(self) -> None:
        """Mark the lines written so far as whole. Raises FileNotFoundError if the file was removed
        or moved."""
        self.num_bytes = self._file.seek(0, os.SEEK_CUR)
        with suppress(FileNotFoundError):
            found = self._path.stat()
            if (found.st_ino, found.st_dev) == (self._status.st_ino, self._status.st_dev):
                return
        raise FileNotFoundError(errno.ENOENT, "it was removed or moved away", str(self._path))

    def discard_partial(self) -> None:
        """Cut the file after its last whole line. Errors are ignored."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), self.num_bytes)
            self._file.seek(self.num_bytes)

    def read(self) -> Iterator[bytes]:
        """Yield the file's content in pieces of 1 MiB, even after the file was removed."""
        offset = 0
        while piece := os.pread(self._file.fileno(), _PIECE_BYTES, offset):
            offset += len(piece)
            yield piece

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


# A file with one line per step of a run: `metrics.jsonl`, `admission.csv`, `dealing.csv`.
#
# A line is written whole or not at all. Lines that a full disk refuses wait in memory until they
# can be written, so the file always holds the first steps of the run without a gap.


MOST_WAITING_BYTES = 64 << 20
"""The limit of the lines in memory, about 100,000 steps; the file is given up beyond it."""

_log = logging.getLogger(__name__)


class ReportFile:
    """Appends lines to a file with one line per step of a run. Lines that a full disk refuses wait
    in memory, with a warning."""

    def __init__(self, path: Path, *, is_needed: bool = False) -> None:
        """With `is_needed`, removing the file's directory ends the run, as the file is the run's
        only result. May raise OSError."""
        self._path = path
        self._is_needed = is_needed
        self._file: WholeLines | None = WholeLines(path)
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_gone = False

    def write(self, line: str) -> None:
        """Append a line. If the disk refuses it, it waits in memory, with a warning for the first
        one; beyond 64 MiB the file is given up, and then nothing is written. A removed file causes
        one warning. Raises RrfpError if the file `is_needed` and its directory was removed."""
        if self._file is None:
            return
        was_written = not self._waiting
        self._waiting.append(line.encode())
        self._num_waiting_bytes += len(self._waiting[-1])
        try:
            self._write_waiting(self._file)
        except FileNotFoundError as error:
            self._note_gone(self._file, reason_of(error))
        except OSError as error:
            if self._num_waiting_bytes > MOST_WAITING_BYTES:
                self._give_up(self._file, reason_of(error))
            elif was_written:
                _log.warning(
                    "%s cannot be written (%s); its lines wait in memory until there is room, and "
                    "the training goes on",
                    self._path,
                    reason_of(error),
                )
        else:
            if not was_written:
                _log.warning("%s is written again; none of its lines is missing", self._path)

    def copy_to(self, path: Path) -> None:
        """Write all lines so far, including those in memory, into a new file, even if the original
        was removed. Once the file was given up or closed, only lines still in memory, if any. May
        raise OSError, also if `path` exists."""
        with create_new(path) as copy:
            if self._file is not None:
                copy.writelines(self._file.read())
            copy.writelines(self._waiting)

    def close(self) -> None:
        """Write the lines in memory, or warn that they are lost, and close; a second call does
        nothing. Raises RrfpError if the file `is_needed` and its directory was removed."""
        file = self._file
        if file is None:
            return
        try:
            self._write_waiting(file)
        except FileNotFoundError as error:
            self._note_gone(file, reason_of(error))
        except OSError as error:
            self._give_up(file, reason_of(error))
        self._file = None
        file.close()

    def _write_waiting(self, file: WholeLines) -> None:
        """Write the lines that wait in memory, in order. Raises OSError at the first that fails,
        after removing its written part; it and the later ones keep waiting. Raises
        FileNotFoundError after the first line if the file was removed."""
        while self._waiting:
            try:
                file.write(self._waiting[0])
            except OSError:
                file.discard_partial()
                raise
            self._num_waiting_bytes -= len(self._waiting.popleft())
            file.end()

    def _note_gone(self, file: WholeLines, why: str) -> None:
        """Warn once that the file was removed; writing goes on, for `copy_to`. If it `is_needed`
        and its directory was removed too, close it and raise RrfpError instead."""
        if self._is_needed and not self._path.parent.exists():
            self._file = None
            file.close()
            raise RrfpError(
                f"the run's directory {self._path.parent} was removed or moved away, and nobody "
                "would find the run's results; start it again (with --save a run goes on without "
                "its directory)"
            )
        if not self._is_gone:
            self._is_gone = True
            _log.warning(
                "%s is gone (%s): its lines will not be found, and the training goes on",
                self._path,
                why,
            )

    def _give_up(self, file: WholeLines, why: str) -> None:
        """Warn that the lines in memory are lost, drop them, and close the file."""
        _log.warning(
            "%s cannot be written (%s): it ends here, its last %d lines are lost, and the training "
            "goes on",
            self._path,
            why,
            len(self._waiting),
        )
        self._file = None
        self._waiting.clear()
        file.close()
