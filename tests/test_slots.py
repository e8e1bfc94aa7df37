"""The slots of a slab, and how tensors lie in one: no two overlap, and nothing is lost."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.planes.codec import Form, Forms, forms_of, packed_bytes, unpacked
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


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
forms = st.lists(
    st.none() | st.builds(Form, st.sampled_from((torch.uint8, torch.bfloat16, torch.int64)), shapes)
).map(tuple)


@given(forms)
def test_tensors_come_out_of_a_slot_as_they_went_in(packed: Forms) -> None:
    slot = torch.zeros(packed_bytes(packed), dtype=torch.uint8)
    assert forms_of(unpacked(slot, packed)) == packed
    for number, tensor in enumerate(unpacked(slot, packed)):
        if tensor is not None:
            tensor.fill_(number % 100)
    for number, tensor in enumerate(unpacked(slot, packed)):
        assert tensor is None or bool((tensor == number % 100).all())
