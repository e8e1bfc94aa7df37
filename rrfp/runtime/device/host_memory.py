"""Memory of the host that is used again: for large tensors that come and go.

The C library gives memory of this size back to the system when its tensor is gone, and the next
tensor pays for every page of it again, which takes longer than to copy into it.
"""

import ctypes
import mmap
import weakref
from collections import defaultdict
from contextlib import suppress

import torch

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
