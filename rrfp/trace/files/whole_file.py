"""Writes a file whole or not at all; a concurrent reader sees the previous one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` when the block ends.

    If the block raises, `path` stays as it was. May raise OSError.
    """
    part = path.with_name(f"{_prefix(path)}{os.getpid()}")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def unfinished(path: Path) -> list[Path]:
    """What writers of `path` that were killed have left beside it, or write now. May raise
    OSError."""
    return [entry for entry in path.parent.iterdir() if entry.name.startswith(_prefix(path))]


def remove_unfinished(path: Path) -> None:
    """Remove what writers of `path` that were killed have left beside it. Nobody may be writing it
    now. May raise OSError."""
    for entry in unfinished(path):
        entry.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."
