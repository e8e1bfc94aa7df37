"""Two ranks of one process on simulated devices, with real sockets and real outboxes between them.

Memory is poisoned whenever it is given back: a tensor's when the tensor is gone, a slot's when it
is released, a slab's when it is freed. What arrives is checked on the compute stream, late, as a
kernel would read it.
"""

import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch.distributed import HashStore

from rrfp.runtime.link.receiver import DestinationLink
from rrfp.runtime.net import transport as socket_transport
from rrfp.runtime.net.driver import DestinationDriver
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.planes import host_memory as shared_memory_plane
from rrfp.runtime.planes import selection as rank_planes
from rrfp.runtime.planes.host_memory import SharedMemoryPlane
from rrfp.runtime.planes.outbox import Outbox
from rrfp.runtime.planes.plane import MappedPuller, Offer, Plane, Puller
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Arrived, Inbox, Message
from rrfp.schedule.tasks import Kind, Task
from tests.doubles.simulated_device import POISON, SimulatedDevice

MOST_BYTES = 8 * 2**10
SMALL_OUTBOX_BYTES = 4 * MOST_BYTES
"""So small that slots are waited for, and used again at once."""
PATIENCE_S = 5.0


@dataclass
class Findings:
    """What came of some messages."""

    num_arrived: int = 0
    num_corrupt: int = 0
    num_freed_attached: int = 0
    """Slabs that were freed while a peer was attached to them."""
    attached: Counter[int] = field(default_factory=Counter)
    """How many peers are attached to a slab, by the identity of its file."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def are_clean(self) -> bool:
        return self.num_corrupt == 0 and self.num_freed_attached == 0

    def count(self, *, is_corrupt: bool) -> None:
        with self.lock:
            self.num_arrived += 1
            self.num_corrupt += is_corrupt


class PoisoningOutbox(Outbox):
    """Whoever reads a slot after its release finds poison."""

    def release(self, offset: int) -> None:
        size = self._slots.size_of(offset)  # nothing is lent to a device
        self.plane.slab[offset : offset + size].fill_(POISON)
        super().release(offset)


class WatchedPlane(SharedMemoryPlane):
    """Knows who is attached to its slab when it frees it."""

    def __init__(self, device: SimulatedDevice, slab_bytes: int, findings: Findings) -> None:
        super().__init__(device, slab_bytes)
        self._findings = findings

    def attach(self, offer: Offer, peer: int, timeout_s: float) -> tuple[Puller, float | None]:
        puller, rate = super().attach(offer, peer, timeout_s)
        slab = os.fstat(offer.descriptors[0]).st_ino
        self._findings.attached[slab] += 1
        return WatchedPuller(puller, lambda: self._let_go(slab)), rate

    def _let_go(self, slab: int) -> None:
        self._findings.attached[slab] -= 1

    def close(self, *, are_detached: bool) -> None:
        self._findings.num_freed_attached += bool(
            self._findings.attached[os.fstat(self._descriptor).st_ino]
        )
        self.slab.fill_(POISON)
        super().close(are_detached=are_detached)


class WatchedPuller:
    """Tells once that it has let go."""

    def __init__(self, puller: Puller, let_go: Callable[[], None]) -> None:
        self.pull = puller.pull
        self._puller = puller
        self._let_go: Callable[[], None] | None = let_go

    def detach(self, *, waits: bool = True) -> None:
        self._puller.detach(waits=waits)
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


@dataclass(frozen=True)
class Mistake:
    """One rule of the protocol broken: classes that stand in for those that keep it."""

    outbox: type[Outbox] = PoisoningOutbox
    puller: type[MappedPuller] = MappedPuller
    link: type[DestinationLink] = DestinationLink
    driver: type[DestinationDriver] = DestinationDriver
    device: type[SimulatedDevice] = SimulatedDevice
    outbox_bytes: int = SMALL_OUTBOX_BYTES
    delay_s: float = 50e-6
    compute_delay_s: float | None = None


def content(rank: int, microbatch: int) -> bytes:
    """What the message for a microbatch to this rank holds."""
    draws = random.Random(f"{rank}/{microbatch}")
    return draws.randbytes(draws.randint(1, MOST_BYTES))


PlaneMaker = Callable[[SimulatedDevice, int, Findings], Plane]


def exchange(
    seed: int,
    num_messages: int,
    mistake: Mistake,
    *,
    until_found: bool = False,
    make_plane: PlaneMaker = WatchedPlane,
    plane: TransportName = TransportName.SHM,
) -> Findings:
    """Send so many messages in a random order, half of them each way, and check them all; with
    `until_found` stop at the first that is corrupt."""
    findings = Findings()
    with ExitStack() as stack:
        for where, name, stand_in in (
            (rank_planes, "Outbox", mistake.outbox),
            (shared_memory_plane, "MappedPuller", mistake.puller),
            (socket_transport, "DestinationLink", mistake.link),
            (socket_transport, "DestinationDriver", mistake.driver),
        ):
            stack.enter_context(patch.object(where, name, stand_in))
        planes = {plane: lambda device, size: make_plane(device, size, findings)}
        stack.enter_context(patch.object(rank_planes, "PLANES", planes))
        stack.enter_context(patch.object(rank_planes, "CHOICES", {"cpu": {plane: ((plane,), ())}}))
        store = HashStore()
        ranks = [_Rank(rank, seed, store, mistake, findings, plane) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            try:
                list(pool.map(_Rank.open, ranks))
                each = num_messages // 2
                list(pool.map(lambda rank: rank.work(each, until_found=until_found), ranks))
            finally:
                list(pool.map(_Rank.close, ranks))
    return findings


class _Rank:
    """One rank: its messages out and in, on its own simulated device."""

    def __init__(
        self,
        rank: int,
        seed: int,
        store: HashStore,
        mistake: Mistake,
        findings: Findings,
        plane: TransportName,
    ) -> None:
        self._rank = rank
        self._findings = findings
        self._draws = random.Random(f"{seed}/{rank}")
        self._device = mistake.device(
            2 * seed + rank, mean_delay_s=mistake.delay_s, compute_delay_s=mistake.compute_delay_s
        )
        self._inbox = Inbox()
        self._is_done = False
        self._transport = SocketTransport(
            rank,
            store,
            [1 - rank],
            [1 - rank],
            self._inbox,
            num_credits=16,
            planes=RankPlanes(self._device, plane, mistake.outbox_bytes),
        )

    def open(self) -> None:
        self._transport.open()

    def work(self, num_messages: int, *, until_found: bool) -> None:
        unsent = self._draws.sample(range(num_messages), num_messages)
        num_missing = num_messages
        deadline_s = time.monotonic() + PATIENCE_S
        while unsent or num_missing:
            assert time.monotonic() < deadline_s, f"{num_missing} messages did not arrive in time"
            if until_found and not self._findings.are_clean:
                return
            for _ in range(min(len(unsent), self._draws.randint(0, 4))):
                self._send(unsent.pop())
            for event in self._inbox.take(0.0 if unsent else 0.05):
                if not isinstance(event, Arrived):
                    assert until_found, event
                    return
                self._check(event)
                num_missing -= 1
        self._is_done = True

    def _send(self, microbatch: int) -> None:
        """Make a message on the compute stream, hand it over, and forget it."""
        device, data = self._device, content(1 - self._rank, microbatch)
        stream = device.compute_stream()
        tensor = device.empty([len(data)], torch.uint8, stream)
        address = tensor.data_ptr()
        device.launch(lambda: _write(address, data), stream)
        self._transport.send(1 - self._rank, Message(0, Task(1, Kind.F, microbatch), (tensor,)))

    def _check(self, event: Arrived) -> None:
        """Read what has arrived on the compute stream, and forget it."""
        device, message = self._device, event.message
        self._transport.consumed(event.peer, message.step)
        (tensor,) = message.tensors
        assert tensor is not None
        expected = content(self._rank, message.task.microbatch)
        assert tensor.numel() == len(expected)
        device.take_over(message.tensors)
        address = tensor.data_ptr()

        def check() -> None:
            found = ctypes.string_at(address, len(expected))
            self._findings.count(is_corrupt=found != expected)

        device.launch(check, device.compute_stream())

    def close(self) -> None:
        # With a mistake found, nobody takes what is still under way.
        self._transport.close(farewell=self._is_done)
        self._device.close()


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
