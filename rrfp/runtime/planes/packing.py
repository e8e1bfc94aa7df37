"""How the tensors of a message lie in a slot: one after the other, aligned. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rrfp.runtime.planes.slots import ALIGNMENT_BYTES, aligned


class Part(NamedTuple):
    """Some bytes of one tensor."""

    tensor: int
    """Which one."""
    start: int
    """The first of the bytes, in the tensor."""
    offset: int
    """The same, in the slot."""
    num_bytes: int


def packed_bytes(sizes: Sequence[int]) -> int:
    """What a slot for tensors of so many bytes takes; also one for empty tensors has a place."""
    return max(sum(map(aligned, sizes)), ALIGNMENT_BYTES)


def num_pieces(sizes: Sequence[int], piece_bytes: int) -> int:
    """In how many pieces a slot is filled."""
    return -(-packed_bytes(sizes) // piece_bytes)


def parts_of_pieces(sizes: Sequence[int], piece_bytes: int, first: int, end: int) -> Iterator[Part]:
    """What of each tensor lies in the pieces `first` to `end` (exclusive) of a slot."""
    begin_bytes, end_bytes = first * piece_bytes, end * piece_bytes
    offset = 0
    for index, size in enumerate(sizes):
        start = max(0, begin_bytes - offset)
        stop = min(size, end_bytes - offset)
        if start < stop:
            yield Part(index, start, offset + start, stop - start)
        offset += aligned(size)
