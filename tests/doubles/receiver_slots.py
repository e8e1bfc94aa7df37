"""A data plane whose receiver owns the slots, and whose sender fills them: the other direction of
the seam, on shared memory.

Each link has a slab of its own. The receiver makes it, and its answer passes the file along. The
sender chooses a slot, copies to it, and names it in the frame; the receiver uses it where it lies,
or copies from it, and releases it.
"""

import mmap
import os

from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.host_planes import flat_memory, mapped, peer_memory, sealed_memory
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Attachment, MappedFetcher, Offer
from rrfp.runtime.planes.registry import TransportName


class ReceiverSlotsPlane:
    """Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.SHM
    is_carried = False

    def __init__(self, device: Device, slab_bytes: int) -> None:
        self.device = device
        self.reserved_bytes = slab_bytes
        self.own: dict[int, mmap.mmap] = {}
        """Slabs of the links to this rank, by their files."""

    def offer(self) -> Offer:
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> Attachment:
        file = sealed_memory(self.reserved_bytes)
        memory = self.own[file] = mapped(file, self.reserved_bytes)
        fetcher = MappedFetcher(self.device, flat_memory(memory), peer, memory)
        answer = Offer(self.name, {"bytes": self.reserved_bytes}, (file,))
        return Attachment(fetcher, answer=answer)

    def stager(self, answer: Offer | None, peer: int) -> Outbox:
        assert answer is not None
        slab = flat_memory(peer_memory(answer, peer))
        identity = os.fstat(answer.descriptors[0]).st_ino
        self.attached(identity)
        return Outbox(
            self.name,
            self.device,
            slab,
            lends=self.device.is_synchronous,
            detach=lambda: self.detached(identity),
        )

    def attached(self, slab: int) -> None:
        """The sender has mapped a slab of its peer's."""

    def detached(self, slab: int) -> None:
        """It uses the slab no more."""

    def close(self, *, are_detached: bool) -> None:
        for file in self.own:
            os.close(file)
        self.own.clear()
