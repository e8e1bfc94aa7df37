"""The frames that travel on a link: a fixed binary header, then tensors as they lie in memory.

A frame is a prefix (60 bytes), one descriptor (72 bytes) for each tensor, and the bytes of the
tensors in that order. Only messages carry tensors; those of a posted one lie in its sender's outbox
(`rrfp.runtime.planes.plane`), and its frame has descriptors only. Everything in prefix and
descriptors is checked before memory is allocated for the tensors, and nothing on the wire is ever
executed or unpickled.
Integers are little-endian; tensors travel in the byte order of the (little-endian) hosts.

Prefix and descriptors each have a CRC-32, and so have the tensors where nothing else vouches for
them: between hosts without TLS. A kernel that copies memory within a host needs no such check.
"""

import math
import struct
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.planes.codec import Form, Forms, payload_of
from rrfp.runtime.protocols import Message
from rrfp.schedule.tasks import Kind, Task

MAGIC = b"RRFP"
VERSION = 5
MAX_DIMENSIONS = 8
MAX_TENSORS = 255
MAX_FORECAST_NS = 3_600_000_000_000
"""A task that takes longer is not waited for; nor is a number believed that says so."""

# magic, version, purpose, kind, number of tensors, stage, microbatch, step, sequence, number,
# acknowledged, checksums of the descriptors and of the tensors
_PREFIX = struct.Struct("<4sBBBBiiqqqqII")
# of the prefix before it
_CHECKSUM = struct.Struct("<I")
# dtype (0: no tensor), number of dimensions, (0), the dimensions
_DESCRIPTOR = struct.Struct("<BB6x8q")

_KINDS = (None, Kind.F, Kind.B, Kind.W)
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
DTYPES: tuple[torch.dtype, ...] = tuple(dtype for dtype in _DTYPES if dtype is not None)
"""What a tensor of a message may hold."""


class Purpose(IntEnum):
    """What a frame is for; the values are those on the wire."""

    MESSAGE = 1
    CREDIT = 2
    HEARTBEAT = 3
    FAREWELL = 4
    REPORT = 5
    DECISION = 6
    FORECAST = 7
    POSTED = 8
    LENT = 9
    RELEASED = 10
    RESUME = 11


_POSTED = frozenset({Purpose.POSTED, Purpose.LENT})
_WITH_TENSORS = _POSTED | {Purpose.MESSAGE}
_WITH_TASK = _WITH_TENSORS | {Purpose.REPORT, Purpose.DECISION, Purpose.FORECAST}
UNCOUNTED = frozenset({Purpose.HEARTBEAT, Purpose.RESUME})
"""What concerns one connection only; all other frames are counted, and sent again over the next
connection if the peer had not received them (`rrfp.runtime.link.channel`)."""


class FrameError(RrfpError):
    """What arrived is not a frame of this protocol, or breaks its rules."""


class GarbledError(FrameError):
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame. `task` is None for purposes that concern no task."""

    purpose: Purpose
    step: int = 0
    task: Task | None = None
    sequence: int = 0
    """Messages on this link before this one, posted ones too; 0 for every other purpose."""
    number: int = 0
    """The position in the agreed sequence (decision); how many credits (credit); in how many ns to
    expect a task's input (forecast); the offset of a slot (posted, lent, released)."""
    num_tensors: int = 0


