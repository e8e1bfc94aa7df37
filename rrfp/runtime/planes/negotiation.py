"""The two ends of a link agree on a data plane, over its socket, before the link runs.

The source offers planes, the best first. The destination attaches itself to the first one that it
can, measures it, and answers which. Without any, the socket carries the tensors. Where the
destination owns the slots, its answer also says where they are.
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

from rrfp.runtime.planes.plane import Attachment, Offer, Plane, PlaneRefusal
from rrfp.runtime.planes.registry import TransportName
from rrfp.strict_json import integer, items, member, number, parsed, text

_LENGTH = struct.Struct("<II")
"""Number of bytes of JSON, and of file descriptors."""
_MAX_BYTES = 2**20
_MAX_FILES = 4


class NegotiationError(Exception):
    """The other end is gone, or breaks the rules of the negotiation."""


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

    def described(self) -> dict[str, object]:
        """Return the entry of `run.json`."""
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
class AcceptedPlanes:
    """The planes of the links from one rank."""

    asked: TransportName
    outbox_mb: int
    """Upper bound of each outbox."""
    links: Mapping[int, PlaneChoice]
    """Choices by peer."""
    outbox_bytes: int
    """Upper bound of the memory of their outboxes on this rank, of the host or the device."""


def offer_planes(
    connection: socket.socket, planes: Sequence[Plane], why_none: str, timeout_s: float
) -> tuple[PlaneChoice, Offer | None]:
    """Offer planes, and return the destination's choice, and the place of its slots if it owns
    them. `why_none` says why a better plane that was asked for is missing. The caller closes the
    answer's files. Raises NegotiationError."""
    deadline_s = time.monotonic() + timeout_s
    offers = [plane.offer() for plane in planes]
    offered = {"why": why_none, "timeout_s": timeout_s, "offers": [*map(_encoded, offers)]}
    _send(connection, offered, [file for each in offers for file in each.descriptors], deadline_s)
    value, files = _receive(connection, deadline_s)
    answer: Offer | None = None
    try:
        choice = PlaneChoice.decode(value)
        answers: list[Offer | None] = [None]
        if isinstance(value, dict) and "answers" in value:
            answers = [*_offers(value, "answers", files)]
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
    """Attach to the first of the planes that the source offers, and answer which. Raises
    NegotiationError."""
    deadline_s = time.monotonic() + timeout_s
    value, files = _receive(connection, deadline_s)
    choice, attachment = None, None
    try:
        why = text(member(value, "why"))
        deadline_s = min(deadline_s, time.monotonic() + number(member(value, "timeout_s")))
        for offer in _offers(value, "offers", files):
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
            told = {**asdict(choice), "answers": [_encoded(answer)]}
            _send(connection, told, answer.descriptors, deadline_s)
    except NegotiationError:
        # The link will not exist, and the attachment has the peer's memory open.
        if attachment is not None:
            attachment.fetcher.detach()
        raise
    return choice, attachment


def _encoded(offer: Offer) -> dict[str, object]:
    return {
        "plane": offer.plane,
        "values": dict(offer.values),
        "files": len(offer.descriptors),
    }


def _offers(value: object, name: str, files: Sequence[int]) -> list[Offer]:
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
    """Return the JSON that the other end sent, and the files with it, which the caller closes."""
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
            raise NegotiationError("it closed the connection")
        data += part
    return data, files


def close_files(files: Sequence[int]) -> None:
    """Close file descriptors; an invalid one does no harm."""
    for file in files:
        with suppress(OSError):
            os.close(file)
