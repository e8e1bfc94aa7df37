"""The sending side of a data plane: tensors wait here for a slot, and in it for their receiver.

The compute thread hands over a message and goes on. This outbox's own thread takes a slot, or waits
for one, lets a copy stream copy the tensors into it once the compute stream has made them, and
posts the message once the host has seen that the copy is done. Only then does it let go of the
tensors. Slots belong to the sender and are free again as soon as a receiver has pulled, which it
does whatever it computes: so they bind no decision. A message that is too large for any slot is
copied to memory of the host that is made for it, and the link's socket carries it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.device.interface import Event
from rrfp.runtime.planes.codec import Forms, flat, forms_of, packed_bytes, unpacked
from rrfp.runtime.planes.plane import Plane, Posted
from rrfp.runtime.planes.slots import Slots
from rrfp.runtime.protocols import Clock, Message, monotonic

_NO_SLOT = -1


class PostingLink(Protocol):
    """The sending end of a link, as an outbox uses it."""

    def post(self, posted: Posted) -> None:
        """Queue a message that lies in its slot."""

    def fail(self, error: RrfpError) -> None:
        """Nothing more will come."""


@dataclass(slots=True)
class _Waiting:
    """A message without a slot."""

    link: PostingLink
    message: Message
    forms: Forms
    made: Event
    """Complete once the compute stream has made the tensors."""
    queued_ns: int


@dataclass(slots=True)
class _Copying:
    """A message on its way into its slot."""

    link: PostingLink
    posted: Posted
    made: Event
    copied: Event
    tensors: Sequence[torch.Tensor | None]
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
        num_bytes = plane.slab.numel()
        self._lent = Slots(num_bytes // 2 if plane.lends else 0)
        """The lower half, where receivers keep slots for as long as they like."""
        self._slots = Slots(num_bytes - self._lent.num_bytes)
        """Above it, what goes round whatever is computed."""
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._num_unposted = 0
        self._links: set[PostingLink] = set()
        """Those that have sent something."""
        self._failure: RrfpError | None = None
        """Why nothing leaves any more."""
        # Of the thread alone.
        self._copying: deque[_Copying] = deque()
        self._thread = Thread(target=self._run, name=f"rrfp-outbox-{plane.name}", daemon=True)

    @property
    def plane(self) -> Plane:
        return self._plane

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_taken_bytes(self) -> int:
        """Of the slots that are in use."""
        with self._condition:
            return self._lent.num_taken_bytes + self._slots.num_taken_bytes

    def takes(self, message: Message) -> bool:
        """Whether a message ever fits."""
        return packed_bytes(forms_of(message.tensors)) <= self._slots.num_bytes

    def put(self, link: PostingLink, message: Message) -> None:
        """Send a message over a link. Its tensors lie on the plane's device and are contiguous; the
        calling thread computes them."""
        device = self._device
        made = device.record(device.compute_stream())
        waiting = _Waiting(link, message, forms_of(message.tensors), made, self._clock())
        with self._condition:
            failure = self._failure
            if failure is None:
                self._links.add(link)
                self._waiting.append(waiting)
                self._num_unposted += 1
                self._condition.notify_all()
        if failure is not None:
            link.fail(failure)

    def release(self, offset: int) -> None:
        """A receiver has pulled what lay in this slot."""
        with self._condition:
            if not self._lent.release(offset):
                self._slots.release(offset - self._lent.num_bytes)
            self._condition.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything that was put is posted, or until the time is up."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._num_unposted == 0 or self._failure is not None, timeout_s
            )

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
            try:
                while self._go_on():
                    pass
            finally:
                # No copy may still read or write when the memory goes.
                self._device.synchronize(self._device.record(self._stream))
        except Exception as error:  # A thread that dies in silence would hang the run.
            self._fail(error)
        finally:
            self._copying.clear()

    def _go_on(self) -> bool:
        """Do the next thing that can be done, or wait; tells whether there will be another."""
        copying = self._copying
        if copying and self._device.query(copying[0].copied):
            self._post(copying.popleft())
        elif (taken := self._take(waits=not copying)) is not None:
            copying.append(self._copy(*taken))
        elif copying:
            # A copy takes microseconds; the tasks that make the tensors may take long.
            is_made = self._device.query(copying[0].made)
            self._device.synchronize(copying[0].copied, soon=is_made)
        return not self._is_closed

    def _take(self, *, waits: bool) -> tuple[_Waiting, int, bool] | None:
        """The message in front, the offset of its slot (-1 if none is large enough), and whether
        that is lent; None if there is no such thing now."""
        with self._condition:
            while not self._is_closed:
                if self._waiting:
                    num_bytes = packed_bytes(self._waiting[0].forms)
                    if num_bytes > self._slots.num_bytes:
                        return self._waiting.popleft(), _NO_SLOT, False
                    offset = self._lent.take(num_bytes)
                    if offset is not None:
                        return self._waiting.popleft(), offset, True
                    offset = self._slots.take(num_bytes)
                    if offset is not None:
                        return self._waiting.popleft(), self._lent.num_bytes + offset, False
                if not waits:
                    return None
                self._condition.wait()
        return None

    def _copy(self, waiting: _Waiting, offset: int, is_lent: bool) -> _Copying:
        """Let the copy stream fill a slot, or memory of the host."""
        message, forms, device = waiting.message, waiting.forms, self._device
        begun_ns = self._clock()
        num_bytes = packed_bytes(forms)
        if offset == _NO_SLOT:
            slot = device.empty_on_host(num_bytes)
        else:
            slot = self._plane.slab[offset : offset + num_bytes]
        targets = unpacked(slot, forms)
        device.wait(self._stream, waiting.made)
        for target, source in zip(targets, message.tensors, strict=True):
            if target is not None and source is not None:
                device.copy(flat(target), flat(source), self._stream)
        posted = Posted(
            *(message.step, message.task, forms, offset, message.latency_ns),
            *(waiting.queued_ns, begun_ns, begun_ns, is_lent),
            inline=targets if self._plane.is_inline or offset == _NO_SLOT else None,
        )
        copied = device.record(self._stream)
        return _Copying(waiting.link, posted, waiting.made, copied, message.tensors)

    def _post(self, copying: _Copying) -> None:
        """The host has seen that a message is in its slot: tell the receiver."""
        copying.posted.copied_ns = self._clock()
        copying.link.post(copying.posted)
        with self._condition:
            self._num_unposted -= 1
            self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        """Tell every link: what fails one message, fails those behind it."""
        told = RrfpError(
            f"the outbox of plane {self._plane.name} failed with {type(error).__name__}:"
            f" {first_line(str(error))}"
        )
        told.__cause__ = error
        with self._condition:
            self._failure = told
            self._waiting.clear()
            links = [*self._links]
            self._condition.notify_all()
        for link in links:
            link.fail(told)
