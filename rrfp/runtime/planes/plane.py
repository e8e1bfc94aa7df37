"""A data plane: memory that a rank lends to its peers, and how these take what lies in it.

The sender owns an *outbox*: a slab of memory, divided into slots. It copies a message's tensors
into a slot and, once the host has seen that they are there, *posts* the message: a frame on the
link's own socket says what the tensors are and at which offset of the slab they lie. The receiver
*pulls* them into memory of its own and, once its host has seen that they are there, tells its rank
that the message has arrived, and the sender that the slot is free. So the socket stays the control
plane: order, credits, heartbeats, farewell and loss are those of the link.

No stream of a device ever waits for another process.

A large message may be posted in pieces: its frame leaves when the first piece is in its slot, and a
short frame tells of each further one. So one side copies in while the other copies out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.packing import num_pieces
from rrfp.schedule.tasks import Task

TRIAL_BYTES = 64 * 2**20
"""What a plane carries at connect, to say how fast it is, in windows of `WINDOW_BYTES`."""
WINDOW_BYTES = 4 * 2**20


class Form(NamedTuple):
    """What a tensor is, without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def sizes_of(forms: Sequence[Form | None]) -> tuple[int, ...]:
    """In bytes; 0 where there is no tensor."""
    return tuple(0 if form is None else form.num_bytes for form in forms)


@dataclass(slots=True, eq=False)
class Posted:
    """A message whose tensors lie in a slot of this rank's outbox, or soon all will."""

    step: int
    task: Task
    forms: tuple[Form | None, ...]
    offset: int
    """Of the slot, in the slab."""
    num_pieces: int
    latency_ns: int = 0
    queued_ns: int = 0
    """When the compute thread handed it over."""
    begun_ns: int = 0
    """When its copy into the slot began."""
    copied_ns: int = 0
    """When the host saw that its first piece was in the slot, and later its last."""
    num_filled: int = 1
    """Pieces that are there."""
    inline: tuple[torch.Tensor | None, ...] | None = None
    """Where the socket is to carry the tensors: those in the slot, on the host."""


@dataclass(slots=True, eq=False)
class Pull:
    """A message whose tensors are to be taken from its sender's outbox."""

    step: int
    task: Task
    sequence: int
    forms: tuple[Form | None, ...]
    offset: int
    piece_bytes: int
    heard_ns: int
    """When its frame was here."""
    inline: tuple[torch.Tensor | None, ...] | None = None
    """The tensors on the host, where the socket has carried them."""
    num_filled: int = 1
    """Pieces that are there to be taken."""
    num_pulled: int = 0
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    copy_ns: int = 0
    """For how long it was pulled."""

    @property
    def num_pieces(self) -> int:
        return num_pieces(sizes_of(self.forms), self.piece_bytes)

    @property
    def is_whole(self) -> bool:
        return self.num_pulled == self.num_pieces


Pulled = Callable[[Pull, RrfpError | None], None]
"""Told once what there was of a pull is here, or why it never will be; on any thread."""


class PlaneRefusal(Exception):  # noqa: N818 - a reason to take another plane, and no error
    """One sentence: why a plane does not serve a link."""


class Puller(Protocol):
    """The receiving end of one link's plane."""

    def pull(self, pull: Pull, told: Pulled) -> None:
        """Take what there is of a message and has not been taken."""

    def detach(self) -> None:
        """Let go of the peer's memory; nothing is pulled any more. The peer frees it afterwards."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer must know to attach itself to a plane."""

    plane: TransportName
    values: Mapping[str, object]
    descriptors: tuple[int, ...] = ()
    """Files that travel along, over a Unix socket."""


class Plane(Protocol):
    """One rank's side of a data plane: its own slab, and how to attach to those of its peers."""

    name: TransportName
    device: Device
    piece_bytes: int
    """In pieces of which size a message is posted."""
    is_inline: bool
    """Whether the link's socket carries what lies in a slot, instead of a pull."""

    @property
    def slab(self) -> torch.Tensor:
        """Flat, uint8: where this rank's slots lie. Not there once the plane is closed."""
        ...

    def offer(self) -> Offer: ...

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        """Attach to a peer's slab, and measure: what pulls from it, and its GB/s. Raises
        PlaneRefusal."""
        ...

    def close(self) -> None:
        """Free the slab. All peers have detached themselves, or are lost."""
