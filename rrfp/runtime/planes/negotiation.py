"""The two ends of a link settle on a data plane, over its socket, before the link runs.

The source offers planes, the best first. The destination attaches itself to the first one that it
can, measures it, and says which. Where there is none the socket carries tensors itself.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

from rrfp.runtime.planes.plane import Offer, Plane, PlaneRefusal, Puller
from rrfp.runtime.planes.registry import TransportName
from rrfp.strict_json import integer, items, member, number, parsed, text

_LENGTH = struct.Struct("<II")
"""Bytes of JSON, and files."""
_MAX_BYTES = 2**20
_MAX_FILES = 4


class SettlingError(Exception):
    """The other end is gone, or does not keep to what is settled here."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What carries the tensors of a link."""

    plane: TransportName
    gb_per_s: float | None = None
    """As the receiving end measured it at connect; None: it measured nothing."""
    why: str = ""
    """Why it is not the plane that was preferred, in a sentence; empty where it is."""
    encrypted: bool = False
    """Whether the link is, and with it all that it carries; its source knows."""

    def described(self) -> dict[str, object]:
        """As `run.json` has it."""
        rate = None if self.gb_per_s is None else round(self.gb_per_s, 2)
        return {
            "plane": str(self.plane),
            "gb_per_s": rate,
            "why": self.why,
            "encrypted": self.encrypted,
        }

    @classmethod
    def decode(cls, value: object) -> Self:
        rate = member(value, "gb_per_s")
        if not (rate is None or isinstance(rate, float)):
            raise ValueError("its rate is not a number")
        encrypted = member(value, "encrypted")
        if not isinstance(encrypted, bool):
            raise ValueError("whether it is encrypted is neither true nor false")
        plane = TransportName(text(member(value, "plane")))
        return cls(plane, rate, text(member(value, "why")), encrypted)


@dataclass(frozen=True, slots=True)
class Taken:
    """What the links from one rank take."""

    asked: TransportName
    outbox_mb: int
    """The bound of each outbox."""
    links: Mapping[int, Settled]
    """By peer."""
    outbox_bytes: int
    """The most memory that their outboxes take on this rank, of the host or the device."""


def offer_planes(
    connection: socket.socket, planes: Sequence[Plane], why_none: str, timeout_s: float
) -> Settled:
    """Offer planes, and take what the destination says. `why_none` tells why there is none, where a
    better one was asked for. Raises SettlingError."""
    deadline_s = time.monotonic() + timeout_s
    offers = [plane.offer() for plane in planes]
    told = {
        "why": why_none,
        "timeout_s": timeout_s,
        "offers": [
            {"plane": each.plane, "values": dict(each.values), "files": len(each.descriptors)}
            for each in offers
        ],
    }
    _send(connection, told, [file for each in offers for file in each.descriptors], deadline_s)
    value, files = _receive(connection, deadline_s)
    _close(files)
    try:
        settled = Settled.decode(value)
    except ValueError as error:
        raise SettlingError(f"its answer cannot be read ({error})") from None
    if settled.plane not in {TransportName.INLINE, *(plane.name for plane in planes)}:
        raise SettlingError(f"it took plane {settled.plane}, which was not offered")
    return settled


def answer_offer(
    connection: socket.socket, planes: Mapping[TransportName, Plane], peer: int, timeout_s: float
) -> tuple[Settled, Puller | None]:
    """Attach to the first of the planes that the source offers, and say so. Raises
    SettlingError."""
    deadline_s = time.monotonic() + timeout_s
    value, files = _receive(connection, deadline_s)
    settled, puller = None, None
    try:
        why = text(member(value, "why"))
        deadline_s = min(deadline_s, time.monotonic() + number(member(value, "timeout_s")))
        for offer in _offers(value, files):
            plane = planes.get(offer.plane)
            try:
                if plane is None:
                    raise PlaneRefusal(f"its receiver has no plane {offer.plane}")
                # A plane that hangs leaves time for the next one, and for the answer.
                left_s = max(deadline_s - time.monotonic(), 0.001)
                puller, rate = plane.attach(offer, peer, left_s / 2)
            except PlaneRefusal as refusal:
                why = why or str(refusal)
                continue
            settled = Settled(offer.plane, rate, why)
            break
    except ValueError as error:
        raise SettlingError(f"its offer cannot be read ({error})") from None
    finally:
        _close(files)
    settled = settled or Settled(TransportName.INLINE, None, why)
    try:
        _send(connection, asdict(settled), [], deadline_s)
    except SettlingError:
        # Nobody else knows of it, and it has the peer's memory open.
        if puller is not None:
            puller.detach()
        raise
    return settled, puller


def _offers(value: object, files: Sequence[int]) -> list[Offer]:
    offers, left = [], list(files)
    for each in items(member(value, "offers")):
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
        raise SettlingError(f"the connection broke ({error})") from None


def _receive(connection: socket.socket, deadline_s: float) -> tuple[object, list[int]]:
    """What the other end sent, and the files that came along, which the caller closes."""
    files: list[int] = []
    try:
        length, files = _read(connection, _LENGTH.size, deadline_s, files)
        num_bytes, num_files = _LENGTH.unpack(length)
        if num_bytes > _MAX_BYTES or num_files != len(files):
            raise SettlingError(f"it sent {num_bytes} bytes and {len(files)} files")
        data, files = _read(connection, num_bytes, deadline_s, files)
        return parsed(data), files
    except OSError as error:
        _close(files)
        raise SettlingError(f"the connection broke ({error})") from None
    except ValueError as error:
        _close(files)
        raise SettlingError(f"what it sent cannot be read ({error})") from None
    except SettlingError:
        _close(files)
        raise


def _read(
    connection: socket.socket, num_bytes: int, deadline_s: float, files: list[int]
) -> tuple[bytes, list[int]]:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        left = num_bytes - len(data)
        if connection.family == socket.AF_UNIX:
            part, came, _, _ = socket.recv_fds(
                connection, left, _MAX_FILES, socket.MSG_CMSG_CLOEXEC
            )
            # The caller's own list: it closes them also where this raises.
            files += came
        else:
            part = connection.recv(left)
        if not part:
            raise SettlingError("it closed the connection")
        data += part
    return data, files


def _close(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)
