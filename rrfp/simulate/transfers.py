"""The two kinds of simulated steps: messages travel while ranks compute, or transfers block.

Travelling messages use a directed link one at a time, in the order in which they were sent.

The members of a group (tensor parallelism) run each task together, because it contains collectives;
only their messages arrive at different times. The leader's dispatcher counts all arrivals. It
decides on the next task while one runs, just early enough for the round of agreement to end with
that task. If no task was ready by then, the group waits for a decision and its round.

If launches on the device take time, every rank decides on its next task shortly before the running
one ends (`JustInTime`), and decides again with every arrival from then on. At most one task waits
behind the running one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rrfp.errors import UsageError
from rrfp.schedule.hints import Order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.punctuality import NEVER, Durations, JustInTime, Punctuality
from rrfp.schedule.ready_tracker import KINDS, NO_RANK, NO_TASK
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Announced, Cause, Kind, Task, Waited
from rrfp.simulate.engine import (
    ANNOUNCED,
    ARRIVED,
    DECIDES_AHEAD,
    ENDED,
    IDLE,
    WAIT_ENDS,
    Log,
    PipelineRun,
    Step,
    StepConditions,
    TaskTimes,
)

# Announcements in virtual time.


class AnnouncementModel:
    """The announcements between ranks, in steps of the same costs. As in the runtime, ranks learn
    from arrivals how accurate announcements are."""

    def __init__(
        self, shape: Shape, conditions: StepConditions, punctualities: Sequence[Punctuality]
    ) -> None:
        """`punctualities` are by rank."""
        self._shape = shape
        self._known_ns = (
            None
            if conditions.expected is None
            else conditions.expected.by_kind(split=shape.splits_backward)
        )
        self._durations = [Durations() for _ in range(shape.num_ranks)]
        self._punctualities = punctualities
        self._left_ns: dict[Task, int] = {}

    def expected_ns(self, rank: int, task: Task, time_ns: int) -> int | None:
        """Return the time that a rank expects the task that it begins to take: the known one, else
        the mean of earlier tasks; None before the first. Where it is not known, the real time,
        `time_ns`, then updates the mean."""
        stage, kind, microbatch = task
        if self._known_ns is not None:
            return self._known_ns[kind][stage][microbatch]
        chunk = self._shape.chunk_of(stage)
        mean_ns = self._durations[rank].expected_ns(kind, chunk)
        self._durations[rank].took(kind, chunk, time_ns)
        return None if mean_ns is None else int(mean_ns)

    def announce(self, task: Task, left_ns: int) -> None:
        """Store the announcement that a task's input will arrive `left_ns` after it, until
        `receive` delivers it."""
        self._left_ns[task] = left_ns

    def receive(self, rank: int, task: Task, now_ns: int) -> Announced:
        """Deliver the stored announcement of a task to its rank, which records it; return it as a
        stimulus."""
        return self._punctualities[rank].announced(task, now_ns, self._left_ns.pop(task))

    def arrived(self, rank: int, task: Task, now_ns: int) -> None:
        """Record that the input of a task has reached its rank, which learns how accurate its
        announcement was."""
        self._punctualities[rank].arrived(task, now_ns)


# One pipeline's step whose transfers block the compute path, as in Megatron's own schedules.
#
# A transfer starts when both its sender and its receiver are ready, and blocks both until it is
# done. The send after a task and the receive for the next one follow the calls in Megatron-Core's
# schedules.py:
#
# - One chunk per rank: the two overlap if they use the same peer (`send_forward_recv_backward`,
#   `send_backward_recv_forward`); otherwise the send goes first.
# - Several chunks: they always overlap, and if a forward is followed by a backward, all four
#   messages of the pair are transferred after the backward
#   (`send_forward_backward_recv_forward_backward`).
# - A weight gradient has no transfers: it runs during those before it.


@dataclass(slots=True)
class _Rank:
    """The state of a rank with blocking transfers. A message is identified by the task that
    consumes it."""

    row: tuple[Task, ...]
    sends: dict[Task, list[Task]]
    """The messages that it sends, by the task after which it sends them."""
    receives: dict[Task | None, list[Task]]
    """The messages that it receives, by the task after which it posts the receive; None: at the
    start."""
    num_run: int = 0
    is_busy: bool = False
    ended_ns: int = 0
    open: set[Task] = field(default_factory=set)
    """The messages whose transfer the rank has posted and that are not done."""
    receive_later: list[Task] = field(default_factory=list)
    """The messages to receive once the open ones are done."""


class BlockingStep(Step):
    """A step with blocking transfers. Its order must bind, because a receiver must know beforehand
    which message is next."""

    deadlock = "its order deadlocks over blocking transfers; choose --links async or another hint"

    def __init__(
        self, shape: Shape, policy: Policy, conditions: StepConditions, log: Log | None
    ) -> None:
        if policy.dispatch is not Dispatch.FIXED or policy.order is None:
            raise UsageError(
                "blocking links need a binding order; add --dispatch fixed or choose --links async"
            )
        super().__init__(shape, policy, conditions, log)
        # The sending and the receiving rank of each message.
        self._links: dict[Task, tuple[int, int]] = {}
        self._ranks = [self._rank_of(row) for row in policy.order.rows]
        self._half_posted: set[Task] = set()

    def _rank_of(self, row: tuple[Task, ...]) -> _Rank:
        """Return the initial state of a rank, with its transfers between the tasks of this row, and
        record the link of each message that it receives. Where transfers are combined, those of a
        forward and of the backward after it surround the pair. Weight gradients have none."""
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
        """True if the transfers of a forward and of the backward after it are combined: with
        several chunks, unless the row starts with all forwards and Megatron's warmup covers
        them."""
        shape = self.shape
        rank = shape.rank_of(row[0].stage)
        num_forwards = shape.num_chunks * shape.num_microbatches
        num_warmup = 2 * (shape.num_ranks - 1 - rank) + (shape.num_chunks - 1) * shape.num_ranks
        starts_with_all = all(task.kind is Kind.F for task in row[:num_forwards])
        return shape.num_chunks > 1 and not (starts_with_all and num_warmup >= num_forwards)

    def play(self) -> PipelineRun:
        """Simulate the step until no events are left, and return its outcome. Raises RrfpError if
        the order deadlocks over blocking transfers."""
        for rank in range(self.shape.num_ranks):
            self._exchange(rank, 0, None)
        while (now_ns := self.next_ns()) != NEVER:
            what, rank, _, number = self.pop()
            task = self.indices[rank].task(number)
            if what == ENDED:
                self._ranks[rank].is_busy = False
                self._ranks[rank].ended_ns = now_ns
                self._exchange(rank, now_ns, task)
            else:
                self._finish_transfer(now_ns, task)
        return self.result()

    def _exchange(self, rank: int, now_ns: int, ended: Task | None) -> None:
        """Post the sends and receives that follow the task `ended` (None: the start), and run the
        next task if they are done. With one chunk and different peers, receives are posted only
        when the sends are done."""
        this = self._ranks[rank]
        sent = [] if ended is None else this.sends[ended]
        needed = this.receives[ended]
        peers = {other for task in (*sent, *needed) for other in self._links[task] if other != rank}
        self._open(rank, now_ns, sent)
        if not sent or self.shape.num_chunks > 1 or len(peers) == 1:
            self._open(rank, now_ns, needed)
        else:
            this.receive_later = needed
        self._go_on(rank, now_ns)

    def _open(self, rank: int, now_ns: int, messages: Iterable[Task]) -> None:
        """Post a rank's side of these transfers. A transfer starts once both sides are posted: its
        end, when the latest member's message has arrived, is scheduled, and it is logged."""
        for task in messages:
            self._ranks[rank].open.add(task)
            if task not in self._half_posted:
                self._half_posted.add(task)
                continue
            self._half_posted.remove(task)
            sender, receiver = self._links[task]
            end_ns = now_ns
            if self.conditions.transfer is not None:
                end_ns += self.conditions.transfer(sender, receiver, task)
            if self.conditions.lateness is not None:
                # Members run together: all continue when the last one's message has arrived.
                others = range(1, self.conditions.num_members)
                end_ns += max((self.conditions.lateness(each, task) for each in others), default=0)
            if self.log is not None:
                for member in range(self.conditions.num_members):
                    self.log.passed(sender, receiver, member, now_ns, end_ns, task)
            self.push(end_ns, ARRIVED, receiver, 0, self.indices[receiver].number(task))

    def _finish_transfer(self, now_ns: int, task: Task) -> None:
        """Deliver a message to all members of its receiver, and let both of its ranks go on: with
        receives that they put off, then with their next task."""
        sender, receiver = self._links[task]
        number = self.indices[receiver].number(task)
        for member in range(self.conditions.num_members):
            self.deliver(receiver, member, now_ns, number)
        for rank in (sender, receiver):
            this = self._ranks[rank]
            this.open.remove(task)
            if not this.open:
                later, this.receive_later = this.receive_later, []
                self._open(rank, now_ns, later)
            self._go_on(rank, now_ns)

    def _go_on(self, rank: int, now_ns: int) -> None:
        """Run the next task of the row, and log the wait before it, if the rank is free and its
        transfers are done. A weight gradient runs during transfers."""
        this = self._ranks[rank]
        if this.is_busy or this.num_run == len(this.row):
            return
        if this.open and this.row[this.num_run].kind is not Kind.W:
            return
        number = self.decide(rank, now_ns)
        assert number != NO_TASK, "its input has arrived, and its row binds"
        if self.log is not None and now_ns > this.ended_ns:
            cause = Cause.TRANSFER if this.num_run else Cause.WARMUP
            for member in range(self.conditions.num_members):
                self.log.waited(rank, member, Waited(cause, this.ended_ns, now_ns))
        this.num_run += 1
        this.is_busy = True
        self.run(rank, now_ns, number)


