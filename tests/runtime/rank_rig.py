"""Ranks of a pipeline of groups, on sockets or in memory: for tests of the runtime, no Megatron."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Generic, Self, TypeVar

import torch
from torch.distributed import HashStore, TCPStore

from rrfp.runtime.agreement import GroupAgreement
from rrfp.runtime.device.interface import Device
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.pace import Delays
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from rrfp.runtime.protocols import (
    Clock,
    Compute,
    Event,
    Inbox,
    Links,
    Message,
    MessageArrived,
    StepSummary,
    Transport,
    monotonic,
)
from rrfp.runtime.stall import StallBoard
from rrfp.runtime.worker import DeviceWorker, Worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hints import Order
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import IMPATIENT, Patience, Policy
from rrfp.schedule.punctuality import JustInTime
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task, parse_task
from rrfp.trace.records import NS_PER_S, Record, WaitRecord
from tests.doubles.memory_transport import MemoryNetwork, MemoryTransport

# Ranks of one process on a `MemoryNetwork`: whole workers in virtual time, in milliseconds.
#
# Each rank has a thread, for a worker's loop is a function that waits. One of them runs at a time,
# until it waits; then time goes on to what comes next, and the network's seed says who runs first
# of those that can. So a run is the same each time, and a stall of seconds costs none.


T = TypeVar("T")


@dataclass(slots=True)
class _Wait:
    """The wait of a rank that does not run: until this time, or until something comes."""

    until_ns: int
    has_come: Callable[[], bool]


class MemoryRanks(Generic[T]):
    """Runs one function a rank."""

    def __init__(self, network: MemoryNetwork, num_ranks: int, seed: int = 0) -> None:
        self.network = network
        self.inboxes = [MemoryInbox(partial(self.wait, rank)) for rank in range(num_ranks)]
        self._draws = random.Random(seed)
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ended = threading.Semaphore(0)
        self._waits: dict[int, _Wait] = {}
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []

    def run(self, target: Callable[[int], T]) -> list[T]:
        """Run `target(rank)` on each rank, and return the results; raise the first rank's error, if
        any."""
        ranks = range(len(self._turns))
        threads = [threading.Thread(target=self._run, args=(rank, target)) for rank in ranks]
        for rank, thread in enumerate(threads):
            self._waits[rank] = _Wait(0, lambda: False)
            thread.start()
        self._deliver()
        self._ended.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [self._results[rank] for rank in ranks]

    def sleep(self, rank: int, duration_ns: int) -> None:
        """Let this time pass on this rank's compute thread."""
        self.wait(rank, duration_ns, lambda: False)

    def wait(self, rank: int, most_ns: int, has_come: Callable[[], bool]) -> None:
        """Wait at most this long until something has come."""
        self._waits[rank] = _Wait(self.network.now_ns + most_ns, has_come)
        self._deliver()
        self._turns[rank].acquire()

    def _run(self, rank: int, target: Callable[[int], T]) -> None:
        self._turns[rank].acquire()
        try:
            self._results[rank] = target(rank)
        except BaseException as error:
            self._errors.append(error)
        self._deliver()

    def _deliver(self) -> None:
        """Let time pass until a rank can go on, and let it."""
        if not self._waits:
            self._ended.release()
            return
        while not (able := self._able()):
            self.network.step(min(wait.until_ns for wait in self._waits.values()))
        rank = self._draws.choice(able)
        del self._waits[rank]
        self._turns[rank].release()

    def _able(self) -> list[int]:
        now_ns = self.network.now_ns
        return [
            rank for rank, wait in self._waits.items() if wait.until_ns <= now_ns or wait.has_come()
        ]


class MemoryInbox(Inbox):
    """An inbox whose rank waits in virtual time."""

    def __init__(self, wait: Callable[[int, Callable[[], bool]], None]) -> None:
        super().__init__()
        self._wait = wait

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        if timeout_s > 0 and not self._events:
            self._wait(round(timeout_s * NS_PER_S), lambda: bool(self._events))
        return super().take()


OUTBOX_BYTES = 1 << 20

PAYLOAD = (torch.zeros(1024),)
"""Output of every task: 4 KiB."""


class Work:
    """A stage whose tasks only call `act`, and return the payload."""

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
    """The place of a rank among `num_members` pipelines that agree; ranks are numbered by stage
    first."""

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
        """The neighbors in the pipeline (in a loop) and in the group's star."""
        pipeline, index = self.pp_ranks, self.pp_rank
        near = {pipeline[index - 1], pipeline[(index + 1) % self.num_pp_ranks]}
        star = self.members if self.member == 0 else self.members[:1]
        return (near | {*star}) - {self.rank}


