"""One pipeline's step whose transfers block the compute path, as in Megatron's own schedules.

A transfer starts when both its sender and its receiver are there, and neither goes on until it has
passed. What a rank sends after a task, and receives for its next one, follows the calls in
Megatron-Core's schedules.py:

- One chunk per rank: the two overlap if they go to and come from the same rank
  (`send_forward_recv_backward`, `send_backward_recv_forward`); otherwise the send goes first.
- Several chunks: they always overlap, and if a forward is followed by a backward, all four messages
  of the pair pass after the backward (`send_forward_backward_recv_forward_backward`).
- A weight gradient has no transfers: it runs while those before it pass.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rrfp.errors import UsageError
from rrfp.schedule.causes import Cause
from rrfp.schedule.instructions import Waited
from rrfp.schedule.lanes import NOTHING
from rrfp.schedule.order import Order
from rrfp.schedule.patience.announcements import NEVER
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import CAME, ENDED, Log, PipelineRun, Step
from rrfp.simulate.world import TaskTimes, World


@dataclass(slots=True)
class _Rank:
    """The state of a rank. A message is named by the task that consumes it."""

    row: tuple[Task, ...]
    sends: dict[Task, list[Task]]
    """Messages that it sends, by the task after which they leave."""
    receives: dict[Task | None, list[Task]]
    """Messages that it receives, by the task after which it asks for them; None: at the start."""
    num_run: int = 0
    is_busy: bool = False
    ended_ns: int = 0
    open: set[Task] = field(default_factory=set)
    """Messages that the rank is ready to transfer and that have not passed."""
    asks_later: list[Task] = field(default_factory=list)
    """Messages to receive once the open ones have passed."""


class BlockingStep(Step):
    """A step whose ranks meet for every message. Its order must bind, because a receiver must know
    beforehand which message comes next."""

    deadlock = "its order deadlocks over blocking transfers; choose --links async or another hint"

    def __init__(self, shape: Shape, policy: Policy, world: World, log: Log | None) -> None:
        if policy.dispatch is not Dispatch.FIXED or policy.order is None:
            raise UsageError(
                "blocking links need a binding order; add --dispatch fixed or choose --links async"
            )
        super().__init__(shape, policy, world, log)
        # The sending and the receiving rank of each message.
        self._links: dict[Task, tuple[int, int]] = {}
        self._ranks = [self._rank_of(row) for row in policy.order.rows]
        self._half_met: set[Task] = set()

    def _rank_of(self, row: tuple[Task, ...]) -> _Rank:
        """A rank with this row: what it sends and receives between which tasks."""
        units: list[list[Task]] = []
        pairs = self._pairs(row)
        for task in row:
            if task.kind is Kind.W:
                continue
            is_second = pairs and task.kind is Kind.B and bool(units)
            if is_second and [before.kind for before in units[-1]] == [Kind.F]:
                units[-1].append(task)
            else:
                units.append([task])
        rank = _Rank(row, defaultdict(list), defaultdict(list))
        before: Task | None = None
        for unit in units:
            for task in unit:
                link = self.shape.link(task)
                if link is not None:
                    rank.receives[before].append(task)
                    self._links[task] = link
                receiver = self.shape.receiver(task)
                if receiver is not None and self.shape.link(receiver) is not None:
                    rank.sends[unit[-1]].append(receiver)
            before = unit[-1]
        return rank

    def _pairs(self, row: tuple[Task, ...]) -> bool:
        """Whether a forward and the backward after it form a pair: with several chunks, unless
        Megatron's warmup covers all forwards."""
        shape = self.shape
        rank = shape.rank_of(row[0].stage)
        num_forwards = shape.num_chunks * shape.num_microbatches
        num_warmup = 2 * (shape.num_ranks - 1 - rank) + (shape.num_chunks - 1) * shape.num_ranks
        starts_with_all = all(task.kind is Kind.F for task in row[:num_forwards])
        return shape.num_chunks > 1 and not (starts_with_all and num_warmup >= num_forwards)

    def play(self) -> PipelineRun:
        for rank in range(self.shape.num_ranks):
            self._exchange(rank, 0, None)
        while (now_ns := self.next_ns()) != NEVER:
            what, rank, _, number = self.take()
            task = self.lanes[rank].task(number)
            if what == ENDED:
                self._ranks[rank].is_busy = False
                self._ranks[rank].ended_ns = now_ns
                self._exchange(rank, now_ns, task)
            else:
                self._passed(now_ns, task)
        return self.result()

    def _exchange(self, rank: int, now_ns: int, ended: Task | None) -> None:
        """Send the outputs of the tasks up to this one, and receive the inputs of the next ones."""
        this = self._ranks[rank]
        sent = [] if ended is None else this.sends[ended]
        needed = this.receives[ended]
        peers = {other for task in (*sent, *needed) for other in self._links[task] if other != rank}
        self._open(rank, now_ns, sent)
        if not sent or self.shape.num_chunks > 1 or len(peers) == 1:
            self._open(rank, now_ns, needed)
        else:
            this.asks_later = needed
        self._go_on(rank, now_ns)

    def _open(self, rank: int, now_ns: int, messages: Iterable[Task]) -> None:
        """A rank is ready for messages; each passes once its other rank is ready too."""
        for task in messages:
            self._ranks[rank].open.add(task)
            if task not in self._half_met:
                self._half_met.add(task)
                continue
            self._half_met.remove(task)
            sender, receiver = self._links[task]
            end_ns = now_ns
            if self.world.transfer is not None:
                end_ns += self.world.transfer(sender, receiver, task)
            if self.world.lateness is not None:
                # Members run as one: all continue when the last one's message has passed.
                others = range(1, self.world.num_members)
                end_ns += max((self.world.lateness(each, task) for each in others), default=0)
            if self.log is not None:
                for member in range(self.world.num_members):
                    self.log.passed(sender, receiver, member, now_ns, end_ns, task)
            self.push(end_ns, CAME, receiver, 0, self.lanes[receiver].number(task))

    def _passed(self, now_ns: int, task: Task) -> None:
        sender, receiver = self._links[task]
        number = self.lanes[receiver].number(task)
        for member in range(self.world.num_members):
            self.came(receiver, member, now_ns, number)
        for rank in (sender, receiver):
            this = self._ranks[rank]
            this.open.remove(task)
            if not this.open:
                later, this.asks_later = this.asks_later, []
                self._open(rank, now_ns, later)
            self._go_on(rank, now_ns)

    def _go_on(self, rank: int, now_ns: int) -> None:
        """Run the next task of the row, if the rank is free."""
        this = self._ranks[rank]
        if this.is_busy or this.num_run == len(this.row):
            return
        if this.open and this.row[this.num_run].kind is not Kind.W:
            return
        number = self.decide(rank, now_ns)
        assert number != NOTHING, "its input has passed, and its row binds"
        if self.log is not None and now_ns > this.ended_ns:
            cause = Cause.TRANSFER if this.num_run else Cause.WARMUP
            for member in range(self.world.num_members):
                self.log.waited(rank, member, Waited(cause, this.ended_ns, now_ns))
        this.num_run += 1
        this.is_busy = True
        self.run(rank, now_ns, number)


def check_meets(order: Order) -> None:
    """Raise RrfpError if an order deadlocks over blocking transfers. Durations do not matter: what
    a rank sends and receives after each task follows from its row alone."""
    shape = order.shape
    times = [[1] * shape.num_microbatches] * shape.num_stages
    policy = Policy(order, dispatch=Dispatch.FIXED)
    BlockingStep(shape, policy, World(TaskTimes(times, times, times)), None).play()
