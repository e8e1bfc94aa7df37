"""The tensor codec: which tensors may be sent, their form on the wire, and their layout in a slot.

A tensor's *form* is its dtype and shape. On the wire a form is a descriptor of 72 bytes. In a slot
the tensors of a message lie one after the other, each at a multiple of `ALIGNMENT_BYTES`. Nothing
that a peer sends is executed or unpickled, and a form is checked before memory is allocated.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.device.interface import Device, Stream
from rrfp.runtime.protocols import Message

MAX_DIMENSIONS = 8
MAX_TENSORS = 255
ALIGNMENT_BYTES = 256
"""Alignment of slots and of the tensors in them. It satisfies every dtype, copy engine and network
card."""

_DTYPES = (
    None,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""Code on the wire of each dtype; 0 stands for None in place of a tensor."""
DTYPES: tuple[torch.dtype, ...] = tuple(dtype for dtype in _DTYPES if dtype is not None)
"""Dtypes that a message may contain."""

# dtype code, number of dimensions, padding, the dimensions
_DESCRIPTOR = struct.Struct("<BB6x8q")
DESCRIPTOR_BYTES = _DESCRIPTOR.size

Tensors = Sequence[torch.Tensor | None]


class FrameError(RrfpError):
    """The received bytes are not a frame of this protocol, or break its rules."""


class Form(NamedTuple):
    """Dtype and shape of a tensor, without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor of this form."""
        return math.prod(self.shape) * self.dtype.itemsize


Forms = tuple[Form | None, ...]
"""Forms of the tensors of a message; None stands for None in place of a tensor."""


def forms_of(tensors: Tensors) -> Forms:
    """Return the forms of the tensors of a message."""
    return tuple(
        None if tensor is None else Form(tensor.dtype, tuple(tensor.shape)) for tensor in tensors
    )


def form_bytes(forms: Forms) -> int:
    """Count the bytes of tensors of these forms, without padding; None counts 0."""
    return sum(form.num_bytes for form in forms if form is not None)


def payload_bytes(tensors: Tensors) -> int:
    """Count the bytes of the tensors, without padding; None counts 0."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as one dimension of uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes; writing to it writes to the tensor."""
    return flat(tensor).numpy().data


def sendable(
    message: Message, max_message_bytes: int, device: str = "cpu"
) -> tuple[tuple[torch.Tensor | None, ...], int]:
    """Return the message's tensors detached and contiguous, and their bytes; None stays None.

    Contiguous tensors share their memory with the result, others are copied. Raises UsageError for
    too many tensors or bytes, and for a tensor that cannot be sent or is not on a device of this
    type.
    """
    if len(message.tensors) > MAX_TENSORS:
        raise UsageError(
            f"the message for {message.task} has {len(message.tensors)} tensors;"
            f" a message takes at most {MAX_TENSORS}"
        )
    tensors: list[torch.Tensor | None] = []
    num_bytes = 0
    for tensor in message.tensors:
        if tensor is None:
            tensors.append(None)
            continue
        _check_sendable(tensor, message, device)
        num_bytes += tensor.nbytes
        tensors.append(tensor.detach().contiguous())
    if num_bytes > max_message_bytes:
        raise UsageError(
            f"the message for {message.task} has {num_bytes} bytes, above the maximum of"
            f" {max_message_bytes}; raise max_message_bytes on every rank"
        )
    return tuple(tensors), num_bytes


def _check_sendable(tensor: torch.Tensor, message: Message, device: str) -> None:
    """Raise UsageError for a tensor on another type of device, that is not dense, of a dtype that
    messages do not contain, or of more than 8 dimensions."""
    if tensor.device.type != device or tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor for {message.task} is {tensor.layout} on {tensor.device};"
            f" the socket transport takes dense tensors on the {device}"
        )
    if tensor.dtype not in _CODES:
        raise UsageError(
            f"a tensor for {message.task} is of {tensor.dtype};"
            f" the socket transport takes {', '.join(str(dtype) for dtype in DTYPES)}"
        )
    if tensor.dim() > MAX_DIMENSIONS:
        raise UsageError(
            f"a tensor for {message.task} has {tensor.dim()} dimensions;"
            f" the socket transport takes at most {MAX_DIMENSIONS}"
        )


# On the wire.


def encode_forms(tensors: Iterable[torch.Tensor | Form | None]) -> bytes:
    """Encode the descriptors, of 72 bytes each, of tensors or of their forms; None has one, too."""
    return b"".join(map(_descriptor, tensors))


def _descriptor(tensor: torch.Tensor | Form | None) -> bytes:
    """Encode one descriptor: dtype code and dimensions; all zeros for None."""
    if tensor is None:
        return _DESCRIPTOR.pack(0, 0, *(0,) * MAX_DIMENSIONS)
    shape = tuple(tensor.shape)
    padding = (0,) * (MAX_DIMENSIONS - len(shape))
    return _DESCRIPTOR.pack(_CODES[tensor.dtype], len(shape), *shape, *padding)


def decode_forms(data: bytes | bytearray, max_message_bytes: int) -> Forms:
    """Decode and check the descriptors of one message. Raises FrameError for invalid ones, for
    tensors of more than `max_message_bytes` in all, and for an empty tensor that would have more if
    its zeros were ones."""
    forms: list[Form | None] = []
    total_bytes = 0
    for code, num_dimensions, *dimensions in _DESCRIPTOR.iter_unpack(data):
        if code >= len(_DTYPES):
            raise FrameError(f"a tensor has the unknown dtype {code}")
        if num_dimensions > MAX_DIMENSIONS:
            raise FrameError(f"a tensor has {num_dimensions} dimensions")
        shape = tuple(dimensions[:num_dimensions])
        if any(dimensions[num_dimensions:]) or min(shape, default=0) < 0:
            raise FrameError(f"a tensor of {num_dimensions} dimensions has the shape {dimensions}")
        dtype = _DTYPES[code]
        if dtype is None:
            if num_dimensions:
                raise FrameError(f"a tensor that is not there has {num_dimensions} dimensions")
            forms.append(None)
            continue
        # A zero counts as one, so that the other dimensions of an empty tensor are bounded too.
        bound_bytes = math.prod(max(size, 1) for size in shape) * dtype.itemsize
        total_bytes += bound_bytes if 0 not in shape else 0
        if max(total_bytes, bound_bytes) > max_message_bytes:
            raise FrameError(
                f"a message has a tensor of shape {shape} and {dtype}, in all"
                f" {max(total_bytes, bound_bytes)} bytes or more, above the maximum of"
                f" {max_message_bytes}"
            )
        forms.append(Form(dtype, shape))
    return tuple(forms)


# In a slot.


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of 256 (`ALIGNMENT_BYTES`)."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def packed_bytes(forms: Forms) -> int:
    """Return the size of a slot for tensors of these forms, each rounded up to 256 bytes, at least
    256; None takes nothing."""
    sizes = (aligned(form.num_bytes) for form in forms if form is not None)
    return max(sum(sizes), ALIGNMENT_BYTES)


def unpacked(slot: torch.Tensor, forms: Forms) -> list[torch.Tensor | None]:
    """View the tensors of these forms in a slot, which is flat and of uint8; copies nothing."""
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
    """Copy tensors to new memory on the device, and return the copies once the host has seen the
    copying end; None stays None."""
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
