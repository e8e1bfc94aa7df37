"""Through the host: a slot is pinned host memory, and the link's socket carries what lies in it.

It works wherever the sockets do, and costs a copy on either side: for tensors on a device that no
other plane serves.
"""

from functools import cached_property

import torch

from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.packing import copied
from rrfp.runtime.planes.plane import Offer, Pull, Pulled, Puller, Release


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
