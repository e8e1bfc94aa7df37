"""A launcher's own temporary directory, which does not outlast it by much.

Whoever is killed removes nothing. So a launcher locks its directory for as long as it lives, and
each one that starts removes those of this user that nobody has locked.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp.train.temporary_files import temporary_directory

_PREFIX = "rrfp-run-"


@contextmanager
def own_directory() -> Iterator[Path]:
    """A new directory that only this user may enter; it is removed when the block ends."""
    remove_abandoned()
    path, lock = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_directory()))
        # Another launcher may take it for abandoned before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_abandoned() -> None:
    """Remove what launchers of this user have left that were killed."""
    for path in temporary_directory().glob(f"{_PREFIX}*"):
        # Somebody else's, somebody's who lives, or gone by now.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
