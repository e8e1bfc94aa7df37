"""The interface between a link and its data plane: memory beside the socket for large tensors.

A plane has two calls. `Stager.stage` makes the tensors of a message available to the peer, and its
result is a `Descriptor`; the link's socket carries that in the message's frame. `Fetcher.fetch`
turns a descriptor into tensors of the receiver. Both return at once, and both complete into one
queue, the link's `Completions`. The link handles envelopes and never looks at the memory. Order,
credits, heartbeats, farewell and loss stay those of the link.

Slots belong to either side:

| slots of | `stage`                      | `fetch`                            |
|----------|------------------------------|------------------------------------|
| sender   | copies to a slot of its own  | copies from the slot or borrows it |
| receiver | copies to a slot of the peer | uses the slot itself               |

In both cases the sender chooses the slot, and the receiver releases it by its offset. The side that
is attached to the other's memory detaches before it says farewell, and only then does the owner
free it. So a receiver that owns the slots answers with their place at connect
(`Attachment.answer`), and then the sender's stager detaches.

No stream of a device ever waits for another process: a message is announced once the *host* has
seen the end of its copy.
"""

import ctypes
import mmap
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.codec import Forms, Tensors, copied, packed_bytes, unpacked
from rrfp.runtime.planes.registry import TransportName
from rrfp.schedule.tasks import Task

TRIAL_BYTES = 64 * 2**20
"""Bytes that a plane transfers at connect to measure its speed, in windows of `WINDOW_BYTES`."""
WINDOW_BYTES = 4 * 2**20
NO_SLOT = -1
"""Offset in a descriptor whose tensors are in no slot."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Place and forms of the tensors of a staged message."""

    forms: Forms
    offset: int
    """Offset of the slot in its slab, or `NO_SLOT`."""
    is_lent: bool = False
    """True if the receiver may use the slot itself for as long as it needs the tensors."""
    carried: Tensors | None = None
    """Tensors on the host, where the link's socket carries them."""


class Ticket(Protocol):
    """The link's own name for a message, which a plane returns with its result."""

    @property
    def task(self) -> Task:
        """The task that takes the message as its input."""
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """Result of `Stager.stage`."""

    ticket: Ticket
    descriptor: Descriptor
    begun_ns: int
    """Time at which the copy began."""
    copied_ns: int
    """Time at which the host saw its end."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of `Fetcher.fetch`."""

    ticket: Ticket
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """Nothing uses the tensors in a lent slot any more."""

    offset: int


@dataclass(frozen=True, slots=True)
class PlaneFailed:
    """The link cannot use its plane any more."""

    error: RrfpError


Completion = Staged | Fetched | SlotFreed | PlaneFailed


@dataclass(frozen=True, slots=True)
class Fetch:
    """A link's request: `Fetcher.fetch`."""

    descriptor: Descriptor
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Release:
    """A link's request: `Stager.release`."""

    offset: int


PlaneRequest = Fetch | Release


class Completions(Protocol):
    """The queue of a link into which its plane's calls complete."""

    def put(self, completion: Completion, /) -> None:
        """Pass a completion to the link. Any thread may call it. With `SlotFreed` a finalizer may
        call it between any two instructions, so that it then waits for no lock."""


class PlaneRefusal(Exception):  # noqa: N818 - a reason to use another plane, not an error
    """A plane cannot serve a link; the message is one sentence with the reason."""


class Stager(Protocol):
    """The sending end of a plane, for one link or for several."""

    plane: TransportName

    def open(self) -> None:
        """Start its threads, if it has any."""

    def accepts(self, tensors: Tensors, num_bytes: int) -> bool:
        """Return whether to stage such a message; else the socket carries it."""
        ...

    def stage(self, tensors: Tensors, ticket: Ticket, completions: Completions) -> None:
        """Make contiguous tensors available to the peer, once the calling thread's stream has
        computed them. Completes with `Staged` or `PlaneFailed`, in the order of the calls."""

    def release(self, offset: int) -> None:
        """Reuse a slot: the peer has released it."""

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is staged, or until the time is up."""

    def detach(self, *, waits: bool = True) -> None:
        """Stop using the peer's memory, if it uses any (see `Fetcher.detach`)."""

    def close(self, timeout_s: float) -> None:
        """Drop what is not staged, and end every thread."""


class Fetcher(Protocol):
    """The receiving end of one link's plane."""

    def fetch(self, descriptor: Descriptor, ticket: Ticket, completions: Completions) -> None:
        """Obtain the tensors of a message. Completes with `Fetched` or `PlaneFailed`, and for a
        slot that it continues to use, later with `SlotFreed`."""

    def detach(self, *, waits: bool = True) -> None:
        """Stop using the peer's memory, which the peer frees afterwards; later fetches complete
        nothing. With `waits=False`, for a lost link, it does not wait for the device, which
        may hang; what cannot be closed without that stays open until this process ends."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Description of one side of a plane, with which a peer attaches itself to it."""

    plane: TransportName
    values: Mapping[str, object]
    descriptors: tuple[int, ...] = ()
    """File descriptors to send with it, over a Unix socket."""


class Attachment(NamedTuple):
    """The receiving end of a plane, attached to its peer."""

    fetcher: Fetcher
    gb_per_s: float | None = None
    """Measured speed; None if the plane measures nothing."""
    answer: Offer | None = None
    """Place of the slots, where the receiver owns them."""


