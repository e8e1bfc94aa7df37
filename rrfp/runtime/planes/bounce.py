"""Through the host: a slot is pinned host memory, and the link's socket carries what lies in it.

It works wherever the sockets do, and costs a copy on either side: for tensors on a device that no
other plane serves.
"""

from functools import cached_property

import torch

from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.plane import Offer, Pull, Pulled, Puller
from rrfp.runtime.protocols import monotonic


class BouncePlane:
    """Implements `rrfp.runtime.planes.plane.Plane`."""

    name = TransportName.BOUNCE
    is_inline = True

    def __init__(self, device: Device, slab_bytes: int) -> None:
        self.device = device
        self.piece_bytes = slab_bytes

    @cached_property
    def slab(self) -> torch.Tensor:
        """Made when it is first needed: most ranks have a better plane."""
        return self.device.empty_on_host(self.piece_bytes)

    def offer(self) -> Offer:
        return Offer(self.name, {})

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        return BouncePuller(self.device), None

    def close(self) -> None:
        self.__dict__.pop("slab", None)


class BouncePuller:
    """Takes what the socket has carried to the device. Implements
    `rrfp.runtime.planes.plane.Puller`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()

    def pull(self, pull: Pull, told: Pulled) -> None:
        device, stream = self._device, self._stream
        assert pull.inline is not None
        begun_ns = monotonic()
        for form, source in zip(pull.forms, pull.inline, strict=True):
            target = None
            if form is not None and source is not None:
                target = device.empty(form.shape, form.dtype, stream)
                device.copy(_flat(target), _flat(source), stream)
            pull.tensors.append(target)
        device.synchronize(device.record(stream))
        pull.num_pulled = pull.num_filled
        pull.copy_ns = monotonic() - begun_ns
        told(pull, None)

    def detach(self) -> None:
        pass


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
