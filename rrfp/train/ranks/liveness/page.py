"""A rank's status page: a few hundred bytes that it shares with its launcher.

The rank writes and the launcher reads, without a lock and without a question: so nothing can wait
for anything, and the page says where a rank stood after that was killed. It has no name in any
directory.
"""

import mmap
import os
import struct
import tempfile
from contextlib import suppress
from enum import IntEnum
from typing import IO

_BYTES = 1024
_BEATS, _WAITS, _ASKED, _STACKS, _DONE, _STAGE, _PLACE = 0, 8, 9, 10, 11, 16, 144
_TEXT_BYTES = {_STAGE: _PLACE - _STAGE, _PLACE: _BYTES - _PLACE}


class Waits(IntEnum):
    """What a rank's main thread waits for, as far as its stack tells."""

    NOTHING = 0
    OTHERS = 1
    """Another rank."""
    PERHAPS = 2
    """It may be another rank, a thread or process of its own, a device or somebody's server."""


class StatusPage:
    """One rank's page, on either side."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _BYTES)

    @property
    def beats(self) -> int:
        """How often the rank has looked at itself; 0 before it begins to."""
        (count,) = struct.unpack_from("<Q", self._bytes, _BEATS)
        return int(count)

    @property
    def waits(self) -> Waits:
        return Waits(self._bytes[_WAITS])

    @property
    def place(self) -> str:
        """Where its main thread stood at the last beat."""
        return self._text(_PLACE)

    @property
    def stage(self) -> str:
        """What it does: `in step 7`. Unlike the rest, written as soon as it begins."""
        return self._text(_STAGE) or "in start-up"

    @property
    def is_starting(self) -> bool:
        """Whether it has not begun its first step."""
        return not self._text(_STAGE)

    @property
    def is_asked_to_end(self) -> bool:
        """Whether a request to end came to the rank itself."""
        return bool(self._bytes[_ASKED])

    @property
    def is_done(self) -> bool:
        """Whether the rank has done all its work and left its groups."""
        return bool(self._bytes[_DONE])

    @property
    def wants_stacks(self) -> bool:
        """Whether the launcher asks for the stacks of the rank's threads."""
        return bool(self._bytes[_STACKS])

    def ask_for_stacks(self, *, wanted: bool) -> None:
        self._bytes[_STACKS] = wanted

    def finish(self) -> None:
        self._bytes[_DONE] = 1

    def enter(self, stage: str) -> None:
        self._write(_STAGE, stage)

    def ask_to_end(self) -> None:
        self._bytes[_ASKED] = 1

    def beat(self, waits: Waits, place: str) -> None:
        self._bytes[_WAITS] = waits
        self._write(_PLACE, place)
        struct.pack_into("<Q", self._bytes, _BEATS, self.beats + 1)

    def _text(self, start: int) -> str:
        data = self._bytes[start : start + _TEXT_BYTES[start]]
        return data.partition(b"\0")[0].decode(errors="replace")

    def _write(self, start: int, text: str) -> None:
        most = _TEXT_BYTES[start] - 1
        self._bytes[start : start + most + 1] = text.encode()[:most].ljust(most + 1, b"\0")


def page_file() -> IO[bytes]:
    """An empty page, to be inherited by its rank."""
    file = nameless_file()
    file.truncate(_BYTES)
    return file


def nameless_file() -> IO[bytes]:
    """A file that no other process can open: on no disk, which could be full, where the system
    can."""
    # The system may lack the call, or refuse it.
    with suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("rrfp"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
