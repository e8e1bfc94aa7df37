"""The slots of a slab, and how tensors lie in one: no two overlap, and nothing is lost."""

from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.planes.packing import Part, num_pieces, packed_bytes, parts_of_pieces
from rrfp.runtime.planes.slots import ALIGNMENT_BYTES, Slots, aligned

SLAB_BYTES = 20 * ALIGNMENT_BYTES


@given(st.lists(st.one_of(st.integers(1, SLAB_BYTES // 2), st.integers(-20, -1)), max_size=60))
def test_slots_do_not_overlap_and_come_back(program: list[int]) -> None:
    """A positive number takes so many bytes; a negative one releases one of those taken."""
    slots = Slots(SLAB_BYTES)
    taken: dict[int, int] = {}
    for number in program:
        if number < 0:
            if taken:
                offset = sorted(taken)[number % len(taken)]
                assert slots.release(offset)
                assert not slots.release(offset)
                del taken[offset]
            continue
        fits = slots.take(number)
        if fits is None:
            # First fit finds any gap that is large enough.
            assert aligned(number) > _largest_gap(taken)
            continue
        assert fits % ALIGNMENT_BYTES == 0
        assert fits + aligned(number) <= SLAB_BYTES
        for offset, size in taken.items():
            assert fits + aligned(number) <= offset or offset + size <= fits
        taken[fits] = aligned(number)
    assert slots.num_taken_bytes == sum(taken.values())
    for offset in taken:
        assert slots.release(offset)
    assert slots.take(SLAB_BYTES) == 0


def _largest_gap(taken: dict[int, int]) -> int:
    edges = [0, *(edge for offset in sorted(taken) for edge in (offset, offset + taken[offset]))]
    edges.append(SLAB_BYTES)
    return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=5), st.integers(1, 3000))
def test_the_pieces_of_a_slot_hold_every_byte_once(sizes: list[int], piece_bytes: int) -> None:
    pieces = num_pieces(sizes, piece_bytes)
    parts = [
        part
        for number in range(pieces)
        for part in parts_of_pieces(sizes, piece_bytes, number, number + 1)
    ]
    for number, part in _with_piece(parts, piece_bytes):
        assert part.num_bytes > 0
        assert part.offset + part.num_bytes <= (number + 1) * piece_bytes
    held = [
        (part.tensor, part.start + index, part.offset + index)
        for part in parts
        for index in range(part.num_bytes)
    ]
    assert len(held) == len({offset for _, _, offset in held}) == sum(sizes)
    assert {(tensor, byte) for tensor, byte, _ in held} == {
        (tensor, byte) for tensor, size in enumerate(sizes) for byte in range(size)
    }
    assert all(offset < packed_bytes(sizes) for _, _, offset in held)


def _with_piece(parts: list[Part], piece_bytes: int) -> list[tuple[int, Part]]:
    return [(part.offset // piece_bytes, part) for part in parts]