class Plane(Protocol):
    """One rank's side of a data plane."""

    name: TransportName
    device: Device
    is_carried: bool
    """True if the link's socket carries what lies in a slot; the slot is free once the peer has
    acknowledged the frame."""
    reserved_bytes: int
    """Upper bound of the memory that it takes on this rank, of the host or the device."""

    def offer(self) -> Offer:
        """Describe the sending side for the receiver of a link."""
        ...

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        """Attach the receiving side of a link to its sender, and measure. Raises PlaneRefusal."""
        ...

    def stager(self, answer: Offer | None, peer: int) -> Stager:
        """Make the sending side of a link whose receiver has attached itself; its caller opens it.
        Without an `answer` all links of the rank share it. Raises PlaneRefusal."""
        ...

    def close(self, *, are_detached: bool) -> None:
        """Free this rank's memory. `are_detached`: all peers have detached from it; otherwise one
        may still use it, or be lost, and device memory may stay."""


class MappedFetcher:
    """Copies from a peer's slab that is mapped into this process, host or device memory, on the
    calling thread. Implements `Fetcher`."""

    def __init__(
        self, device: Device, slab: torch.Tensor, peer: int, memory: mmap.mmap | None = None
    ) -> None:
        """`memory` is the slab's, where its slots may be lent."""
        self._device = device
        self._stream = device.new_stream()
        self._slab: torch.Tensor | None = slab
        self._peer = peer
        self._memory = memory

    def fetch(self, descriptor: Descriptor, ticket: Ticket, completions: Completions) -> None:
        """Copy a message's tensors from the peer's slab, waiting for the copy; a lent slot in
        memory of the host is viewed without a copy instead. Completes with `PlaneFailed` beyond the
        slab's end, and with nothing after `detach`."""
        slab = self._slab
        if slab is None:
            return
        end = descriptor.offset + packed_bytes(descriptor.forms)
        if end > slab.numel():
            error = beyond_slab(self._peer, ticket, slab.numel())
            completions.put(PlaneFailed(error))
            return
        tensors: Tensors
        if descriptor.is_lent and self._memory is not None:
            tensors = borrowed(self._memory, descriptor, completions)
        else:
            sources = unpacked(slab[descriptor.offset : end], descriptor.forms)
            tensors = copied(sources, self._device, self._stream)
        completions.put(Fetched(ticket, tensors))

    def _await_copies(self) -> None:
        """Block until the host has seen the end of every copy."""
        self._device.synchronize(self._device.record(self._stream))

    def measure(self) -> float:
        """Copy 64 MiB from the peer's slab in windows of up to 4 MiB, and return the speed in
        GB/s."""
        slab, device, stream = self._slab, self._device, self._stream
        assert slab is not None
        source = slab[: min(WINDOW_BYTES, slab.numel())]
        target = device.empty(source.shape, source.dtype, stream)
        num_windows = TRIAL_BYTES // source.numel()
        device.copy(target, source, stream)
        self._await_copies()
        begun_s = time.perf_counter()
        for _ in range(num_windows):
            device.copy(target, source, stream)
        self._await_copies()
        return num_windows * source.numel() / (time.perf_counter() - begun_s) / 1e9

    def detach(self, *, waits: bool = True) -> None:
        """Drop the slab, after a wait for every copy if `waits`; later fetches complete nothing. A
        second call does nothing."""
        if self._slab is not None:
            if waits:
                self._await_copies()
            self._slab = self._memory = None


class LandingFetcher:
    """Copies tensors that the socket has carried to the device; uses the plane's own fetcher for
    all others. Implements `Fetcher`."""

    def __init__(self, device: Device, fetcher: Fetcher | None = None) -> None:
        self._device = device
        self._stream = device.new_stream()
        self._fetcher = fetcher

    def fetch(self, descriptor: Descriptor, ticket: Ticket, completions: Completions) -> None:
        """Copy tensors that the socket has carried to the device, waiting for the copy. Pass any
        other message to the plane's own fetcher; without one it completes nothing."""
        if descriptor.carried is not None:
            tensors = copied(descriptor.carried, self._device, self._stream)
            completions.put(Fetched(ticket, tensors))
        elif self._fetcher is not None:
            self._fetcher.fetch(descriptor, ticket, completions)

    def detach(self, *, waits: bool = True) -> None:
        """Detach the plane's own fetcher, if there is one."""
        if self._fetcher is not None:
            self._fetcher.detach(waits=waits)


def beyond_slab(peer: int, ticket: Ticket, slab_bytes: int) -> RrfpError:
    """Make, but not raise, the error for a message that lies outside its slab."""
    return RrfpError(
        f"rank {peer} posted {ticket.task} beyond its outbox of {slab_bytes} bytes; see that all"
        " ranks run the same version of rrfp"
    )


def borrowed(memory: mmap.mmap, descriptor: Descriptor, completions: Completions) -> Tensors:
    """View the tensors in their slot, without a copy; `SlotFreed` follows once nothing uses them.

    The tensors keep neither the link nor its inbox alive.
    """
    num_bytes = packed_bytes(descriptor.forms)
    view = (ctypes.c_char * num_bytes).from_buffer(memory, descriptor.offset)
    # A tensor keeps the view alive for as long as it uses its memory.
    link = weakref.ref(completions)
    weakref.finalize(view, _free, link, descriptor.offset).atexit = False
    return unpacked(torch.frombuffer(view, dtype=torch.uint8), descriptor.forms)


def _free(link: "weakref.ref[Completions]", offset: int) -> None:
    """Put `SlotFreed` into the link's queue, if the link still exists."""
    completions = link()
    if completions is not None:
        completions.put(SlotFreed(offset))