@dataclass(slots=True)
class RankRig:
    """A rank and its links."""

    place: Place
    transport: Transport
    agreement: GroupAgreement
    worker: Worker
    records: list[Record]
    clock: Clock
    sleep: Callable[[float], None]
    """Lets this many seconds pass on the compute thread."""

    def run_step(
        self, step: int, shape: Shape, compute: Compute, hint_name: str = "bf"
    ) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, hint_name), compute)

    def dispatcher(self, shape: Shape, hint_name: str = "bf") -> Dispatcher:
        return Dispatcher(
            shape,
            self.place.pp_rank,
            Policy(hint_named(hint_name).for_shape(shape), order=_order(hint_name, shape)),
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
    order = order_of(hint_named(hint_name).for_shape(whole), whole)
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
    agreement = GroupAgreement(place.rank, place.members, links, record)
    make = Worker if device is None else partial(DeviceWorker, device=device, in_time=in_time)
    worker = make(
        place.pp_ranks,
        inbox,
        links,
        agreement,
        record,
        StallBoard(store, "rig", range(num_pp_ranks * num_members)),
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
    """Run `target` on each rank in this process, in virtual time, and return the results. Leaders
    do not decide ahead. Bytes take up to `longest_delay_ns` to arrive."""
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
        agreement = GroupAgreement(rank, place.members, links, records.append, network.clock)
        worker = Worker(
            place.pp_ranks,
            inbox,
            links,
            agreement,
            records.append,
            StallBoard(store, "rig", range(num_pp_ranks * num_members)),
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


# One rank's worker between fakes, which record its calls; arrivals are scripted.


TICK_NS = 10
STALL_S = 5.0
PATIENCE_S = 10.0


def task(text: str) -> Task:
    return parse_task(text)[0]


F0 = task("1F0")


def arrived(text: str, step: int = 0, peer: int = 0) -> MessageArrived:
    """Make the arrival of a task's input, whose tensor contains the microbatch."""
    wanted = task(text)
    return MessageArrived(peer, Message(step, wanted, (torch.tensor([float(wanted.microbatch)]),)))


class ScriptedInbox(Inbox):
    """Gives one batch of the script whenever the worker waits; with none left, time runs out."""

    def __init__(self, script: list[list[Event]]) -> None:
        super().__init__()
        self._script = script
        self.waited_s = 0.0
        self.timeouts_s: list[float] = []

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        self.waited_s += timeout_s
        self.timeouts_s.append(timeout_s)
        if timeout_s > 0 and self._script:
            for event in self._script.pop(0):
                self.put(event)
        return super().take(0.0)

    def wait_until_empty(self) -> None:
        """Wait until another thread has taken all events."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._events:
            assert time.monotonic() < deadline_s, "nobody decides ahead"
            time.sleep(0.001)


@dataclass(slots=True)
class World:
    """One rank's worker between fakes that record its calls."""

    rank: int = 1
    num_ranks: int = 3
    script: list[list[Event]] = field(default_factory=list)
    during: dict[Task, list[Event]] = field(default_factory=dict)
    """Events that arrive while a task runs."""
    members: tuple[int, ...] | None = None
    calls: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    fails_at: Task | None = None
    task_ns: int = 0
    """Duration of a task on this rank's clock, after the events that arrive while it runs."""
    ahead_during: Task | None = None
    """A task that runs until events that arrive meanwhile were used for a decision ahead."""
    now_ns: int = 0
    patience: Patience = IMPATIENT
    stall_s: float = STALL_S
    inbox: ScriptedInbox = field(init=False)
    agreement: GroupAgreement = field(init=False)
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = ScriptedInbox(self.script)
        members = self.members or (self.rank,)
        self.agreement = GroupAgreement(self.rank, members, self, self.records.append, self.clock)
        self.worker = Worker(
            range(self.num_ranks),
            self.inbox,
            self,
            self.agreement,
            self.records.append,
            StallBoard(HashStore(), "test", range(self.num_ranks)),
            stall_s=self.stall_s,
            decides_ahead=self.ahead_during is not None,
            clock=self.clock,
        )
        self.worker.open()

    def clock(self) -> int:
        self.now_ns += TICK_NS
        return self.now_ns

    def run_step(self, shape: Shape, step: int = 0, limit: int | None = None) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, limit), self)

    def dispatcher(self, shape: Shape, limit: int | None = None) -> Dispatcher:
        hint = HINTS["bf"]
        order = order_of(hint, replace(shape, kinds=WHOLE_BACKWARD))
        return Dispatcher(
            shape,
            self.rank,
            Policy(
                hint,
                limit=limit,
                order=order if shape.kinds == WHOLE_BACKWARD else order.forwards(),
                patience=self.patience,
            ),
            group=self.agreement.group,
        )

    def causes(self) -> list[str]:
        return [record.cause for record in self.records if isinstance(record, WaitRecord)]

    # As the worker's compute.

    held_bytes = 0
    waiting_gradient_bytes = 0

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        if task == self.fails_at:
            raise ZeroDivisionError
        values = [tensor.item() for tensor in inputs if tensor is not None]
        self.calls.append(f"run {task} on {values}")
        for event in self.during.get(task, ()):
            self.inbox.put(event)
        self.now_ns += self.task_ns
        if task == self.ahead_during:
            self.inbox.wait_until_empty()
        return (torch.tensor([100.0 * task.stage + task.microbatch]),)

    # As its transport.

    def send(self, peer: int, message: Message) -> None:
        (tensor,) = message.tensors
        assert tensor is not None
        self.calls.append(f"send {tensor.item()} to {peer} for {message.task}")

    def consumed(self, peer: int, step: int) -> None:
        self.calls.append(f"consumed from {peer} in {step}")

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        self.calls.append(f"forecast {task} to {peer} in {remaining_ns}")

    def report(self, peer: int, step: int, task: Task) -> None:
        self.calls.append(f"report {task} to {peer}")

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        self.calls.append(f"decide {position} {task} to {peer}")
