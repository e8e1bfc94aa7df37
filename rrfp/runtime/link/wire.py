"""The frames that travel on a link: a fixed binary header, then tensors as they lie in memory.

A frame is a prefix (60 bytes), one descriptor (72 bytes) for each tensor, and the bytes of the
tensors in that order. Only messages carry tensors. The frame of a staged message has descriptors
only: its tensors lie in a slot of the link's data plane (`rrfp.runtime.planes.plane`). Prefix and
descriptors are checked before memory is allocated for the tensors, and nothing on the wire is
executed or unpickled. Integers are little-endian; tensors travel in the byte order of the
(little-endian) hosts.

Prefix and descriptors each have a CRC-32. The tensors have one where nothing else protects them:
between hosts without TLS. A kernel that copies memory within a host needs no such check.
"""

import struct
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from rrfp.runtime.planes.codec import (
    DESCRIPTOR_BYTES,
    Form,
    Forms,
    FrameError,
    decode_forms,
    encode_forms,
    form_bytes,
    payload_bytes,
    tensor_bytes,
)
from rrfp.schedule.tasks import Kind, Task

MAGIC = b"RRFP"
VERSION = 5
MAX_FORECAST_NS = 3_600_000_000_000
"""Longest forecast that a sender makes and a receiver accepts; nothing waits longer for a task."""

# magic, version, purpose, kind, number of tensors, stage, microbatch, step, sequence, number,
# acknowledged, checksums of the descriptors and of the tensors
_PREFIX = struct.Struct("<4sBBBBiiqqqqII")
# checksum of the prefix before it
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size

_KINDS = (None, Kind.F, Kind.B, Kind.W)


class Purpose(IntEnum):
    """Purpose of a frame; the values are those on the wire."""

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


_STAGED = frozenset({Purpose.POSTED, Purpose.LENT})
_WITH_TENSORS = _STAGED | {Purpose.MESSAGE}
_WITH_TASK = _WITH_TENSORS | {Purpose.REPORT, Purpose.DECISION, Purpose.FORECAST}
UNCOUNTED = frozenset({Purpose.HEARTBEAT, Purpose.RESUME})
"""Frames that concern one connection only. All other frames are counted, and retransmitted over the
next connection if the peer had not received them (`rrfp.runtime.link.channel`)."""


class GarbledError(FrameError):
    """The received bytes differ from those that were sent."""


@dataclass(frozen=True, slots=True)
class Header:
    """Fixed part of a frame. Purposes that concern no task have no `task`."""

    purpose: Purpose
    step: int = 0
    task: Task | None = None
    sequence: int = 0
    """Number of messages on this link before this one, staged ones included; 0 for every other
    purpose."""
    number: int = 0
    """Position in the agreed sequence (decision), number of credits (credit), ns until a task's
    input is expected (forecast), or offset of a slot (posted, lent, released)."""
    num_tensors: int = 0


class Prefix(NamedTuple):
    """Decoded prefix of a frame."""

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
    """Time at which its prefix was complete."""
    num_bytes: int
    """Bytes of its tensors."""
    forms: Forms = ()
    """Forms of the tensors of a staged message."""
    acknowledged: int = 0
    """Number of counted frames that its sender has received on this link, over all connections."""


def encode_header(
    header: Header,
    tensors: Sequence[torch.Tensor | Form | None] = (),
    acknowledged: int = 0,
    tensors_checksum: int = 0,
) -> bytes:
    """Encode the prefix, with its checksum, and the descriptors of the tensors or of their forms;
    without the tensors' own bytes."""
    task = header.task
    descriptors = encode_forms(tensors)
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


def checksum_of(buffers: Iterable[memoryview]) -> int:
    """Compute the CRC-32 of all the buffers together, in their order."""
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def decode_prefix(data: bytes | bytearray) -> Prefix:
    """Decode and check a prefix. Raises FrameError for an invalid one, and GarbledError for a wrong
    checksum."""
    fields, (checksum,) = data[: _PREFIX.size], _CHECKSUM.unpack_from(data, _PREFIX.size)
    _compare("header", zlib.crc32(fields), checksum)
    (
        magic,
        version,
        purpose,
        kind,
        num_tensors,
        stage,
        microbatch,
        step,
        sequence,
        number,
        acknowledged,
        descriptors_checksum,
        tensors_checksum,
    ) = _PREFIX.unpack(fields)
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
    return Prefix(header, acknowledged, descriptors_checksum, tensors_checksum)


def _compare(what: str, checksum: int, expected: int) -> None:
    """Raise GarbledError if the checksum differs from the expected one."""
    if checksum != expected:
        raise GarbledError(f"the {what} of a frame has checksum {checksum:08x}, not {expected:08x}")


class FrameReader:
    """Assembles frames from bytes as they arrive.

    The bytes go straight to their place: into a header's buffer, then into the tensors, which are
    allocated once that header has been checked.
    """

    def __init__(self, max_message_bytes: int, *, checks_tensors: bool = False) -> None:
        """With `checks_tensors` the tensors' checksum is compared with the header's."""
        self._max_message_bytes = max_message_bytes
        self._checks_tensors = checks_tensors
        self._checksum = 0
        """Checksum of the tensor bytes so far."""
        self._begin()

    def _begin(self) -> None:
        """Begin the next frame: its first buffer is the prefix."""
        self._buffers = self._build()
        self.missing = next(self._buffers)
        """Buffer for the next bytes; never empty."""

    def fill(self, num_bytes: int, now_ns: int) -> Frame | None:
        """Account for bytes written into `missing`, and return the frame if it is complete; else
        None.

        Raises FrameError if the bytes are not a frame, and GarbledError for a wrong checksum.
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
        """Yield the buffers to fill, one after the other, and return the frame made of them. Each
        `send` passes the time at which the buffer was full. Raises FrameError for an invalid
        header, before it allocates tensors, and GarbledError for a wrong checksum."""
        prefix = bytearray(PREFIX_BYTES)
        arrived_ns = yield memoryview(prefix)
        header, acknowledged, descriptors_checksum, tensors_checksum = decode_prefix(prefix)
        if header.num_tensors == 0:
            return Frame(header, (), arrived_ns, 0, (), acknowledged)
        descriptors = bytearray(DESCRIPTOR_BYTES * header.num_tensors)
        yield memoryview(descriptors)
        _compare("descriptors", zlib.crc32(descriptors), descriptors_checksum)
        forms = decode_forms(descriptors, self._max_message_bytes)
        if header.purpose in _STAGED:
            return Frame(header, (), arrived_ns, form_bytes(forms), forms, acknowledged)
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
