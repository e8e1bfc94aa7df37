"""The outbox: tensors wait here for a slot, and in the slot for their receiver.

The compute thread stages a message and continues. The outbox's own thread takes a slot, or waits
for one, orders a copy on its stream behind the compute stream's event, and completes the staging
once the host has seen the end of the copy. Only then does it drop its reference to the tensors.
A receiver releases a slot as soon as it has fetched, whatever it computes: so slots bind no
decision. A message that is too large for any slot is copied to host memory of its own, and the
link's socket carries it.

The slab is this rank's own and serves all links of a plane, or it is one receiver's, mapped here.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.device.interface import Device, Event
from rrfp.runtime.planes.codec import (
    Forms,
    Tensors,
    aligned,
    flat,
    forms_of,
    packed_bytes,
    unpacked,
)
from rrfp.runtime.planes.plane import (
    NO_SLOT,
    Completions,
    Descriptor,
    PlaneFailed,
    Staged,
    Ticket,
)
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Clock, monotonic

LEAST_STAGED_BYTES = 4 * 2**20
"""Size from which a message of CPU tensors is staged. The socket is faster for smaller ones: it
wakes no thread of the sender."""


class Slots:
    """The slots of a slab: first fit, released in any order. Pure.

    The lowest gap that fits is used, so that memory which was never needed is never touched.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        """Sizes of the slots in use, by offset."""
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        """Gaps as (offset, size), sorted by offset; no two adjoin."""

    def allocate(self, num_bytes: int) -> int | None:
        """Allocate a slot in the lowest gap that fits, and return its offset; None if no gap is
        large enough. The size, at least 1 byte, is rounded up to a multiple of 256."""
        size = aligned(num_bytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[index]
                else:
                    self._free[index] = offset + size, free - size
                self._sizes[offset] = size
                self.used_bytes += size
                return offset
        return None

    def release(self, offset: int) -> bool:
        """Free the slot at this offset, and merge it with adjoining gaps; return False if no slot
        is there."""
        size = self._sizes.pop(offset, None)
        if size is None:
            return False
        self.used_bytes -= size
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = offset, before + size
        else:
            self._free.insert(index, (offset, size))
        return True


@dataclass(slots=True)
class _Waiting:
    """A message without a slot."""

    tensors: Tensors
    forms: Forms
    ticket: Ticket
    completions: Completions
    made: Event
    """Complete once the compute stream has made the tensors."""


@dataclass(slots=True)
class _Copying:
    """A message whose copy to its slot is queued on the stream."""

    waiting: _Waiting
    """Keeps the tensors alive until they are copied."""
    descriptor: Descriptor
    begun_ns: int
    copied: Event


class Outbox:
    """The slots of one slab, and the thread that fills them. Implements `Stager`."""

    def __init__(
        self,
        plane: TransportName,
        device: Device,
        slab: torch.Tensor,
        *,
        lends: bool = False,
        is_carried: bool = False,
        detach: Callable[[], None] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`slab` is flat and of uint8. With `lends` receivers may keep slots in one half of it.
        `is_carried`: the socket carries what lies in a slot. `detach` unmaps a slab of the
        receiver's."""
        self.plane = plane
        self._device = device
        self._slab: torch.Tensor | None = slab
        self._is_carried = is_carried
        self._unmap = detach
        self._clock = clock
        self._stream = device.new_stream()
        self._condition = Condition()
        # Guarded by the condition.
        num_bytes = slab.numel()
        self._lent = Slots(num_bytes // 2 if lends else 0)
        """Lower half, where receivers keep slots for any length of time."""
        self._slots = Slots(num_bytes - self._lent.num_bytes)
        """Slots above it, whose release does not depend on what a receiver computes."""
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._num_unstaged = 0
        self._users: set[Completions] = set()
        """Links that have staged something."""
        self._failure: RrfpError | None = None
        """Reason why nothing is staged any more."""
        # Used by the thread alone.
        self._copying: deque[_Copying] = deque()
        self._thread = Thread(target=self._run, name=f"rrfp-outbox-{plane}", daemon=True)

    def open(self) -> None:
        """Start the outbox's thread."""
        self._thread.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are in use."""
        with self._condition:
            return self._lent.used_bytes + self._slots.used_bytes

    def accepts(self, tensors: Tensors, num_bytes: int) -> bool:
        """Return whether to stage such a message: on a device that is not synchronous any with
        tensors; on the CPU from 4 MiB on, if it fits into the part of the slab that is not lent."""
        if not self._device.is_synchronous:
            return bool(tensors)
        if num_bytes < LEAST_STAGED_BYTES:
            return False
        return packed_bytes(forms_of(tensors)) <= self._slots.num_bytes

    def stage(self, tensors: Tensors, ticket: Ticket, completions: Completions) -> None:
        """Queue a message for a slot, to be copied by the outbox's thread once the calling thread's
        stream has made the tensors; does not wait. After a failure of the outbox it completes with
        `PlaneFailed` at once."""
        device = self._device
        made = device.record(device.compute_stream())
        waiting = _Waiting(tensors, forms_of(tensors), ticket, completions, made)
        with self._condition:
            failure = self._failure
            if failure is None:
                self._users.add(completions)
                self._waiting.append(waiting)
                self._num_unstaged += 1
                self._condition.notify_all()
        if failure is not None:
            completions.put(PlaneFailed(failure))

    def release(self, offset: int) -> None:
        """Free a slot, lent or not, and wake the thread; an offset without a slot frees nothing."""
        with self._condition:
            if not self._lent.release(offset):
                self._slots.release(offset - self._lent.num_bytes)
            self._condition.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is staged, the outbox has failed, or the time is up."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._num_unstaged == 0 or self._failure is not None, timeout_s
            )

    def detach(self, *, waits: bool = True) -> None:
        """End the thread and unmap a receiver's slab; without `waits` only if the thread has ended.
        Does nothing for a slab of this rank's own."""
        if self._unmap is None:
            return
        self._end()
        self._thread.join(None if waits else 0)
        if not self._thread.is_alive():
            self._slab = None
            unmap, self._unmap = self._unmap, None
            unmap()

    def close(self, timeout_s: float) -> None:
        """Drop what waits, end the thread within the timeout, and drop the slab if it has ended."""
        self._end()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._slab = None

    def _end(self) -> None:
        """Close the outbox: drop what waits, and let the thread end once its copies have."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._condition.notify_all()

    # The thread.

    def _run(self) -> None:
        """Stage messages until `close`, and then wait for the copies in flight, without passing
        them on; runs on the outbox's thread. An error fails every link that has used the outbox."""
        try:
            try:
                while self._progress():
                    pass
            finally:
                # No copy may still read or write when the memory goes.
                self._device.synchronize(self._device.record(self._stream))
        except Exception as error:  # A thread that ends silently would hang the run.
            self._fail(error)
        finally:
            self._copying.clear()

    def _progress(self) -> bool:
        """Complete the oldest copy if it has ended, or else begin the copy of the next message that
        gets a slot, or else wait for that copy, or for a message; return False once it is
        closed."""
        copying = self._copying
        if copying and self._device.query(copying[0].copied):
            self._complete(copying.popleft())
        elif (next_one := self._allocate(waits=not copying)) is not None:
            copying.append(self._copy(*next_one))
        elif copying:
            # A copy takes microseconds; the tasks that make the tensors may take long.
            is_made = self._device.query(copying[0].waiting.made)
            self._device.synchronize(copying[0].copied, soon=is_made)
        return not self._is_closed

    def _allocate(self, *, waits: bool) -> tuple[_Waiting, int, bool] | None:
        """Remove the first message, allocate its slot, and return it with the slab's offset of the
        slot (`NO_SLOT` if the message is larger than the part that is not lent) and whether the
        slot is lent. Without a message or a free slot wait, or with `waits=False` return None; None
        also after `close`."""
        with self._condition:
            while not self._is_closed:
                if self._waiting:
                    num_bytes = packed_bytes(self._waiting[0].forms)
                    if num_bytes > self._slots.num_bytes:
                        return self._waiting.popleft(), NO_SLOT, False
                    offset = self._lent.allocate(num_bytes)
                    if offset is not None:
                        return self._waiting.popleft(), offset, True
                    offset = self._slots.allocate(num_bytes)
                    if offset is not None:
                        return self._waiting.popleft(), self._lent.num_bytes + offset, False
                if not waits:
                    return None
                self._condition.wait()
        return None

    def _copy(self, waiting: _Waiting, offset: int, is_lent: bool) -> _Copying:
        """Queue the copy to a slot, or to new host memory without one, behind the work that makes
        the tensors; the host does not wait."""
        forms, device = waiting.forms, self._device
        begun_ns = self._clock()
        num_bytes = packed_bytes(forms)
        if offset == NO_SLOT:
            slot = device.empty_on_host(num_bytes)
        else:
            assert self._slab is not None
            slot = self._slab[offset : offset + num_bytes]
        targets = unpacked(slot, forms)
        device.wait(self._stream, waiting.made)
        for target, source in zip(targets, waiting.tensors, strict=True):
            if target is not None and source is not None:
                device.copy(flat(target), flat(source), self._stream)
        carried = targets if self._is_carried or offset == NO_SLOT else None
        descriptor = Descriptor(forms, offset, is_lent, carried)
        return _Copying(waiting, descriptor, begun_ns, device.record(self._stream))

    def _complete(self, copying: _Copying) -> None:
        """Pass a message whose copy the host has seen end to its link, and count it as staged."""
        waiting = copying.waiting
        staged = Staged(waiting.ticket, copying.descriptor, copying.begun_ns, self._clock())
        waiting.completions.put(staged)
        with self._condition:
            self._num_unstaged -= 1
            self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        """Drop what waits, refuse later messages, and pass the error to every link that has staged
        something."""
        failure = RrfpError(
            f"the outbox of plane {self.plane} failed with {type(error).__name__}:"
            f" {first_line(str(error))}"
        )
        failure.__cause__ = error
        with self._condition:
            self._failure = failure
            self._waiting.clear()
            users = [*self._users]
            self._condition.notify_all()
        for completions in users:
            completions.put(PlaneFailed(failure))
