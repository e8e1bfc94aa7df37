"""What one end has written and its peer has not acknowledged: kept, to be written again over the
next connection.

Both ends count the frames that mean something, each way of the link by itself and over all of its
connections. Every frame tells how many of them its sender has received whole; on a new connection
that is the first thing told (`Purpose.RESUME`), and each end goes on from there. A connection keeps
the order of its frames, so nothing is lost or doubled.

Who has heard much says so without being asked, so that little is kept: what is under way, and less
than `CONFIRM_FRAMES` frames and `CONFIRM_BYTES` of tensors.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rrfp.runtime.links.wire import (
    UNCOUNTED,
    Frame,
    FrameError,
    Header,
    Purpose,
    encode_header,
)
from rrfp.runtime.planes.packing import Form
from rrfp.runtime.planes.plane import Posted
from rrfp.runtime.protocols import Message

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


class Sending:
    """What one end writes: the frame under way, and all counted ones that its peer has not
    acknowledged, in order."""

    def __init__(self, now_ns: int) -> None:
        self.outbound: Outbound | None = None
        """Of which something is still to be written over this connection."""
        self.is_writing = False
        """Whether a write has begun and not ended."""
        self.is_taken = True
        """Whether the peer still takes something over this connection."""
        self.last_write_ns = now_ns
        self._tried_ns = now_ns
        self._owes_resume = False
        self._kept: deque[Outbound] = deque()
        self._num_acknowledged = 0
        self._num_again = 0
        """How many of the kept, the last ones, are still to be written again."""

    def again(self) -> Outbound | None:
        """What a new connection begins with, of which there is nothing on the first: the count,
        then what was written before."""
        if self._owes_resume:
            self._owes_resume = False
            return Outbound(Header(Purpose.RESUME))
        if self._num_again:
            self._num_again -= 1
            return self._kept[-1 - self._num_again]
        return None

    def keep(self, outbound: Outbound) -> None:
        """A frame is about to be written for the first time: keep it, if it is counted."""
        if outbound.header.purpose not in UNCOUNTED:
            assert not self._num_again, "what was written before goes first"
            self._kept.append(outbound)

    def attempt(self, now_ns: int) -> list[memoryview]:
        """What of the frame under way is to be written now."""
        assert self.outbound is not None
        self.is_writing = True
        self._tried_ns = now_ns
        return self.outbound.buffers

    def wrote(self, num_bytes: int, now_ns: int) -> Outbound | None:
        """So many bytes of it were written; gives the frame if it is out now."""
        self.is_writing = False
        outbound = self.outbound
        if num_bytes == 0 or outbound is None:
            return None
        self.last_write_ns = now_ns
        if outbound.start_ns is None:
            outbound.start_ns = self._tried_ns
        outbound.drop_written(num_bytes)
        if outbound.buffers:
            return None
        self.outbound = None
        return outbound

    def acknowledge(self, num_frames: int, *, resumes: bool) -> list[Outbound]:
        """The peer has so many in all: those of which this is news. When it `resumes`, over a new
        connection, all others are to be written again. Raises FrameError for what cannot be."""
        num_under_way = len(self._kept) - self._num_again
        num_new = num_frames - self._num_acknowledged
        if not 0 <= num_new <= num_under_way:
            raise FrameError(
                f"{num_frames} frames were acknowledged after {self._num_acknowledged}, with"
                f" {num_under_way} under way"
            )
        self._num_acknowledged = num_frames
        acknowledged = [self._kept.popleft() for _ in range(num_new)]
        for outbound in acknowledged:
            if outbound.start_ns is None:
                # The peer has told before whoever wrote it.
                outbound.start_ns = self._tried_ns
        if resumes:
            self._num_again = len(self._kept)
        return acknowledged

    def break_off(self) -> None:
        """The connection is broken: what is half written is kept."""
        self.outbound = None
        self._owes_resume = False
        self._num_again = 0

    def attach(self) -> None:
        """There is another connection."""
        self.is_taken = self._owes_resume = True

    @property
    def is_busy(self) -> bool:
        """Whether something that was begun is still to be written over this connection."""
        return self.outbound is not None or self._num_again > 0 or self._owes_resume

    @property
    def num_tasks(self) -> int:
        """How many frames that concern a task were begun and are still to be written."""
        left = list(self._kept)[len(self._kept) - self._num_again :]
        if self.outbound is not None:
            left.append(self.outbound)
        return sum(each.header.task is not None for each in left)


class Heard:
    """The counted frames that one end has received, and what of them it has told."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.confirm_bytes = CONFIRM_BYTES
        """Of tensors, after which it is much."""
        self._num_confirmed = 0
        self._unconfirmed_bytes = 0

    def count(self, frame: Frame) -> None:
        self.num_frames += 1
        if frame.tensors:
            self._unconfirmed_bytes += frame.num_bytes

    def confirm(self) -> int:
        """How many there are, to be told now."""
        self._num_confirmed, self._unconfirmed_bytes = self.num_frames, 0
        return self.num_frames

    @property
    def is_much(self) -> bool:
        """Whether to tell, although there is nothing else to say."""
        num_frames = self.num_frames - self._num_confirmed
        return num_frames >= CONFIRM_FRAMES or self._unconfirmed_bytes >= self.confirm_bytes
