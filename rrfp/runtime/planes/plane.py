"""A data plane: memory that a rank lends to its peers, and how these take what lies in it.

The sender owns an *outbox*: a slab of memory, divided into slots. It copies a message's tensors
into a slot and, once the host has seen that they are there, *posts* the message: a frame on the
link's own socket says what the tensors are and at which offset of the slab they lie. The receiver
*pulls* them into memory of its own and, once its host has seen that they are there, tells its rank
that the message has arrived, and the sender that the slot is free. So the socket stays the control
plane: order, credits, heartbeats, farewell and loss are those of the link.

No stream of a device ever waits for another process.

Where both sides are the CPU of one host, a slot may be *lent*: the receiver's tensors are the slot,
which it releases once they are gone. Slots are lent in one half of a slab, so that those in the
other half go round whatever is computed.
"""

import ctypes
import mmap
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.codec import Forms, copied, packed_bytes, unpacked
from rrfp.runtime.planes.registry import TransportName
from rrfp.schedule.tasks import Task

TRIAL_BYTES = 64 * 2**20
"""What a plane carries at connect, to say how fast it is, in windows of `WINDOW_BYTES`."""
WINDOW_BYTES = 4 * 2**20


@dataclass(slots=True, eq=False)
class Posted:
    """A message whose tensors lie in a slot of this rank's outbox."""

    step: int
    task: Task
    forms: Forms
    offset: int
    """Of the slot, in the slab; -1 for a message that is too large for any slot."""
    latency_ns: int
    queued_ns: int
    """When the compute thread handed it over."""
    begun_ns: int
    """When its copy into the slot began."""
    copied_ns: int
    """When the host saw that it was there."""
    is_lent: bool
    """Whether the receiver may use the slot itself for as long as it needs the tensors."""
    inline: Sequence[torch.Tensor | None] | None
    """Where the socket is to carry the tensors: copies on the host."""


@dataclass(slots=True, eq=False)
class Pull:
    """A message whose tensors are to be taken from its sender's outbox."""

    step: int
    task: Task
    sequence: int
    forms: Forms
    offset: int
    heard_ns: int
    """When its frame was here."""
    is_lent: bool
    """Whether the slot itself may be used for as long as the tensors are needed."""
    inline: Sequence[torch.Tensor | None] | None = None
    """The tensors on the host, where the socket has carried them."""
    begun_ns: int = 0
    """When it began to be pulled."""


Release = Callable[[int], None]
"""Told, on any thread and between any two instructions, the offset of a lent slot whose tensors are
gone."""

Pulled = Callable[[Pull, Sequence[torch.Tensor | None] | RrfpError], None]
"""Told what was pulled once the host has seen it, or why it never will be; on any thread."""


class PlaneRefusal(Exception):  # noqa: N818 - a reason to take another plane, and no error
    """One sentence: why a plane does not serve a link."""


class Puller(Protocol):
    """The receiving end of one link's plane."""

    def pull(self, pull: Pull, told: Pulled, release: Release) -> None:
        """Take a message out of its slot. `release` is for a lent slot."""

    def detach(self, *, waits: bool = True) -> None:
        """Let go of the peer's memory; nothing is pulled any more. The peer frees it afterwards.
        With `waits=False`, for a lost link, it does not wait for the device, which may hang: what
        cannot be closed without that stays open until this process ends."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer must know to attach itself to a plane."""

    plane: TransportName
    values: Mapping[str, object]
    descriptors: tuple[int, ...] = ()
    """Files that travel along, over a Unix socket."""


class Plane(Protocol):
    """One rank's side of a data plane: its own slab, and how to attach to those of its peers."""

    name: TransportName
    device: Device
    lends: bool
    """Whether receivers may use slots for as long as they need what is in them."""
    is_inline: bool
    """Whether the link's socket carries what lies in a slot, instead of a pull."""
    reserved_bytes: int
    """The most memory that it takes on this rank, of the host or the device."""

    @property
    def slab(self) -> torch.Tensor:
        """Flat, uint8: where this rank's slots lie. Not there once the plane is closed."""
        ...

    def offer(self) -> Offer: ...

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        """Attach to a peer's slab, and measure: what pulls from it, and its GB/s. Raises
        PlaneRefusal."""
        ...

    def close(self, *, are_detached: bool) -> None:
        """Let go of the slab, and free it. `are_detached`: all peers have said that they have
        detached themselves; else one may still read from it, or be lost."""


def beyond_slab(peer: int, pull: Pull, slab_bytes: int) -> RrfpError:
    """The error of a message that does not lie in its sender's slab."""
    return RrfpError(
        f"rank {peer} posted {pull.task} beyond its outbox of {slab_bytes} bytes; see that all"
        " ranks run the same version of rrfp"
    )


# Pulling out of a peer's slab that is mapped into this process: host memory, or a device's.


class MappedPuller:
    """Pulls on the link's own thread. Implements `rrfp.runtime.planes.plane.Puller`."""

    def __init__(
        self, device: Device, slab: torch.Tensor, peer: int, memory: mmap.mmap | None = None
    ) -> None:
        """`memory` is the slab's, where its slots may be lent."""
        self._device = device
        self._stream = device.new_stream()
        self._slab: torch.Tensor | None = slab
        self._peer = peer
        self._memory = memory

    def pull(self, pull: Pull, told: Pulled, release: Release) -> None:
        slab = self._slab
        if slab is None:
            return
        end = pull.offset + packed_bytes(pull.forms)
        if end > slab.numel():
            told(pull, beyond_slab(self._peer, pull, slab.numel()))
            return
        if pull.is_lent and self._memory is not None:
            told(pull, _borrowed(self._memory, pull, release))
            return
        sources = unpacked(slab[pull.offset : end], pull.forms)
        told(pull, copied(sources, self._device, self._stream))

    def _await_copies(self) -> None:
        """Let the host see that what was pulled is here."""
        self._device.synchronize(self._device.record(self._stream))

    def measure(self) -> float:
        """Pull as much as a trial takes; gives GB/s."""
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
        if self._slab is not None:
            if waits:
                self._await_copies()
            self._slab = self._memory = None


def _borrowed(memory: mmap.mmap, pull: Pull, release: Release) -> list[torch.Tensor | None]:
    """The tensors where they lie; their slot is released once they are gone."""
    view = (ctypes.c_char * packed_bytes(pull.forms)).from_buffer(memory, pull.offset)
    # The view lives as long as a tensor that has its memory.
    weakref.finalize(view, release, pull.offset).atexit = False
    return unpacked(torch.frombuffer(view, dtype=torch.uint8), pull.forms)
