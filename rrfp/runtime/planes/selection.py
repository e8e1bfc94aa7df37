"""The data planes of a rank, and the negotiation of one plane for each link.

The two ends of a link negotiate over its socket, before the link runs. The source offers planes,
the best first. The destination attaches to the first one that works, measures it, and answers with
its name. Without any, the socket carries the tensors. If the destination owns the slots, its answer
also contains their place.
"""

import importlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import NamedTuple, Self, cast

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime.device.interface import Device
from rrfp.runtime.planes import registry
from rrfp.runtime.planes.plane import (
    Attachment,
    Fetcher,
    LandingFetcher,
    Offer,
    Plane,
    PlaneRefusal,
    Stager,
)
from rrfp.runtime.planes.registry import UNENCRYPTED, TransportName, keep_to_this_host
from rrfp.strict_json import integer, items, member, number, parsed, text

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<II")
"""Header of a value: its bytes of JSON, and its number of file descriptors."""
_MAX_BYTES = 2**20
_MAX_FILES = 4


class NegotiationError(Exception):
    """The other end has closed, or does not follow the protocol of the negotiation."""


@dataclass(frozen=True, slots=True)
class PlaneChoice:
    """The plane that carries the tensors of a link."""

    plane: TransportName
    gb_per_s: float | None = None
    """Speed measured by the receiving end at connect; None if it measured nothing."""
    why: str = ""
    """One sentence: why it is not the preferred plane; empty where it is."""
    encrypted: bool = False
    """True if the link is encrypted, with everything that it carries; set by its source."""

    def to_json(self) -> dict[str, object]:
        """Return the entry of `run.json`, with the speed rounded to 0.01 GB/s."""
        rate = None if self.gb_per_s is None else round(self.gb_per_s, 2)
        return {
            "plane": str(self.plane),
            "gb_per_s": rate,
            "why": self.why,
            "encrypted": self.encrypted,
        }

    @classmethod
    def decode(cls, value: object) -> Self:
        """Read an entry of `run.json`, or a destination's answer. Raises ValueError for anything
        else."""
        rate = member(value, "gb_per_s")
        if not (rate is None or isinstance(rate, float)):
            raise ValueError("its rate is not a number")
        encrypted = member(value, "encrypted")
        if not isinstance(encrypted, bool):
            raise ValueError("its 'encrypted' is neither true nor false")
        plane = TransportName(text(member(value, "plane")))
        return cls(plane, rate, text(member(value, "why")), encrypted)


@dataclass(frozen=True, slots=True)
class AcceptedPlanes:
    """The planes of the links from one rank."""

    requested: TransportName
    outbox_mb: int
    """Upper bound of each outbox."""
    links: Mapping[int, PlaneChoice]
    """Choices by peer."""
    outbox_bytes: int
    """Upper bound of the memory of their outboxes on this rank, host or device memory."""


def offer_planes(
    connection: socket.socket, planes: Sequence[Plane], why_none: str, timeout_s: float
) -> tuple[PlaneChoice, Offer | None]:
    """Offer planes, the best first, and return the destination's choice, and the place of its slots
    if it owns them. `why_none` is why a better plane that was requested is missing. The caller
    closes the files of the answer. Raises NegotiationError, also for a choice that was not
    offered."""
    deadline_s = time.monotonic() + timeout_s
    offers = [plane.offer() for plane in planes]
    offered = {"why": why_none, "timeout_s": timeout_s, "offers": [*map(_encode_offer, offers)]}
    _send(connection, offered, [file for each in offers for file in each.descriptors], deadline_s)
    value, files = _receive(connection, deadline_s)
    answer: Offer | None = None
    try:
        choice = PlaneChoice.decode(value)
        answers: list[Offer | None] = [None]
        if isinstance(value, dict) and "answers" in value:
            answers = [*_decode_offers(value, "answers", files)]
        if choice.plane not in {TransportName.INLINE, *(plane.name for plane in planes)}:
            raise NegotiationError(f"it took plane {choice.plane}, which was not offered")
        (answer,) = answers
    except ValueError as error:
        raise NegotiationError(f"its answer cannot be read ({error})") from None
    finally:
        if answer is None:
            close_files(files)
    return choice, answer


