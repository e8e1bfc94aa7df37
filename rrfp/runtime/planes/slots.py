"""Which parts of a slab are taken: first fit, released in any order. Pure."""

from bisect import bisect_left

ALIGNMENT_BYTES = 256
"""Every slot begins at a multiple of it, and so does every tensor in a slot: of what any dtype, any
copy engine and any network card wants."""


def aligned(num_bytes: int) -> int:
    """The least multiple of the alignment that is not smaller."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Slots:
    """The parts of a slab. The lowest that fits is taken, so that memory which was never needed is
    never touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_taken_bytes = 0
        self._taken: dict[int, int] = {}
        """Sizes, by offset."""
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        """Offset and size, by offset; no two adjoin."""

    def take(self, num_bytes: int) -> int | None:
        """The offset of a slot of so many bytes, which is at least 1; None if there is none now."""
        size = aligned(num_bytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[index]
                else:
                    self._free[index] = offset + size, free - size
                self._taken[offset] = size
                self.num_taken_bytes += size
                return offset
        return None

    def size_of(self, offset: int) -> int:
        """Of a slot that is taken."""
        return self._taken[offset]

    def release(self, offset: int) -> bool:
        """Give a slot back; tells whether there was one."""
        size = self._taken.pop(offset, None)
        if size is None:
            return False
        self.num_taken_bytes -= size
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = offset, before + size
        else:
            self._free.insert(index, (offset, size))
        return True