class Prefix(NamedTuple):
    """What stands before a frame's descriptors and tensors."""

    header: Header
    acknowledged: int
    descriptors_checksum: int
    tensors_checksum: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame as it arrived."""

    header: Header
    tensors: tuple[torch.Tensor | None, ...]
    arrived_ns: int
    """When its prefix was here."""
    num_bytes: int
    """Of its tensors."""
    forms: Forms = ()
    """What the tensors of a posted message are."""
    acknowledged: int = 0
    """How many counted frames its sender has received on this link, over all connections."""


def payload_bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    """How many bytes the tensors take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def prepare_message(message: Message, max_message_bytes: int, device: str = "cpu") -> Message:
    """The message as the wire can take it: detached, contiguous, on a device of this type.

    Shares memory with the tensors that are contiguous already. Raises UsageError for a tensor that
    cannot travel.
    """
    if len(message.tensors) > MAX_TENSORS:
        raise UsageError(
            f"the message for {message.task} has {len(message.tensors)} tensors;"
            f" a message takes at most {MAX_TENSORS}"
        )
    tensors: list[torch.Tensor | None] = []
    for tensor in message.tensors:
        if tensor is None:
            tensors.append(None)
            continue
        if tensor.device.type != device or tensor.layout != torch.strided:
            raise UsageError(
                f"a tensor for {message.task} is {tensor.layout} on {tensor.device};"
                f" the socket transport takes dense tensors on the {device}"
            )
        if tensor.dtype not in DTYPES:
            raise UsageError(
                f"a tensor for {message.task} is of {tensor.dtype};"
                f" the socket transport takes {', '.join(str(dtype) for dtype in DTYPES)}"
            )
        if tensor.dim() > MAX_DIMENSIONS:
            raise UsageError(
                f"a tensor for {message.task} has {tensor.dim()} dimensions;"
                f" the socket transport takes at most {MAX_DIMENSIONS}"
            )
        tensors.append(tensor.detach().contiguous())
    num_bytes = payload_bytes(tensors)
    if num_bytes > max_message_bytes:
        raise UsageError(
            f"the message for {message.task} has {num_bytes} bytes, above the maximum of"
            f" {max_message_bytes}; raise max_message_bytes on every rank"
        )
    return replace(message, tensors=tuple(tensors))


def encode_header(
    header: Header,
    tensors: Sequence[torch.Tensor | Form | None] = (),
    acknowledged: int = 0,
    tensors_checksum: int = 0,
) -> bytes:
    """The prefix and the descriptors of the tensors, or of what they are."""
    task = header.task
    descriptors = b"".join(map(_descriptor, tensors))
    prefix = _PREFIX.pack(
        MAGIC,
        VERSION,
        header.purpose,
        _KINDS.index(task.kind) if task is not None else 0,
        len(tensors),
        task.stage if task is not None else 0,
        task.microbatch if task is not None else 0,
        header.step,
        header.sequence,
        header.number,
        acknowledged,
        zlib.crc32(descriptors),
        tensors_checksum,
    )
    return prefix + _CHECKSUM.pack(zlib.crc32(prefix)) + descriptors


def _descriptor(tensor: torch.Tensor | Form | None) -> bytes:
    code, shape = (0, ()) if tensor is None else (_DTYPES.index(tensor.dtype), tuple(tensor.shape))
    dimensions = shape + (0,) * (MAX_DIMENSIONS - len(shape))
    return _DESCRIPTOR.pack(code, len(shape), *dimensions)


def checksum_of(buffers: Iterable[memoryview]) -> int:
    """A checksum of the bytes of tensors."""
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes; writing to it writes to the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def decode_prefix(data: bytes | bytearray) -> Prefix:
    """Read and check a prefix; raises FrameError that says what is wrong."""
    fields, (checksum,) = data[: _PREFIX.size], _CHECKSUM.unpack_from(data, _PREFIX.size)
    _compare("header", zlib.crc32(fields), checksum)
    magic, version, purpose, kind, num_tensors, stage, microbatch, step, *numbers = _PREFIX.unpack(
        fields
    )
    sequence, number, acknowledged, *checksums = numbers
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"a frame is of version {version} instead of {VERSION}")
    try:
        purpose = Purpose(purpose)
    except ValueError:
        raise FrameError(f"a frame has the unknown purpose {purpose}") from None
    if kind >= len(_KINDS):
        raise FrameError(f"a frame has the unknown kind {kind}")
    if (kind != 0) != (purpose in _WITH_TASK):
        raise FrameError(f"a frame of purpose {purpose.name} has the kind {kind}")
    if num_tensors and purpose not in _WITH_TENSORS:
        raise FrameError(f"a frame of purpose {purpose.name} has {num_tensors} tensors")
    # The step of an evaluation is negative (`rrfp.trace.records`).
    if min(stage, microbatch, sequence, number, acknowledged) < 0:
        raise FrameError(
            f"a frame has a negative field (stage {stage}, microbatch {microbatch}, sequence"
            f" {sequence}, number {number}, acknowledged {acknowledged})"
        )
    if purpose == Purpose.CREDIT and number == 0:
        raise FrameError("a credit frame gives no credit")
    if purpose == Purpose.FORECAST and number > MAX_FORECAST_NS:
        raise FrameError(f"a forecast is of {number} ns, above the maximum of {MAX_FORECAST_NS}")
    kind_of_task = _KINDS[kind]
    task = None if kind_of_task is None else Task(stage, kind_of_task, microbatch)
    header = Header(purpose, step, task, sequence, number, num_tensors)
    return Prefix(header, acknowledged, *checksums)


