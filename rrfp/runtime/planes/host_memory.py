"""Shared memory between the processes of a host: for tensors on the CPU.

The slab is an anonymous file of the kernel (`memfd_create`) that has no name in any directory. Its
descriptor travels over the links' own Unix sockets, so that only ranks that have proved themselves
get it, and the memory is gone with the last process that has it, however that ends.
"""

import errno
import fcntl
import mmap
import os
from functools import cached_property

import torch

from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.codec import copied
from rrfp.runtime.planes.plane import (
    MappedPuller,
    Offer,
    PlaneRefusal,
    Pull,
    Pulled,
    Puller,
    Release,
)
from rrfp.runtime.planes.registry import TransportName

# Through the host: a slot is pinned host memory, and the link's socket carries what lies in it.
#
# It works wherever the sockets do, and costs a copy on either side: for tensors on a device that no
# other plane serves.


class BouncePlane:
    """Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.BOUNCE
    is_inline = True
    lends = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        self.device = device
        self.reserved_bytes = slab_bytes

    @cached_property
    def slab(self) -> torch.Tensor:
        """Made when it is first needed: most ranks have a better plane."""
        return self.device.empty_on_host(self.reserved_bytes)

    def offer(self) -> Offer:
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        return BouncePuller(self.device), None

    def close(self, *, are_detached: bool) -> None:
        self.__dict__.pop("slab", None)


class BouncePuller:
    """Takes what the socket has carried to the device. Implements
    `rrfp.runtime.planes.plane.Puller`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()

    def pull(self, pull: Pull, told: Pulled, release: Release) -> None:
        assert pull.inline is not None
        told(pull, copied(pull.inline, self._device, self._stream))

    def detach(self, *, waits: bool = True) -> None:
        pass


_FILE_NAME = "rrfp-outbox"
"""As /proc shows it."""


class SharedMemoryPlane:
    """Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.SHM
    is_inline = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        """Make the slab, of which only what is written takes memory. Raises PlaneRefusal where the
        system has no such memory."""
        self.device = device
        self.reserved_bytes = slab_bytes
        self.lends = device.is_synchronous
        if not hasattr(os, "memfd_create"):
            raise PlaneRefusal("this system has no memfd_create")
        try:
            self._descriptor = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise PlaneRefusal(f"this system makes no anonymous file ({error})") from None
        try:
            os.ftruncate(self._descriptor, slab_bytes)
            # Else a peer that shortens it could end this process by a signal.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.slab = _flat(_mapped(self._descriptor, slab_bytes))
        except OSError as error:
            os.close(self._descriptor)
            raise PlaneRefusal(
                f"this system gives no {slab_bytes} bytes of shared memory ({error})"
            ) from None

    def offer(self) -> Offer:
        return Offer(self.name, {"bytes": self.slab.numel()}, (self._descriptor,))

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        num_bytes = offer.values.get("bytes")
        if not isinstance(num_bytes, int) or len(offer.descriptors) != 1:
            raise PlaneRefusal(f"rank {peer} sent no shared memory")
        (descriptor,) = offer.descriptors
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError(errno.EPERM, "its size is not sealed")
            if os.fstat(descriptor).st_size != num_bytes:
                raise OSError(errno.EINVAL, f"it has not the {num_bytes} bytes that were told")
            memory = _mapped(descriptor, num_bytes)
        except OSError as error:
            raise PlaneRefusal(
                f"the shared memory of rank {peer} cannot be mapped ({error})"
            ) from None
        puller = MappedPuller(self.device, _flat(memory), peer, memory)
        return puller, puller.measure()

    def close(self, *, are_detached: bool) -> None:
        del self.slab
        os.close(self._descriptor)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, num_bytes)
    # A data loader's worker that is forked later is not to keep it alive.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _flat(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
