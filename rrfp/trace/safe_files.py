"""Creates and opens every file that rrfp writes. No other module opens a file for writing;
`tests/trace/test_safe_files.py` finds those that do.

A directory may belong to another user, or let others write, so a name in it proves nothing. A new
file has an unpredictable name, is created exclusively, and is renamed into place. A file that
exists is never opened through a link, and only if it belongs to this user.
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

# Opens files that others may have made: in a run's directory anything may have any name.
#
# A pipe, a device or a socket in the place of a file is refused and not waited for, and what is
# read whole has a bound. A link is followed: what a reader sees through it, its user may read
# anyway.


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


_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE, _GROUP_WRITES = 0o002, 0o020
_NUM_NAME_BYTES = 200
"""The longest part of a file's name that its unfinished part repeats; a name has at most 255."""


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` when the block ends. A concurrent reader sees the
    previous one until then. A link at `path` is replaced, and what it leads to stays as it is.

    If the block raises, `path` stays as it was. May raise OSError.
    """
    part = _part_of(path)
    try:
        with create_new(part) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by one with this content. May raise OSError."""
    with open_whole(path) as file:
        file.write(content)


def create_new(path: Path) -> IO[bytes]:
    """A new file, to write and read. Raises FileExistsError if anything has that name, be it a link
    that leads nowhere, and OSError."""

    def exclusively(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | _SAFELY, 0o666)

    return open(path, "w+b", opener=exclusively)


def open_own(path: Path, *, anew: bool = False, buffering: int = -1) -> IO[Any]:
    """A file of this user to append to and read, or with `anew` to write from its beginning; made
    if it does not exist.

    Raises OSError, also for a link, for what is not a regular file, and for a file of a user who
    owns neither this process nor the directory.
    """

    def checked(name: str, flags: int) -> int:
        descriptor = os.open(name, flags & ~os.O_TRUNC | _SAFELY, 0o666)
        try:
            _check_own(path, os.fstat(descriptor), stat.S_ISREG)
            if anew:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    mode = "w+b" if anew else "a+b"
    return open(path, mode, buffering, opener=checked)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, or take one that this user has made. Raises OSError as
    `open_own` does."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        _check_own(path, path.lstat(), stat.S_ISDIR)


def link_whole(path: Path, target: str) -> None:
    """Make a link to a directory, or replace one. May raise OSError."""
    part = _part_of(path)
    try:
        part.symlink_to(target, target_is_directory=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def why_not_own(directory: Path) -> str:
    """Why others may replace the files in a directory, in words that follow its name; empty if only
    this user (and root) may. Raises OSError if there is no such directory.

    A group counts as others, except a user's own group, which has the user's number: many systems
    let that group write wherever its user does.
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
    """Whether only this user may replace the files in a directory. False where there is none."""
    try:
        return not why_not_own(directory)
    except OSError:
        return False


def unfinished(path: Path) -> list[Path]:
    """What writers of `path` that were killed have left beside it, or write now. May raise
    OSError."""
    return [entry for entry in path.parent.iterdir() if entry.name.startswith(_prefix(path))]


def remove_unfinished(path: Path) -> None:
    """Remove what writers of `path` that were killed have left beside it. Nobody may be writing it
    now. May raise OSError."""
    for entry in unfinished(path):
        entry.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_NUM_NAME_BYTES])}."


def _check_own(path: Path, status: os.stat_result, is_expected: Any) -> None:
    if not is_expected(status.st_mode):
        told = "it is a link, or not of the kind that is written there"
        raise OSError(errno.EINVAL, told, str(path))
    # A file server may map owners, of a directory as of the files in it.
    if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        told = f"it belongs to user {status.st_uid}"
        raise PermissionError(errno.EPERM, told, str(path))


# A file that grows by whole lines: what cannot be written whole is taken back.


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


# A file that gets a line a step of a run: `metrics.jsonl`, `admission.csv`, `dealing.csv`.
#
# A line is written whole or not at all, and none is left out: what a full disk does not take waits
# in memory until it does. So the file always holds the first steps of the run without a gap.


MOST_WAITING_BYTES = 64 << 20
"""Some 100,000 steps. A disk that has no room for longer has been forgotten."""

_log = logging.getLogger(__name__)


class ReportFile:
    """Appends to such a file. A disk that takes nothing is warned of and alters nothing else."""

    def __init__(self, path: Path, *, is_needed: bool = False) -> None:
        """A run of which nothing else is left ends when the directory of a file `is_needed` is
        removed. May raise OSError."""
        self._path = path
        self._is_needed = is_needed
        self._file: WholeLines | None = WholeLines(path)
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_gone = False

    def write(self, line: str) -> None:
        """Add a line. Raises RrfpError if it `is_needed` and nobody would find it."""
        if self._file is None:
            return
        had_room = not self._waiting
        self._waiting.append(line.encode())
        self._num_waiting_bytes += len(self._waiting[-1])
        try:
            self._write_waiting(self._file)
        except FileNotFoundError as error:
            self._note_gone(self._file, reason_of(error))
        except OSError as error:
            if self._num_waiting_bytes > MOST_WAITING_BYTES:
                self._give_up(self._file, reason_of(error))
            elif had_room:
                _log.warning(
                    "%s cannot be written (%s); its lines wait in memory until there is room, and "
                    "the training goes on",
                    self._path,
                    reason_of(error),
                )
        else:
            if not had_room:
                _log.warning("%s is written again; none of its lines is missing", self._path)

    def copy_to(self, path: Path) -> None:
        """Write all lines so far into another file, also those that wait, and also where the file
        is gone. May raise OSError."""
        with create_new(path) as copy:
            if self._file is not None:
                copy.writelines(self._file.read())
            copy.writelines(self._waiting)

    def close(self) -> None:
        """Write what waits, if there is room now, and close; a second call does nothing."""
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
        while self._waiting:
            try:
                file.write(self._waiting[0])
            except OSError:
                file.take_back()
                raise
            self._num_waiting_bytes -= len(self._waiting.popleft())
            file.end()

    def _note_gone(self, file: WholeLines, why: str) -> None:
        """Nobody finds the file any more; it is written on, for `copy_to`."""
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
