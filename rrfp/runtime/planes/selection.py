"""The data planes of a rank, and the choice of one for each link: the one place that chooses."""

import importlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple, cast

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes import registry
from rrfp.runtime.planes.negotiation import (
    AcceptedPlanes,
    NegotiationError,
    PlaneChoice,
    answer_offer,
    close_files,
    offer_planes,
)
from rrfp.runtime.planes.plane import Fetcher, LandingFetcher, Offer, Plane, PlaneRefusal, Stager
from rrfp.runtime.planes.registry import UNENCRYPTED, TransportName, keep_to_this_host

_log = logging.getLogger(__name__)


class Incoming(NamedTuple):
    """The plane of a link to this rank."""

    name: TransportName
    is_carried: bool
    """True if the socket carries its slots (`Plane.is_carried`)."""
    lands: bool
    """True if tensors that the socket has carried are fetched, too: to the device."""
    fetcher: Fetcher


def load_plane(name: TransportName) -> Callable[[Device, int], Plane]:
    """Import the class of a plane."""
    module, _, plane = registry.PLANES[name].partition(":")
    return cast(Callable[[Device, int], Plane], getattr(importlib.import_module(module), plane))


class RankPlanes:
    """The data planes of one rank, with the stagers of the links that use them."""

    def __init__(self, device: Device, asked: TransportName, outbox_bytes: int) -> None:
        """Raises UsageError for a plane that does not carry tensors on this device."""
        self.device = device
        self.asked = asked
        choices = registry.CHOICES[device.torch_device.type]
        if asked not in choices:
            raise UsageError(
                f"transport {asked} does not carry tensors on {device.torch_device}; choose one of"
                f" {', '.join(choices)}"
            )
        self._on_host, self._across_hosts = choices[asked]
        self._encrypts = False
        self._outbox_bytes = outbox_bytes
        self._planes: dict[TransportName, Plane] = {}
        self._refusals: dict[TransportName, str] = {}
        self._lock = Lock()
        # Guarded by the lock: links negotiate on several threads.
        self._shared: dict[TransportName, Stager] = {}
        """Stagers that all links of a plane share."""
        self._stagers: list[Stager] = []
        self._choices: dict[int, PlaneChoice] = {}

    @property
    def negotiates(self) -> bool:
        """True if links negotiate a plane; the same on all ranks."""
        return bool(self._on_host or self._across_hosts)

    def open(self, *, has_near: bool, has_far: bool, encrypts: bool = False) -> None:
        """Make the planes for links to peers on this host, and to others. With `encrypts` only
        encrypted bytes may go to other hosts. Raises UsageError where the requested plane sends
        others."""
        if encrypts and has_far:
            if self.asked in UNENCRYPTED:
                raise UsageError(
                    f"transport {self.asked} does not encrypt what goes to other hosts, and tls is "
                    "asked for; leave one of them out"
                )
            self._across_hosts = tuple(
                name for name in self._across_hosts if name not in UNENCRYPTED
            )
        self._encrypts = encrypts
        names = {*(self._on_host if has_near else ()), *(self._across_hosts if has_far else ())}
        if TransportName.NIXL in names and not has_far:
            keep_to_this_host()
        for name in names:
            try:
                self._planes[name] = load_plane(name)(self.device, self._outbox_bytes)
            except PlaneRefusal as refusal:
                self._refusals[name] = str(refusal)

    def offer(
        self, connection: socket.socket, peer: int, *, is_near: bool, timeout_s: float
    ) -> Stager | None:
        """Negotiate a plane for the link to this peer, and return its stager; None where the socket
        carries the tensors. Raises NegotiationError."""
        choice, answer = PlaneChoice(TransportName.INLINE), None
        if self.negotiates:
            names = self._on_host if is_near else self._across_hosts
            planes = [self._planes[name] for name in names if name in self._planes]
            refused = [name for name in names if name not in self._planes]
            why = self._refusals[refused[0]] if refused else ""
            if not is_near and self.asked in (TransportName.SHM, TransportName.CUDA_IPC):
                why = f"rank {peer} is on another host"
            choice, answer = offer_planes(connection, planes, why, timeout_s)
        try:
            with self._lock:
                encrypted = self._encrypts and not is_near
                self._choices[peer] = replace(choice, encrypted=encrypted)
                if choice.why:
                    _log.warning("the link to rank %d takes %s: %s", peer, choice.plane, choice.why)
                if choice.plane is TransportName.INLINE:
                    return None
                return self._stager(choice.plane, answer, peer)
        finally:
            if answer is not None:
                close_files(answer.descriptors)

    def _stager(self, name: TransportName, answer: Offer | None, peer: int) -> Stager:
        """Return the stager of a link; the caller holds the lock."""
        if answer is None and name in self._shared:
            return self._shared[name]
        try:
            stager = self._planes[name].stager(answer, peer)
        except PlaneRefusal as refusal:
            raise NegotiationError(str(refusal)) from None
        except RuntimeError as error:  # torch's own, when it gets no memory
            raise RrfpError(
                f"plane {name} gets no outbox of {self._outbox_bytes} bytes"
                f" ({first_line(str(error))}); lower outbox_mb"
            ) from None
        stager.open()
        self._stagers.append(stager)
        if answer is None:
            self._shared[name] = stager
        return stager

    def answer(self, connection: socket.socket, peer: int, timeout_s: float) -> Incoming | None:
        """Negotiate a plane for the link from this peer; None where the socket carries the tensors.
        Raises NegotiationError."""
        if not self.negotiates:
            return None
        choice, attachment = answer_offer(connection, self._planes, peer, timeout_s)
        if attachment is None:
            return None
        is_carried = self._planes[choice.plane].is_carried
        # On a device a message may be too large for the outbox, and arrive over the socket.
        lands = is_carried or not self.device.is_synchronous
        fetcher = LandingFetcher(self.device, attachment.fetcher) if lands else attachment.fetcher
        return Incoming(choice.plane, is_carried, lands, fetcher)

    @property
    def choices(self) -> dict[int, PlaneChoice]:
        """Plane of each link from this rank, by peer."""
        with self._lock:
            return dict(self._choices)

    @property
    def accepted(self) -> AcceptedPlanes:
        """The choices, the requested transport, and the memory of the stagers."""
        with self._lock:
            used = {choice.plane for choice in self._choices.values()} & self._planes.keys()
            reserved = [self._planes[name].reserved_bytes for name in used]
            outbox_mb = self._outbox_bytes // 2**20
            return AcceptedPlanes(self.asked, outbox_mb, dict(self._choices), sum(reserved))

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is staged, or until the time is up."""
        for stager in self._stagers:
            stager.drain(timeout_s)

    def close(self, timeout_s: float, *, are_detached: bool) -> None:
        """Free everything. All links are over; `are_detached`: every peer has said farewell."""
        for stager in self._stagers:
            stager.close(timeout_s)
        for plane in self._planes.values():
            plane.close(are_detached=are_detached)
        self._stagers.clear()
        self._shared.clear()
        self._planes.clear()
