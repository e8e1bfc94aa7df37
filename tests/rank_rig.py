"""Ranks of a pipeline of groups, on sockets or in memory: for tests of the runtime, no Megatron."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self, TypeVar

import torch
from torch.distributed import HashStore, TCPStore

from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.device.interface import Device
from rrfp.runtime.device_worker import DeviceWorker
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.pace import Delays
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import Clock, Compute, Inbox, Links, StepSummary, Transport, monotonic
from rrfp.runtime.stall import StoreStallBoard
from rrfp.runtime.worker import Worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.order import Order
from rrfp.schedule.patience import JustInTime
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import NS_PER_S, Record
from tests.doubles.memory_transport import MemoryNetwork, MemoryTransport
from tests.memory_ranks import MemoryRanks

T = TypeVar("T")

OUTBOX_BYTES = 1 << 20

PAYLOAD = (torch.zeros(1024),)
"""4 KiB: what every task hands on."""


class Work:
    """A task of a stage that does nothing but `act`, and hands the payload on."""

    held_bytes = 0
    waiting_gradient_bytes = 0

    def __init__(self, act: Callable[[Task], None] = lambda _: None) -> None:
        self._act = act

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        self._act(task)
        return PAYLOAD


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among `num_members` pipelines that agree; ranks go by stage first."""

    rank: int
    num_pp_ranks: int
    num_members: int

    @property
    def pp_rank(self) -> int:
        return self.rank // self.num_members

    @property
    def member(self) -> int:
        return self.rank % self.num_members

    @property
    def pp_ranks(self) -> Sequence[int]:
        return range(self.member, self.num_pp_ranks * self.num_members, self.num_members)

    @property
    def members(self) -> Sequence[int]:
        first = self.pp_rank * self.num_members
        return range(first, first + self.num_members)

    @property
    def peers(self) -> set[int]:
        """The neighbours in the pipeline (in a loop) and in the group's star."""
        pipeline, index = self.pp_ranks, self.pp_rank
        near = {pipeline[index - 1], pipeline[(index + 1) % self.num_pp_ranks]}
        star = self.members if self.member == 0 else self.members[:1]
        return (near | {*star}) - {self.rank}


@dataclass(slots=True)
class RankRig:
    """A rank and its links."""

    place: Place
    transport: Transport
    agreement: StarAgreement
    worker: Worker
    records: list[Record]
    clock: Clock
    sleep: Callable[[float], None]
    """Lets so many seconds pass on the compute thread."""

    def run_step(
        self, step: int, shape: Shape, compute: Compute, hint_name: str = "bf"
    ) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, hint_name), compute)

    def dispatcher(self, shape: Shape, hint_name: str = "bf") -> Dispatcher:
        return Dispatcher(
            shape,
            self.place.pp_rank,
            Policy(hint_named(hint_name).on(shape), order=_order(hint_name, shape)),
            group=self.agreement.group,
        )

    @contextmanager
    def life(self) -> Iterator[Self]:
        """The rig with its links open."""
        self.transport.open()
        self.worker.open()
        try:
            yield self
        except BaseException:
            self.worker.close()
            self.transport.close(farewell=False)
            raise
        self.worker.close()
        self.transport.close()


@cache
def _order(hint_name: str, shape: Shape) -> Order:
    whole = replace(shape, kinds=WHOLE_BACKWARD)
    order = order_of(hint_named(hint_name).on(whole), whole)
    return order if Kind.B in shape.kinds else order.forwards()


@contextmanager
def open_rig(
    num_pp_ranks: int,
    num_members: int = 1,
    *,
    stall_s: float = 20.0,
    num_credits: int = 64,
    decides_ahead: bool = True,
    delays_s: float | None = None,
    record: Callable[[Record], None] | None = None,
    wrap: Callable[[Links], Links] = lambda links: links,
    device: Device | None = None,
    in_time: JustInTime | None = None,
) -> Iterator[RankRig]:
    """This process' rank among `num_pp_ranks` times `num_members`, in the environment of
    `run_ranks`. What the worker and the agreement send goes through `wrap`. Records go to `record`,
    or into the rig's own list. With a device, tensors lie on it and go by shared memory."""
    torch.set_num_threads(1)
    place = Place(int(os.environ["RANK"]), num_pp_ranks, num_members)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    records: list[Record] = []
    record = record or records.append
    delays = None if delays_s is None else Delays(0, place.rank, delays_s)
    inbox = Inbox()
    transport = SocketTransport(
        place.rank,
        store,
        place.peers,
        place.peers,
        inbox,
        num_credits=num_credits,
        record=record,
        delays=delays,
        planes=None if device is None else RankPlanes(device, TransportName.SHM, OUTBOX_BYTES),
    )
    links = wrap(transport)
    agreement = StarAgreement(place.rank, place.members, links, record)
    make = Worker if device is None else partial(DeviceWorker, device=device, in_time=in_time)
    worker = make(
        place.pp_ranks,
        inbox,
        links,
        agreement,
        record,
        StoreStallBoard(store, "rig", range(num_pp_ranks * num_members)),
        stall_s=stall_s,
        decides_ahead=decides_ahead,
        delays=delays,
    )
    rig = RankRig(place, transport, agreement, worker, records, monotonic, time.sleep)
    with rig.life():
        yield rig


def run_in_memory(
    target: Callable[[RankRig], T],
    num_pp_ranks: int,
    num_members: int = 1,
    *,
    seed: int = 0,
    longest_delay_ns: int = 0,
    stall_s: float = 20.0,
    num_credits: int = 64,
    wrap: Callable[[int, Links], Links] = lambda _, links: links,
    network: MemoryNetwork | None = None,
) -> list[T]:
    """What `target` gives on each of so many ranks of this process, in virtual time; their leaders
    do not decide ahead. Bytes are up to `longest_delay_ns` on their way."""
    network = network or MemoryNetwork(seed, longest_delay_ns=longest_delay_ns)
    ranks: MemoryRanks[T] = MemoryRanks(network, num_pp_ranks * num_members, seed)
    store = HashStore()

    def run(rank: int) -> T:
        place = Place(rank, num_pp_ranks, num_members)
        records: list[Record] = []
        inbox = ranks.inboxes[rank]
        transport = MemoryTransport(
            network,
            rank,
            place.peers,
            place.peers,
            inbox,
            num_credits=num_credits,
            record=records.append,
        )
        links = wrap(rank, transport)
        agreement = StarAgreement(rank, place.members, links, records.append, network.clock)
        worker = Worker(
            place.pp_ranks,
            inbox,
            links,
            agreement,
            records.append,
            StoreStallBoard(store, "rig", range(num_pp_ranks * num_members)),
            stall_s=stall_s,
            decides_ahead=False,
            clock=network.clock,
        )

        def sleep(duration_s: float) -> None:
            ranks.sleep(rank, round(duration_s * NS_PER_S))

        rig = RankRig(place, transport, agreement, worker, records, network.clock, sleep)
        with rig.life():
            return target(rig)

    return ranks.run(run)
