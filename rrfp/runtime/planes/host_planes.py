"""Planes whose slots are host memory: shared memory between processes, and the pinned bounce.

A slab of shared memory is an anonymous file of the kernel (`memfd_create`) without a name in any
directory. Its descriptor is sent over the links' own Unix sockets, so that only authenticated ranks
get it. The kernel frees the memory with the last process that has it, however that ends.

The bounce plane copies tensors to a slot of pinned memory, and the link's socket carries them from
there. It is for tensors on a device that no other plane serves, works wherever the sockets do, and
costs a copy on either side.
"""

import errno
import fcntl
import mmap
import os

import torch

from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Attachment, LandingFetcher, MappedFetcher, Offer, PlaneRefusal
from rrfp.runtime.planes.registry import TransportName


class BouncePlane:
    """The plane that copies tensors to pinned host memory, from which the link's socket carries
    them. Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.BOUNCE
    is_carried = True

    def __init__(self, device: Device, slab_bytes: int) -> None:
        self.device = device
        self.reserved_bytes = slab_bytes

    def offer(self) -> Offer:
        """Make an offer of this plane without values: the peer needs no memory of this rank."""
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        """Return a fetcher that copies what the socket has carried to the device; measures nothing,
        never refuses."""
        return Attachment(LandingFetcher(self.device))

    def stager(self, answer: Offer | None, peer: int) -> Outbox:
        """Allocate the pinned slab here, because most ranks have a better plane and never need it,
        and return an outbox in it."""
        slab = self.device.empty_on_host(self.reserved_bytes)
        return Outbox(self.name, self.device, slab, is_carried=True)

    def close(self, *, are_detached: bool) -> None:
        """Do nothing: the outbox owns the memory."""


_FILE_NAME = "rrfp-outbox"
"""Name of the file in /proc."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemoryPlane:
    """The plane whose slots are shared memory of one host. Implements
    `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.SHM
    is_carried = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        """Make the slab; only its written pages take memory. Raises PlaneRefusal if the system has
        no such memory."""
        self.device = device
        self.reserved_bytes = slab_bytes
        self._descriptor = sealed_memory(slab_bytes)
        self.slab = flat_memory(mapped(self._descriptor, slab_bytes))

    def offer(self) -> Offer:
        """Offer the slab's size, with the descriptor of its anonymous file."""
        return Offer(self.name, {"bytes": self.slab.numel()}, (self._descriptor,))

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        """Map the peer's slab, and return its fetcher with the measured speed. Raises PlaneRefusal
        if the offer is invalid, or its memory cannot be mapped."""
        memory = peer_memory(offer, peer)
        fetcher = MappedFetcher(self.device, flat_memory(memory), peer, memory)
        return Attachment(fetcher, fetcher.measure())

    def stager(self, answer: Offer | None, peer: int) -> Outbox:
        """Make an outbox in the slab. On a synchronous device it lends the slots in half of the
        slab to receivers."""
        return Outbox(self.name, self.device, self.slab, lends=self.device.is_synchronous)

    def close(self, *, are_detached: bool) -> None:
        """Drop the slab and close its file, also while peers still use it: the kernel keeps the
        memory for them."""
        del self.slab
        os.close(self._descriptor)


def sealed_memory(num_bytes: int) -> int:
    """Make an anonymous file of this size, sealed so that no process can change the size, and
    return its descriptor. Raises PlaneRefusal if the system lacks such files or the memory."""
    if not hasattr(os, "memfd_create"):
        raise PlaneRefusal("this system has no memfd_create")
    try:
        descriptor = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PlaneRefusal(f"this system makes no anonymous file ({error})") from None
    try:
        os.ftruncate(descriptor, num_bytes)
        # Without a seal a peer that shortens the file could end this process by a signal.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped(descriptor, num_bytes).close()
    except OSError as error:
        os.close(descriptor)
        raise PlaneRefusal(
            f"this system gives no {num_bytes} bytes of shared memory ({error})"
        ) from None
    return descriptor


def peer_memory(offer: Offer, peer: int) -> mmap.mmap:
    """Check and map the memory in a peer's offer. Raises PlaneRefusal if it is not one file, sealed
    and of the offered size. The caller closes the descriptor."""
    num_bytes = offer.values.get("bytes")
    if not isinstance(num_bytes, int) or len(offer.descriptors) != 1:
        raise PlaneRefusal(f"rank {peer} sent no shared memory")
    (descriptor,) = offer.descriptors
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(errno.EPERM, "its size is not sealed")
        if os.fstat(descriptor).st_size != num_bytes:
            raise OSError(errno.EINVAL, f"it does not have the {num_bytes} bytes of the offer")
        return mapped(descriptor, num_bytes)
    except OSError as error:
        raise PlaneRefusal(f"the shared memory of rank {peer} cannot be mapped ({error})") from None


def mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a file into this process, and not into the processes that it forks."""
    memory = mmap.mmap(descriptor, num_bytes)
    # A data loader's worker that is forked later would keep it alive.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def flat_memory(memory: mmap.mmap) -> torch.Tensor:
    """View mapped memory as a flat tensor of uint8, without a copy."""
    return torch.frombuffer(memory, dtype=torch.uint8)