def answer_offer(
    connection: socket.socket, planes: Mapping[TransportName, Plane], peer: int, timeout_s: float
) -> tuple[PlaneChoice, Attachment | None]:
    """Attach to the first offered plane that works, and answer with its name, speed and why no
    better one works. Return None as the attachment if the socket carries the tensors. Raises
    NegotiationError, and then detaches."""
    deadline_s = time.monotonic() + timeout_s
    value, files = _receive(connection, deadline_s)
    choice, attachment = None, None
    try:
        why = text(member(value, "why"))
        deadline_s = min(deadline_s, time.monotonic() + number(member(value, "timeout_s")))
        for offer in _decode_offers(value, "offers", files):
            plane = planes.get(offer.plane)
            try:
                if plane is None:
                    raise PlaneRefusal(f"its receiver has no plane {offer.plane}")
                # A plane that hangs leaves time for the next one, and for the answer.
                left_s = max(deadline_s - time.monotonic(), 0.001)
                attachment = plane.attach(offer, peer, left_s / 2)
            except PlaneRefusal as refusal:
                why = why or str(refusal)
                continue
            choice = PlaneChoice(offer.plane, attachment.gb_per_s, why)
            break
    except ValueError as error:
        raise NegotiationError(f"its offer cannot be read ({error})") from None
    finally:
        close_files(files)
    choice = choice or PlaneChoice(TransportName.INLINE, None, why)
    answer = None if attachment is None else attachment.answer
    try:
        if answer is None:
            _send(connection, asdict(choice), [], deadline_s)
        else:
            answered = {**asdict(choice), "answers": [_encode_offer(answer)]}
            _send(connection, answered, answer.descriptors, deadline_s)
    except NegotiationError:
        # The link will not exist, and the attachment has the peer's memory open.
        if attachment is not None:
            attachment.fetcher.detach()
        raise
    return choice, attachment


def _encode_offer(offer: Offer) -> dict[str, object]:
    """Encode an offer for JSON, with the number of its files in place of the files."""
    return {
        "plane": offer.plane,
        "values": dict(offer.values),
        "files": len(offer.descriptors),
    }


def _decode_offers(value: object, name: str, files: Sequence[int]) -> list[Offer]:
    """Decode the offers in a member of a value, each with its part of the files, in their order.
    Raises ValueError for anything else."""
    offers, left = [], list(files)
    for each in items(member(value, name)):
        values = member(each, "values")
        num_files = integer(member(each, "files"))
        if not isinstance(values, dict) or not 0 <= num_files <= len(left):
            raise ValueError("an offer lacks its values or its files")
        own, left = left[:num_files], left[num_files:]
        offers.append(Offer(TransportName(text(member(each, "plane"))), values, tuple(own)))
    return offers


def _send(
    connection: socket.socket, value: object, files: Sequence[int], deadline_s: float
) -> None:
    """Send a JSON value and file descriptors before the deadline. Raises NegotiationError."""
    data = json.dumps(value).encode()
    length = _LENGTH.pack(len(data), len(files))
    try:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        if files:
            socket.send_fds(connection, [length], files)
        else:
            connection.sendall(length)
        connection.sendall(data)
    except OSError as error:
        raise NegotiationError(f"the connection broke ({error})") from None


def _receive(connection: socket.socket, deadline_s: float) -> tuple[object, list[int]]:
    """Receive a JSON value, and the files with it, which the caller closes. Raises
    NegotiationError, and then closes the files."""
    files: list[int] = []
    try:
        length, files = _read(connection, _LENGTH.size, deadline_s, files)
        num_bytes, num_files = _LENGTH.unpack(length)
        if num_bytes > _MAX_BYTES or num_files != len(files):
            raise NegotiationError(f"it sent {num_bytes} bytes and {len(files)} files")
        data, files = _read(connection, num_bytes, deadline_s, files)
        return parsed(data), files
    except OSError as error:
        close_files(files)
        raise NegotiationError(f"the connection broke ({error})") from None
    except ValueError as error:
        close_files(files)
        raise NegotiationError(f"what it sent cannot be read ({error})") from None
    except NegotiationError:
        close_files(files)
        raise