def _compare(what: str, checksum: int, told: int) -> None:
    if checksum != told:
        raise GarbledError(f"the {what} of a frame has checksum {checksum:08x}, not {told:08x}")


def decode_descriptors(data: bytes | bytearray, max_message_bytes: int) -> Forms:
    """Read and check the descriptors of one message; raises FrameError that says what is wrong."""
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


class FrameReader:
    """Puts frames together from bytes as they come.

    The bytes go straight to where they belong: into a header's buffer, then into the tensors that
    are made once that header was checked.
    """

    def __init__(self, max_message_bytes: int, *, checks_tensors: bool = False) -> None:
        """With `checks_tensors` their checksum is held against what the header says."""
        self._max_message_bytes = max_message_bytes
        self._checks_tensors = checks_tensors
        self._checksum = 0
        """Of what has come since the descriptors."""
        self._begin()

    def _begin(self) -> None:
        self._buffers = self._build()
        self.missing = next(self._buffers)
        """Where the next bytes belong; never empty."""

    def fill(self, num_bytes: int, now_ns: int) -> Frame | None:
        """So many bytes have come into `missing`: the frame if it is whole now.

        Raises FrameError when the bytes are not a frame.
        """
        if self._checks_tensors:
            self._checksum = zlib.crc32(self.missing[:num_bytes], self._checksum)
        if num_bytes < len(self.missing):
            self.missing = self.missing[num_bytes:]
            return None
        try:
            self.missing = self._buffers.send(now_ns)
        except StopIteration as end:
            frame: Frame = end.value
            self._begin()
            return frame
        return None

    def _build(self) -> Generator[memoryview, int, Frame]:
        """Yield the buffers to fill, one after the other, and return the frame made of them. It is
        sent the time at which each was full."""
        prefix = bytearray(_PREFIX.size + _CHECKSUM.size)
        arrived_ns = yield memoryview(prefix)
        header, acknowledged, descriptors_checksum, tensors_checksum = decode_prefix(prefix)
        if header.num_tensors == 0:
            return Frame(header, (), arrived_ns, 0, (), acknowledged)
        descriptors = bytearray(_DESCRIPTOR.size * header.num_tensors)
        yield memoryview(descriptors)
        _compare("descriptors", zlib.crc32(descriptors), descriptors_checksum)
        forms = decode_descriptors(descriptors, self._max_message_bytes)
        if header.purpose in _POSTED:
            return Frame(header, (), arrived_ns, payload_of(forms), forms, acknowledged)
        tensors: list[torch.Tensor | None] = []
        self._checksum = 0
        for form in forms:
            if form is None:
                tensors.append(None)
                continue
            dtype, shape = form
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.numel():
                yield tensor_bytes(tensor)
            tensors.append(tensor)
        if self._checks_tensors:
            _compare("payload", self._checksum, tensors_checksum)
        num_bytes = payload_bytes(tensors)
        return Frame(header, tuple(tensors), arrived_ns, num_bytes, (), acknowledged)
