"""Memory of the host that is used again: for large tensors that come and go.

The C library gives memory of this size back to the system when its tensor is gone, and the next
tensor pays for every page of it again, which takes longer than to copy into it.
"""

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread

import torch

from rrfp.system import num_cores

_STEPS = 4
"""Sizes of memory for each doubling: of what is reserved at most a fifth is not asked for."""


class HostMemory:
    """Gives out memory, and takes it back when its tensor is gone, on whatever thread that is."""

    def __init__(self, most_spare_bytes: int) -> None:
        """So many bytes are kept at most that no tensor uses."""
        self._most_spare_bytes = most_spare_bytes
        # The finalizer may run within any call of any thread, so that no lock guards these: what
        # can go wrong is that a little more or less is kept.
        self._spare: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        """By size."""
        self._num_spare_bytes = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Flat, uint8, of at least one byte."""
        size = _reserved(num_bytes)
        try:
            memory = self._spare[size].pop()
            self._num_spare_bytes -= size
        except IndexError:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # A kernel that is built without huge pages refuses the advice.
                with suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * num_bytes).from_buffer(memory)
        # The view lives as long as a tensor that has its memory.
        weakref.finalize(view, self._take_back, memory, size).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _take_back(self, memory: mmap.mmap, size: int) -> None:
        if self._num_spare_bytes + size <= self._most_spare_bytes:
            self._num_spare_bytes += size
            self._spare[size].append(memory)


def memory_at(address: int, num_bytes: int) -> torch.Tensor:
    """Memory that somebody else keeps: flat, uint8."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _reserved(num_bytes: int) -> int:
    """The least size that memory is reserved in for so many bytes."""
    doubling = max(num_bytes - 1, mmap.PAGESIZE * _STEPS).bit_length() - 1
    step = (1 << doubling) // _STEPS
    return -(-num_bytes // step) * step


# Copies within the host's memory by two threads, as far as a second core has time.
#
# One core spends a copy waiting for memory. So a helper thread copies, too: each takes one part
# after another, until none is left. A helper that gets no core takes no part, and nobody waits for
# more than the part that it is at.


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
