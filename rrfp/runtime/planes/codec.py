"""How the tensors of a message lie in a slot, one after the other and aligned, and leave it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from rrfp.runtime.device.interface import Device, Stream
from rrfp.runtime.planes.slots import ALIGNMENT_BYTES, aligned


class Form(NamedTuple):
    """What a tensor is, without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


Forms = tuple[Form | None, ...]
"""Of the tensors of a message; None where there is no tensor."""


def forms_of(tensors: Sequence[torch.Tensor | None]) -> Forms:
    """What the tensors of a message are."""
    return tuple(
        None if tensor is None else Form(tensor.dtype, tuple(tensor.shape)) for tensor in tensors
    )


def payload_of(forms: Forms) -> int:
    """The bytes of the tensors themselves."""
    return sum(form.num_bytes for form in forms if form is not None)


def packed_bytes(forms: Forms) -> int:
    """What a slot for such tensors takes; also one for empty tensors has a place."""
    sizes = (aligned(form.num_bytes) for form in forms if form is not None)
    return max(sum(sizes), ALIGNMENT_BYTES)


def unpacked(slot: torch.Tensor, forms: Forms) -> list[torch.Tensor | None]:
    """The tensors that lie in a slot, which is flat and of uint8."""
    tensors: list[torch.Tensor | None] = []
    begin = 0
    for form in forms:
        if form is None:
            tensors.append(None)
            continue
        end = begin + form.num_bytes
        tensors.append(slot[begin:end].view(form.dtype).view(form.shape))
        begin += aligned(form.num_bytes)
    return tensors


def copied(
    sources: Iterable[torch.Tensor | None], device: Device, stream: Stream
) -> list[torch.Tensor | None]:
    """Tensors in memory of this rank's own, once the host has seen that they are there."""
    targets: list[torch.Tensor | None] = []
    for source in sources:
        if source is None:
            targets.append(None)
            continue
        target = device.empty(source.shape, source.dtype, stream)
        device.copy(flat(target), flat(source), stream)
        targets.append(target)
    device.synchronize(device.record(stream), soon=True)
    return targets


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as uint8."""
    return tensor.view(-1).view(torch.uint8)