def check_blocking_transfers(order: Order) -> None:
    """Raise RrfpError if an order deadlocks over blocking transfers, by simulating a step.
    Durations do not matter: the transfers after each task follow from the row alone."""
    shape = order.shape
    times = [[1] * shape.num_microbatches] * shape.num_stages
    policy = Policy(order, dispatch=Dispatch.FIXED)
    BlockingStep(shape, policy, StepConditions(TaskTimes(times, times, times)), None).play()


class AsyncStep(Step):
    """A step whose messages travel while ranks compute."""

    deadlock = "its order deadlocks as a binding one; reorder it or choose --dispatch ready"

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        conditions: StepConditions,
        log: Log | None,
        announcing: AnnouncementModel | None = None,
    ) -> None:
        """With `announcing`, ranks announce to each other when to expect their output."""
        super().__init__(shape, policy, conditions, log)
        self._agreement_ns = conditions.agreement_ns if conditions.num_members > 1 else 0
        self._launch_ns = conditions.launch_ns
        # By rank, if launches take time: its decision times, the next of them, and the start of the
        # running task on its device.
        num_deciding = shape.num_ranks if conditions.launch_ns else 0
        self._in_time = [JustInTime(conditions.launch_risk) for _ in range(num_deciding)]
        self._due_ns = [NEVER] * shape.num_ranks
        self._began_ns = [0] * shape.num_ranks
        self._is_busy = [False] * shape.num_ranks
        # The ranks that must decide, each once.
        self._to_decide = list(range(shape.num_ranks))
        self._is_to_decide = [True] * shape.num_ranks
        # By group: the next task, decided ahead, and the end of that round of agreement.
        self._ahead: dict[int, tuple[int, int]] = {}
        self._announcing = announcing
        # By rank: the latest time of its next decision, even if nothing arrives.
        self._deadline_ns = [NEVER] * shape.num_ranks
        # By link: the time from which it is free. By link and member: the last arrival.
        self._free_ns: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._last_arrival_ns: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def play(self) -> PipelineRun:
        """Simulate the step until no events are left, and return its outcome: at each instant all
        events are processed, then ranks decide. Raises RrfpError if tasks are left, because a
        binding order deadlocks."""
        now_ns = 0
        while True:
            self._decide_all(now_ns)
            now_ns = self.next_ns()
            if now_ns == NEVER:
                return self.result()
            while self.next_ns() == now_ns:
                what, rank, member, number = self.pop()
                if what == ENDED:
                    self._is_busy[rank] = False
                    self._request_decision(rank)
                    if self._launch_ns:
                        self._observe_run(rank, now_ns, number)
                    self._send_output(rank, now_ns, number)
                elif what == ARRIVED:
                    self._deliver_input(rank, member, now_ns, number)
                elif what == DECIDES_AHEAD:
                    # The task may be over, if it took less time than expected.
                    if self._is_busy[rank] and rank not in self._ahead:
                        self._decide_ahead(rank, now_ns)
                elif what == ANNOUNCED:
                    self._deliver_announcement(rank, now_ns, number)
                elif self._deadline_ns[rank] == now_ns:
                    self._request_decision(rank)

    def _request_decision(self, rank: int) -> None:
        """Add a rank, once, to those that decide after all events of this instant."""
        if not self._is_to_decide[rank]:
            self._is_to_decide[rank] = True
            self._to_decide.append(rank)

    def _decide_all(self, now_ns: int) -> None:
        """Let the ranks decide for which a decision was requested. A busy rank decides ahead only
        if its decision time has come and it has not decided yet."""
        for rank in self._to_decide:
            self._is_to_decide[rank] = False
            if not self._is_busy[rank]:
                self._decide(rank, now_ns)
            elif NEVER < self._due_ns[rank] <= now_ns and rank not in self._ahead:
                self._decide_ahead(rank, now_ns)
        self._to_decide.clear()

    def _decide(self, rank: int, now_ns: int) -> None:
        """Let a free rank start its next task, which it may have decided ahead, after the round of
        agreement and the launch. It schedules its next decision and announces its output. If no
        task may run, it schedules the end of its patience, if any."""
        if self._ahead and rank in self._ahead:
            number, agreed_ns = self._ahead.pop(rank)
        else:
            number = self.decide(rank, now_ns)
            if number == NO_TASK:
                deadline_ns = self.leaders[rank].deadline_ns
                if deadline_ns != NEVER:
                    self._deadline_ns[rank] = deadline_ns
                    self.push(deadline_ns, WAIT_ENDS, rank, 0, 0)
                self._idle_followers(rank, now_ns)
                return
            agreed_ns = now_ns + self._agreement_ns
            self._log_round(rank, now_ns, agreed_ns, number)
        if agreed_ns > now_ns and self.log is not None:
            self.log.waited(rank, 0, Waited(Cause.COORDINATION, now_ns, agreed_ns))
            # The followers have the task's input, too, and wait for the decision.
            self._idle_followers(rank, now_ns)
        self._is_busy[rank] = True
        start_ns = max(now_ns, agreed_ns + self._launch_ns)
        end_ns = self.run(rank, start_ns, number)
        if self._announcing is not None:
            self._deadline_ns[rank] = NEVER
            self._announce(self._announcing, rank, start_ns, end_ns, number)
        if self._launch_ns:
            self._decide_in_time(rank, start_ns, end_ns, number)
        elif self._agreement_ns:
            self.push(max(start_ns, end_ns - self._agreement_ns), DECIDES_AHEAD, rank, 0, number)

    def _decide_in_time(self, rank: int, start_ns: int, end_ns: int, number: int) -> None:
        """Record the launch of a task, and schedule the decision on the rank's next task while its
        device runs this one, unless that is due only at its end."""
        index, in_time = self.indices[rank], self._in_time[rank]
        row = number // index.num_microbatches
        kind, chunk = KINDS[index.kinds[row]], index.chunks[row]
        self._began_ns[rank] = start_ns
        in_time.launched(kind, chunk, self._launch_ns + self._agreement_ns)
        due_ns = in_time.due_ns(kind, chunk, start_ns)
        self._due_ns[rank] = NEVER
        if due_ns is not None and due_ns < end_ns:
            self._due_ns[rank] = due_ns
            self.push(due_ns, DECIDES_AHEAD, rank, 0, number)

    def _observe_run(self, rank: int, now_ns: int, number: int) -> None:
        """Record how long the device of a rank ran a task that ends now, for the times of later
        decisions."""
        index = self.indices[rank]
        row = number // index.num_microbatches
        taken_ns = now_ns - self._began_ns[rank]
        self._in_time[rank].ran(KINDS[index.kinds[row]], index.chunks[row], taken_ns)

    def _idle_followers(self, rank: int, now_ns: int) -> None:
        """Pass `ComputeIdle` to the followers of a rank's group, so that their waits are logged;
        nothing without a log."""
        # Without a log, `members` has no followers.
        for member in range(1, len(self.members[rank])):
            self.handle(rank, member, now_ns, IDLE)

    def _decide_ahead(self, rank: int, now_ns: int) -> None:
        """Let a rank that runs a task decide on the next one, if one may run, and keep it with the
        end of its round of agreement."""
        number = self.decide(rank, now_ns, is_idle=False)
        if number != NO_TASK:
            agreed_ns = now_ns + self._agreement_ns
            self._ahead[rank] = (number, agreed_ns)
            self._log_round(rank, now_ns, agreed_ns, number)

    def _log_round(self, rank: int, start_ns: int, end_ns: int, number: int) -> None:
        """Log a round of agreement on a task; nothing without a log or with one member."""
        if self.log is not None and self.conditions.num_members > 1:
            self.log.agreed(rank, start_ns, end_ns, self.indices[rank].task(number))

    def _announce(
        self, announcing: AnnouncementModel, rank: int, start_ns: int, end_ns: int, number: int
    ) -> None:
        """Announce the output of a task that starts to the rank that consumes it, if another rank
        does and the task's time can be expected. The announcement arrives after the time of the
        output's message."""
        index = self.indices[rank]
        expected_ns = announcing.expected_ns(rank, index.task(number), end_ns - start_ns)
        row, microbatch = divmod(number, index.num_microbatches)
        output_rank = index.output_rank[row]
        if output_rank == NO_RANK or expected_ns is None:
            return
        consumer = index.output_row[row] * index.num_microbatches + microbatch
        receiver = self.indices[output_rank].task(consumer)
        transfer = self.conditions.transfer
        hop_ns = 0 if transfer is None else transfer(rank, output_rank, receiver)
        # An announcement overtakes messages and takes as long as the output's message.
        announcing.announce(receiver, expected_ns)
        self.push(start_ns + hop_ns, ANNOUNCED, output_rank, 0, consumer)

    def _deliver_announcement(self, rank: int, now_ns: int, number: int) -> None:
        """Pass an announcement that arrives to the dispatcher of the rank's leader."""
        assert self._announcing is not None
        announced = self._announcing.receive(rank, self.indices[rank].task(number), now_ns)
        if self.log is None:
            self.leaders[rank].handle(now_ns, announced)
        else:
            self.handle(rank, 0, now_ns, announced)

    def _deliver_input(self, rank: int, member: int, now_ns: int, number: int) -> None:
        """Deliver the input of a task to a member, note its arrival at the leader for the
        announcements, and request a decision of its rank."""
        if self._announcing is not None and member == 0:
            self._announcing.arrived(rank, self.indices[rank].task(number), now_ns)
        self.deliver(rank, member, now_ns, number)
        self._request_decision(rank)

    def _send_output(self, rank: int, now_ns: int, number: int) -> None:
        """Send the output of a task that ends to the rank that consumes it, if that is another one,
        once the link is free. Each member's message is logged, and delivered at once if it takes no
        time, else scheduled."""
        index, conditions = self.indices[rank], self.conditions
        row = number // index.num_microbatches
        output_rank = index.output_rank[row]
        if output_rank == NO_RANK:
            return
        consumer = number + (index.output_row[row] - row) * index.num_microbatches
        start_ns = end_ns = now_ns
        if conditions.transfer is not None:
            link = rank, output_rank
            start_ns = max(now_ns, self._free_ns[link])
            receiver = self.indices[output_rank].task(consumer)
            end_ns = start_ns + conditions.transfer(rank, output_rank, receiver)
            self._free_ns[link] = end_ns
        for member in range(conditions.num_members):
            arrival_ns = end_ns
            if member and conditions.lateness is not None:
                # A member's own link stays in order too.
                end = rank, output_rank, member
                late_ns = conditions.lateness(member, self.indices[output_rank].task(consumer))
                arrival_ns = max(self._last_arrival_ns[end], end_ns + late_ns)
                self._last_arrival_ns[end] = arrival_ns
            if self.log is not None:
                task = self.indices[output_rank].task(consumer)
                self.log.passed(rank, output_rank, member, start_ns, arrival_ns, task)
            if arrival_ns == now_ns:
                # The message arrives now, before any rank decides, so it needs no event.
                self._deliver_input(output_rank, member, now_ns, consumer)
            else:
                self.push(arrival_ns, ARRIVED, output_rank, member, consumer)
