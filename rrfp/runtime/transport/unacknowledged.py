"""What one end has written and its peer has not acknowledged: kept, to be written again over the
next connection.

Both ends count the frames that mean something, each way of the link by itself and over all of its
connections. Every frame tells how many of them its sender has received whole; on a new connection
that is the first thing told (`Purpose.RESUME`), and each end goes on from there. A connection keeps
the order of its frames, so nothing is lost or doubled.

A receiver of much confirms it before it is asked, so that little is kept: what is under way, and
less than `CONFIRM_FRAMES` frames and `CONFIRM_BYTES` bytes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rrfp.runtime.planes.packing import Form
from rrfp.runtime.planes.plane import Posted
from rrfp.runtime.protocols import Message
from rrfp.runtime.transport.wire import FrameError, Header, encode_header

CONFIRM_FRAMES = 64
CONFIRM_BYTES = 4 * 2**20


@dataclass(slots=True, eq=False)
class Outbound:
    """A frame on its way out, perhaps for the second time."""

    header: Header
    tensors: Sequence[torch.Tensor | Form | None] = ()
    payload: Sequence[memoryview] = ()
    """The bytes of its tensors, which stay where they lie."""
    checksum: int = 0
    """Of these, where they are checked."""
    message: Message | Posted | None = None
    """The message that has left once this is written."""
    queued_ns: int = 0
    """When the message was queued."""
    start_ns: int | None = None
    """When its first byte was written; in a paced run, when its modelled time began."""
    is_out: bool = False
    """It was written whole, or arrived whole."""
    buffers: list[memoryview] = field(default_factory=list)
    """What of it is still to be written over this connection."""

    def begin(self, acknowledged: int) -> None:
        """Lay out its bytes, with how many frames its sender has received."""
        data = encode_header(self.header, self.tensors, acknowledged, self.checksum)
        self.buffers = [memoryview(data), *self.payload]

    def drop_written(self, num_bytes: int) -> None:
        """Cut off the first so many bytes."""
        buffers, num_whole = self.buffers, 0
        for buffer in buffers:
            if num_bytes < buffer.nbytes:
                break
            num_bytes -= buffer.nbytes
            num_whole += 1
        del buffers[:num_whole]
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]


class Unacknowledged:
    """The counted frames of one way of a link that its peer has not acknowledged, in order."""

    def __init__(self) -> None:
        self._kept: deque[Outbound] = deque()
        self._num_acknowledged = 0
        self._num_again = 0
        """How many of the kept, the last ones, are still to be written again."""

    def add(self, outbound: Outbound) -> None:
        """Keep a frame whose writing begins."""
        assert not self._num_again, "what was written before goes first"
        self._kept.append(outbound)

    def acknowledge(self, num_frames: int, *, resumes: bool = False) -> list[Outbound]:
        """The peer has so many in all: those of which this is news. When it `resumes`, over a new
        connection, all others are to be written again. Raises FrameError for what cannot be."""
        num_under_way = len(self._kept) - (0 if resumes else self._num_again)
        num_new = num_frames - self._num_acknowledged
        if not 0 <= num_new <= num_under_way:
            raise FrameError(
                f"{num_frames} frames were acknowledged after {self._num_acknowledged}, with"
                f" {num_under_way} under way"
            )
        self._num_acknowledged = num_frames
        acknowledged = [self._kept.popleft() for _ in range(num_new)]
        if resumes:
            self._num_again = len(self._kept)
        return acknowledged

    @property
    def has_again(self) -> bool:
        """Whether there is something to be written again."""
        return self._num_again > 0

    def again(self) -> Outbound:
        """The next frame to be written again."""
        self._num_again -= 1
        return self._kept[-1 - self._num_again]

    @property
    def num_tasks_again(self) -> int:
        """How many frames that concern a task are still to be written again."""
        kept = list(self._kept)[len(self._kept) - self._num_again :]
        return sum(each.header.task is not None for each in kept)