def _read(
    connection: socket.socket, num_bytes: int, deadline_s: float, files: list[int]
) -> tuple[bytes, list[int]]:
    """Read exactly this many bytes, and append the file descriptors that come with them to `files`;
    return both. Raises NegotiationError if the connection is closed, and OSError, also at the
    deadline."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        left = num_bytes - len(data)
        if connection.family == socket.AF_UNIX:
            part, came, _, _ = socket.recv_fds(
                connection, left, _MAX_FILES, socket.MSG_CMSG_CLOEXEC
            )
            # Append to the caller's list: the caller closes the files even if this raises.
            files += came
        else:
            part = connection.recv(left)
        if not part:
            raise NegotiationError("it closed the connection")
        data += part
    return data, files


def close_files(files: Sequence[int]) -> None:
    """Close file descriptors; errors are ignored."""
    for file in files:
        with suppress(OSError):
            os.close(file)


# The planes of a rank.


class Incoming(NamedTuple):
    """The plane of a link to this rank."""

    name: TransportName
    is_carried: bool
    """True if the socket carries its slots (`Plane.is_carried`)."""
    lands: bool
    """True if tensors that the socket has carried are fetched, too: to the device."""
    fetcher: Fetcher


def load_plane(name: TransportName) -> Callable[[Device, int], Plane]:
    """Import and return the class of a plane; makes none."""
    module, _, plane = registry.PLANES[name].partition(":")
    return cast(Callable[[Device, int], Plane], getattr(importlib.import_module(module), plane))


class RankPlanes:
    """The data planes of one rank, with the stagers of the links that use them."""

    def __init__(self, device: Device, requested: TransportName, outbox_bytes: int) -> None:
        """Raises UsageError for a transport that does not carry tensors on this device."""
        self.device = device
        self.requested = requested
        choices = registry.CHOICES[device.torch_device.type]
        if requested not in choices:
            raise UsageError(
                f"transport {requested} does not carry tensors on {device.torch_device}; choose one"
                f" of {', '.join(choices)}"
            )
        self._on_host, self._across_hosts = choices[requested]
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
        """True if links negotiate a plane, because the requested transport has any for this device;
        the same on all ranks."""
        return bool(self._on_host or self._across_hosts)

    def open(self, *, has_same_host: bool, has_other_host: bool, encrypts: bool = False) -> None:
        """Make the planes for links to peers on this host and on other hosts; keep the reason of
        one that refuses. With `encrypts`, links to other hosts, if any, get no plane that does not
        encrypt; UsageError if it is the requested one. NIXL without other hosts is kept to
        loopback."""
        if encrypts and has_other_host:
            if self.requested in UNENCRYPTED:
                raise UsageError(
                    f"transport {self.requested} does not encrypt what goes to other hosts, and "
                    "tls is asked for; leave one of them out"
                )
            self._across_hosts = tuple(
                name for name in self._across_hosts if name not in UNENCRYPTED
            )
        self._encrypts = encrypts
        names = {
            *(self._on_host if has_same_host else ()),
            *(self._across_hosts if has_other_host else ()),
        }
        if TransportName.NIXL in names and not has_other_host:
            keep_to_this_host()
        for name in names:
            try:
                self._planes[name] = load_plane(name)(self.device, self._outbox_bytes)
            except PlaneRefusal as refusal:
                self._refusals[name] = str(refusal)

    def offer(
        self, connection: socket.socket, peer: int, *, is_same_host: bool, timeout_s: float
    ) -> Stager | None:
        """Negotiate a plane for the link to this peer, store the choice, and return its open
        stager; None if the socket carries the tensors. A choice that is not the preferred one is
        logged. Raises NegotiationError, and RrfpError if there is no memory."""
        choice, answer = PlaneChoice(TransportName.INLINE), None
        if self.negotiates:
            names = self._on_host if is_same_host else self._across_hosts
            planes = [self._planes[name] for name in names if name in self._planes]
            refused = [name for name in names if name not in self._planes]
            why = self._refusals[refused[0]] if refused else ""
            if not is_same_host and self.requested in (TransportName.SHM, TransportName.CUDA_IPC):
                why = f"rank {peer} is on another host"
            choice, answer = offer_planes(connection, planes, why, timeout_s)
        try:
            with self._lock:
                encrypted = self._encrypts and not is_same_host
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
        """Return the stager of a link: the one that the plane's links share, or a new, opened one.
        Raises NegotiationError if the plane refuses, and RrfpError without memory. The caller holds
        the lock."""
        if answer is None and name in self._shared:
            return self._shared[name]
        try:
            stager = self._planes[name].stager(answer, peer)
        except PlaneRefusal as refusal:
            raise NegotiationError(str(refusal)) from None
        except RuntimeError as error:  # torch's, if there is no memory
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
        """Negotiate a plane for the link from this peer, and return it attached to the peer; None
        without a plane, so that the socket carries the tensors. On a GPU, and for `bounce`, its
        fetcher also copies what the socket has carried. Raises NegotiationError."""
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
    def accepted(self) -> AcceptedPlanes:
        """The choices of the links from this rank by peer, the requested transport, and the upper
        bound of the memory that the planes of these links take on this rank."""
        with self._lock:
            used = {choice.plane for choice in self._choices.values()} & self._planes.keys()
            reserved = [self._planes[name].reserved_bytes for name in used]
            outbox_mb = self._outbox_bytes // 2**20
            return AcceptedPlanes(self.requested, outbox_mb, dict(self._choices), sum(reserved))

    def drain(self, timeout_s: float) -> None:
        """Wait until every stager has staged everything, each for at most `timeout_s`."""
        for stager in self._stagers:
            stager.drain(timeout_s)

    def close(self, timeout_s: float, *, are_detached: bool) -> None:
        """Close every stager, each within `timeout_s`, and then every plane. All links are over;
        `are_detached`: every peer has said farewell, so that memory may be freed."""
        for stager in self._stagers:
            stager.close(timeout_s)
        for plane in self._planes.values():
            plane.close(are_detached=are_detached)
        self._stagers.clear()
        self._shared.clear()
        self._planes.clear()
