"""Copies within the host's memory by two threads, as far as a second core has time.

One core spends a copy waiting for memory. So a helper thread copies, too: each takes one part after
another, until none is left. A helper that gets no core takes no part, and nobody waits for more
than the part that it is at.
"""

import ctypes
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Lock, Thread

from rrfp.cores import num_cores

HELPER = "rrfp-copy"
"""The name of the thread, which lives as long as its process."""

_PART_BYTES = 2**20
_LEAST_SHARED_BYTES = 4 * _PART_BYTES
"""A smaller copy is hardly quicker for it."""


class _Copy:
    """One copy, by the addresses of memory that is there until it is done."""

    def __init__(self, target: int, source: int, num_bytes: int) -> None:
        self._target = target
        self._source = source
        self._num_bytes = num_bytes
        # To take the next one is a single step of the interpreter's.
        self._parts: Iterator[int] = iter(range(0, num_bytes, _PART_BYTES))
        self.help_lock = Lock()
        """Held while the helper takes parts."""

    def take_parts(self) -> None:
        for begin in self._parts:
            num_bytes = min(_PART_BYTES, self._num_bytes - begin)
            ctypes.memmove(self._target + begin, self._source + begin, num_bytes)


class HostCopies:
    """The copies of one process. Any thread may call it."""

    def __init__(self) -> None:
        self._to_help: SimpleQueue[_Copy] = SimpleQueue()
        self._start_lock = Lock()
        self._has_helper: bool | None = None

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between addresses; done when it returns."""
        if num_bytes < _LEAST_SHARED_BYTES or not self._start_helper():
            ctypes.memmove(target, source, num_bytes)
            return
        copy = _Copy(target, source, num_bytes)
        self._to_help.put(copy)
        copy.take_parts()
        # A helper that comes later finds no part left.
        with copy.help_lock:
            pass

    def _start_helper(self) -> bool:
        """Tells whether there is a helper: not where this process has one core."""
        with self._start_lock:
            if self._has_helper is None:
                self._has_helper = num_cores() > 1
                if self._has_helper:
                    Thread(target=self._help, name=HELPER, daemon=True).start()
            return self._has_helper

    def _help(self) -> None:
        while True:
            copy = self._to_help.get()
            with copy.help_lock:
                copy.take_parts()
