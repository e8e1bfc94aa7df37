"""Creates and opens every file that rrfp writes. No other module opens a file for writing;
`tests/test_writes.py` finds those that do.

A directory may belong to another user, or let others write, so a name in it proves nothing. A new
file has an unpredictable name, is created exclusively, and is renamed into place. A file that
exists is never opened through a link, and only if it belongs to this user.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
