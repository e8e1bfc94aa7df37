"""Which data planes a rank has, and which of them serve a link: the one place that chooses."""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes.cuda_ipc import CudaIpcPlane
from rrfp.runtime.planes.host_memory import BouncePlane, SharedMemoryPlane
from rrfp.runtime.planes.negotiation import Settled, Taken, answer_offer, offer_planes
from rrfp.runtime.planes.nixl import NixlPlane, keep_to_this_host
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import Plane, PlaneRefusal, Puller
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.protocols import Message

LEAST_POSTED_BYTES = 4 * 2**20
"""A smaller message of the CPU's travels on the socket, which is quicker: no thread is woken."""

_log = logging.getLogger(__name__)

_A, _I, _S, _C, _N, _B = TransportName

CHOICES: Mapping[str, Mapping[TransportName, tuple[tuple[TransportName, ...], ...]]] = {
    "cpu": {_A: ((_S,), ()), _I: ((), ()), _S: ((_S,), ()), _N: ((_N,), (_N,)), _B: ((_B,), (_B,))},
    "cuda": {
        _A: ((_C, _B), (_N, _B)),
        _C: ((_C, _B), (_B,)),
        _N: ((_N, _B), (_N, _B)),
        _B: ((_B,), (_B,)),
    },
}
"""By the device's type and what was asked for: what a link takes to a peer on this host, and to one
on another; the first that works, and else the socket itself."""


_PLAIN = frozenset({TransportName.NIXL})
"""What goes past the link, and so past its TLS."""

PLANES: Mapping[TransportName, Callable[[Device, int], Plane]] = {
    TransportName.SHM: SharedMemoryPlane,
    TransportName.CUDA_IPC: CudaIpcPlane,
    TransportName.NIXL: NixlPlane,
    TransportName.BOUNCE: BouncePlane,
}
"""What makes each, with a slab of so many bytes. Raises PlaneRefusal."""


class RankPlanes:
    """The data planes of one rank, with an outbox for each that a link to a peer has taken."""

    def __init__(self, device: Device, asked: TransportName, outbox_bytes: int) -> None:
        """Raises UsageError for a plane that tensors on this device cannot take."""
        self.device = device
        self.asked = asked
        choices = CHOICES[device.torch_device.type]
        if asked not in choices:
            raise UsageError(
                f"transport {asked} does not carry tensors on {device.torch_device}; choose one of"
                f" {', '.join(choices)}"
            )
        self._near, self._far = choices[asked]
        self._encrypts = False
        self._outbox_bytes = outbox_bytes
        self._planes: dict[TransportName, Plane] = {}
        self._refusals: dict[TransportName, str] = {}
        self._lock = Lock()
        # Guarded by the lock: links are settled on several threads.
        self._outboxes: dict[TransportName, Outbox] = {}
        self._settled: dict[int, Settled] = {}

    @property
    def settles(self) -> bool:
        """Whether links have something to settle; the same on all ranks."""
        return bool(self._near or self._far)

    def open(self, *, has_near: bool, has_far: bool, encrypts: bool = False) -> None:
        """Make what links to peers on this host, and on others, may take; `encrypts`: what goes to
        other hosts is to be encrypted. Raises UsageError where what was asked for does not."""
        if encrypts and has_far:
            if self.asked in _PLAIN:
                raise UsageError(
                    f"transport {self.asked} does not encrypt what goes to other hosts, and tls is "
                    "asked for; leave one of them out"
                )
            self._far = tuple(name for name in self._far if name not in _PLAIN)
        self._encrypts = encrypts
        names = {*(self._near if has_near else ()), *(self._far if has_far else ())}
        if TransportName.NIXL in names and not has_far:
            keep_to_this_host()
        for name in names:
            try:
                self._planes[name] = PLANES[name](self.device, self._outbox_bytes)
            except PlaneRefusal as refusal:
                self._refusals[name] = str(refusal)

    def offer(
        self, connection: socket.socket, peer: int, *, is_near: bool, timeout_s: float
    ) -> Outbox | None:
        """Settle on a plane for the link to this peer: its outbox, or None where the socket carries
        tensors itself. Raises SettlingError."""
        names = self._near if is_near else self._far
        planes = [self._planes[name] for name in names if name in self._planes]
        refused = [name for name in names if name not in self._planes]
        why = self._refusals[refused[0]] if refused else ""
        if not is_near and self.asked in (TransportName.SHM, TransportName.CUDA_IPC):
            why = f"rank {peer} is on another host"
        settled = offer_planes(connection, planes, why, timeout_s)
        self.settle(peer, settled, is_near=is_near)
        with self._lock:
            if settled.plane is TransportName.INLINE:
                return None
            if settled.plane not in self._outboxes:
                try:
                    outbox = Outbox(self._planes[settled.plane])
                except RuntimeError as error:  # torch's own, of memory that it does not get
                    raise RrfpError(
                        f"plane {settled.plane} gets no outbox of {self._outbox_bytes} bytes"
                        f" ({first_line(str(error))}); lower outbox_mb"
                    ) from None
                outbox.open()
                self._outboxes[settled.plane] = outbox
            return self._outboxes[settled.plane]

    def settle(self, peer: int, settled: Settled, *, is_near: bool) -> None:
        """Note what the link to this peer takes, and tell where that is not what was asked for."""
        with self._lock:
            self._settled[peer] = replace(settled, encrypted=self._encrypts and not is_near)
        if settled.why:
            _log.warning("the link to rank %d takes %s: %s", peer, settled.plane, settled.why)

    def answer(
        self, connection: socket.socket, peer: int, timeout_s: float
    ) -> tuple[Plane, Puller] | None:
        """Settle on a plane for the link from this peer; None where the socket carries tensors
        itself. Raises SettlingError."""
        settled, puller = answer_offer(connection, self._planes, peer, timeout_s)
        return None if puller is None else (self._planes[settled.plane], puller)

    @property
    def settled(self) -> dict[int, Settled]:
        """What each link from this rank has taken, by peer."""
        with self._lock:
            return dict(self._settled)

    @property
    def taken(self) -> Taken:
        """That, what was asked for, and the memory for it."""
        with self._lock:
            reserved = [self._planes[name].reserved_bytes for name in self._outboxes]
            outbox_mb = self._outbox_bytes // 2**20
            return Taken(self.asked, outbox_mb, dict(self._settled), sum(reserved))

    def posts(self, outbox: Outbox, message: Message, num_bytes: int) -> bool:
        """Whether a message goes by the outbox; on the CPU one that is too large for it need
        not."""
        if self.device.is_synchronous:
            return num_bytes >= LEAST_POSTED_BYTES and outbox.takes(message)
        return bool(message.tensors)

    def drain(self, timeout_s: float) -> None:
        """Wait until what was put into the outboxes is posted."""
        for outbox in self._outboxes.values():
            outbox.drain(timeout_s)

    def close(self, timeout_s: float, *, are_detached: bool) -> None:
        """Free everything. All links are over; `are_detached`: every peer has said farewell."""
        for outbox in self._outboxes.values():
            outbox.close(timeout_s)
        for plane in self._planes.values():
            plane.close(are_detached=are_detached)
        self._planes.clear()
