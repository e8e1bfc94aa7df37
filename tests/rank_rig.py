"""One rank of a pipeline of groups on real links, without Megatron: for tests of the runtime."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch.distributed import TCPStore

from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.delays import Delays
from rrfp.runtime.protocols import Compute, Inbox, Transport
from rrfp.runtime.socket_transport import SocketTransport
from rrfp.runtime.stall import StoreStallBoard
from rrfp.runtime.worker import StepSummary, Worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import hint_named
from rrfp.schedule.order import Order
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Record

PAYLOAD = (torch.zeros(1024),)
"""4 KiB: what every task hands on."""


class Work:
    """A task of a stage that does nothing but `act`, and hands the payload on."""

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
    """A rank whose links are open."""

    place: Place
    transport: SocketTransport
    agreement: StarAgreement
    worker: Worker
    records: list[Record] = field(default_factory=list)

    def run_step(
        self, step: int, shape: Shape, compute: Compute, hint_name: str = "bf"
    ) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, hint_name), compute)

    def dispatcher(self, shape: Shape, hint_name: str = "bf") -> Dispatcher:
        return Dispatcher(
            shape,
            self.place.pp_rank,
            hint_named(hint_name, shape),
            order=_order(hint_name, shape),
            group=self.agreement.group,
        )


@cache
def _order(hint_name: str, shape: Shape) -> Order:
    whole = replace(shape, kinds=WHOLE_BACKWARD)
    order = order_of(hint_named(hint_name, whole), whole)
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
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> Iterator[RankRig]:
    """This process' rank among `num_pp_ranks` times `num_members`, in the environment of
    `run_ranks`. What the worker and the agreement send goes through `wrap`. Records go to `record`,
    or into the rig's own list."""
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
    )
    wrapped = wrap(transport)
    agreement = StarAgreement(place.rank, place.members, wrapped, record)
    worker = Worker(
        place.pp_ranks,
        inbox,
        wrapped,
        agreement,
        record,
        StoreStallBoard(store, "rig", range(num_pp_ranks * num_members)),
        stall_s=stall_s,
        decides_ahead=decides_ahead,
        delays=delays,
    )
    try:
        yield RankRig(place, transport, agreement, worker, records)
    except BaseException:
        worker.close()
        transport.close(farewell=False)
        raise
    worker.close()
    transport.close()
