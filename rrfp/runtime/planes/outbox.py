"""The sending side of a data plane: tensors wait here for a slot, and in it for their receiver.

The compute thread hands over a message and goes on. This outbox's own thread takes a slot, or waits
for one, lets a copy stream copy the tensors into it once the compute stream has made them, and
posts the message once the host has seen that the copy is done. Only then does it let go of the
tensors. Slots belong to the sender and are free again as soon as a receiver has pulled, which it
does whatever it computes: so they bind no decision.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.device import Event
from rrfp.runtime.planes.packing import num_pieces, packed_bytes, parts_of_pieces
from rrfp.runtime.planes.plane import Form, Plane, Posted, sizes_of
from rrfp.runtime.planes.slots import Slots, aligned
from rrfp.runtime.protocols import Clock, Message, monotonic


class PostingLink(Protocol):
    """The sending end of a link, as an outbox uses it."""

    def post(self, posted: Posted) -> None:
        """Queue a message whose first piece is in its slot."""

    def filled(self, posted: Posted) -> None:
        """One more piece of a posted message is in its slot."""

    def fail(self, error: RrfpError) -> None:
        """Nothing more will come."""


@dataclass(slots=True)
class _Waiting:
    """A message without a slot."""

    link: PostingLink
    message: Message
    made: Event
    """Complete once the compute stream has made the tensors."""
    queued_ns: int


@dataclass(slots=True)
class _Piece:
    """Part of a message that is on its way into its slot."""

    link: PostingLink
    posted: Posted
    number: int
    """Pieces of the message up to this one."""
    copied: Event
    tensors: tuple[torch.Tensor | None, ...]
    """Of the message: kept alive until they are copied."""


class Outbox:
    """One rank's slots of one plane, and the thread that fills them."""

    def __init__(self, plane: Plane, clock: Clock = monotonic) -> None:
        self._plane = plane
        self._device = plane.device
        self._clock = clock
        self._stream = plane.device.new_stream()
        self._condition = Condition()
        # Guarded by the condition.
        self._slots = Slots(plane.slab.numel())
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._num_unposted = 0
        self._has_failed = False
        # Of the thread alone.
        self._begun: Iterator[_Piece] | None = None
        """Copies what is left of the message in front, a piece at a time."""
        self._copying: deque[_Piece] = deque()
        self._thread = Thread(target=self._run, name=f"rrfp-outbox-{plane.name}", daemon=True)

    @property
    def plane(self) -> Plane:
        return self._plane

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def takes(self, message: Message) -> bool:
        """Whether a message ever fits."""
        return packed_bytes(sizes_of(forms_of(message))) <= self._slots.num_bytes

    def put(self, link: PostingLink, message: Message) -> None:
        """Send a message over a link. Its tensors lie on the plane's device and are contiguous; the
        calling thread computes them."""
        device = self._device
        made = device.record(device.compute_stream())
        with self._condition:
            self._waiting.append(_Waiting(link, message, made, self._clock()))
            self._num_unposted += 1
            self._condition.notify_all()

    def release(self, offset: int) -> None:
        """A receiver has pulled what lay in this slot."""
        with self._condition:
            self._slots.release(offset)
            self._condition.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything that was put is posted, or until the time is up."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_unposted == 0 or self._has_failed, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread; what was not posted is dropped. Copies under way end first."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
            # No copy may still read or write when the memory goes.
            self._device.synchronize(self._device.record(self._stream))
        except Exception as error:  # A thread that dies in silence would hang the run.
            self._fail(error)
        finally:
            self._begun = None
            self._copying.clear()

    def _go_on(self) -> bool:
        """Do the next thing that can be done, or wait; tells whether there will be another."""
        copying = self._copying
        if copying and self._device.query(copying[0].copied):
            self._tell(copying.popleft())
        elif self._begun is not None or self._begin(waits=not copying):
            self._copy_next()
        elif copying:
            self._device.synchronize(copying[0].copied)
        return not self._is_closed

    def _begin(self, *, waits: bool) -> bool:
        """Give the message in front a slot; tells whether there was such a thing."""
        with self._condition:
            while not self._is_closed:
                if self._waiting:
                    sizes = sizes_of(forms_of(self._waiting[0].message))
                    offset = self._slots.take(packed_bytes(sizes))
                    if offset is not None:
                        self._begun = self._pieces(self._waiting.popleft(), offset)
                        return True
                if not waits:
                    return False
                self._condition.wait()
        return False

    def _copy_next(self) -> None:
        assert self._begun is not None
        piece = next(self._begun)
        self._copying.append(piece)
        if piece.number == piece.posted.num_pieces:
            self._begun = None

    def _pieces(self, waiting: _Waiting, offset: int) -> Iterator[_Piece]:
        """Let the copy stream fill a slot, a piece each time."""
        message, device, plane = waiting.message, self._device, self._plane
        forms = forms_of(message)
        sizes = sizes_of(forms)
        posted = Posted(
            *(message.step, message.task, forms, offset, num_pieces(sizes, plane.piece_bytes)),
            latency_ns=message.latency_ns,
            queued_ns=waiting.queued_ns,
            begun_ns=self._clock(),
        )
        if plane.is_inline:
            posted.inline = tuple(self._slot_tensors(posted))
        sources = [_bytes(tensor) for tensor in message.tensors]
        device.wait(self._stream, waiting.made)
        for number in range(posted.num_pieces):
            for part in parts_of_pieces(sizes, plane.piece_bytes, number, number + 1):
                source = sources[part.tensor]
                assert source is not None
                begin = offset + part.offset
                device.copy(
                    plane.slab[begin : begin + part.num_bytes],
                    source[part.start : part.start + part.num_bytes],
                    self._stream,
                )
            copied = device.record(self._stream)
            yield _Piece(waiting.link, posted, number + 1, copied, message.tensors)

    def _slot_tensors(self, posted: Posted) -> Iterator[torch.Tensor | None]:
        """A posted message's tensors, where they lie in the slab."""
        slab = self._plane.slab
        begin = posted.offset
        for form in posted.forms:
            if form is None:
                yield None
                continue
            yield slab[begin : begin + form.num_bytes].view(form.dtype).view(form.shape)
            begin += aligned(form.num_bytes)

    def _tell(self, piece: _Piece) -> None:
        """The host has seen that a piece is in its slot: tell the receiver."""
        posted = piece.posted
        posted.copied_ns = self._clock()
        posted.num_filled = piece.number
        if piece.number == 1:
            piece.link.post(posted)
        else:
            piece.link.filled(posted)
        if piece.number == posted.num_pieces:
            with self._condition:
                self._num_unposted -= 1
                self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        """Tell every link whose message will not leave."""
        told = RrfpError(
            f"the outbox of plane {self._plane.name} failed with {type(error).__name__}: {error}"
        )
        with self._condition:
            self._has_failed = True
            links = {each.link for each in self._waiting} | {each.link for each in self._copying}
            self._condition.notify_all()
        for link in links:
            link.fail(told)


def forms_of(message: Message) -> tuple[Form | None, ...]:
    """What the tensors of a message are."""
    return tuple(
        None if tensor is None else Form(tensor.dtype, tuple(tensor.shape))
        for tensor in message.tensors
    )


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.reshape(-1).view(torch.uint8)
