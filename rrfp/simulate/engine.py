"""One pipeline's step in virtual time: a queue of events, and the runtime's own dispatchers.

Events are ordered by (time, priority, counter). At one instant tasks end first, then messages
arrive, then free ranks decide, so that a decision takes everything that has arrived into account,
as in the runtime. Nothing depends on the machine.

The members of a group (tensor parallelism) run each task together, because it contains collectives;
only their messages arrive at different times. The leader's dispatcher counts them all. It decides
on the next task while one runs, just early enough for the round of agreement to be over when that
task ends. If nothing was ready by then, the group waits for a decision and its round.

Here messages travel while ranks compute, one at a time on a directed link, in the order in which
they were sent. `rrfp.simulate.blocking` models transfers that block.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Protocol

from rrfp.errors import RrfpError
from rrfp.schedule.causes import Cause
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.instructions import RunTask, Wait, Waited
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.stimuli import ComputeIdle, DecideAhead, InputArrived, Stimulus, TaskAgreed
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.announcing import Announcing
from rrfp.simulate.world import World

ENDED, CAME, DECIDES_AHEAD, ANNOUNCED, LOSES_PATIENCE = range(5)
"""What an event is, and its priority among those of one instant."""

Event = tuple[int, int, int, Task]
"""What happens; to which rank, member and task."""
_PRIORITY = itemgetter(0)

IDLE = ComputeIdle()
_NO_TASK = Task(-1, Kind.F, -1)
"""Of an event that concerns none."""

_NUM_TOLD = 3
"""How many ranks an error names."""


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The outcome of one pipeline's step, by pipeline rank."""

    ends_ns: tuple[int, ...]
    """When its last task ended, since the start of the step."""
    busy_ns: tuple[int, ...]
    """Time in F, B and W."""
    peak_held: tuple[int, ...]
    """The most activations held, in slots of one chunk and one microbatch."""
    peak_held_bytes: tuple[int, ...]
    """The most bytes of activations held; zeros where sizes are not known."""

    @property
    def makespan_ns(self) -> int:
        return max(self.ends_ns)


class Log(Protocol):
    """Keeps what happens on every member of every pipeline rank."""

    def took_in(self, rank: int, member: int, now_ns: int, stimulus: Stimulus) -> None: ...

    def waited(self, rank: int, member: int, waited: Waited) -> None: ...

    def ran(self, rank: int, start_ns: int, end_ns: int, run: RunTask) -> None:
        """Every member of a rank ran a task."""

    def agreed(self, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
        """A group's round on a task; another task may run meanwhile."""

    def passed(
        self, sender: int, receiver: int, member: int, start_ns: int, end_ns: int, task: Task
    ) -> None:
        """The message for a task passed from a member of one rank to that member of another."""


class Step:
    """The ranks of a step: what asynchronous and blocking transfers have in common."""

    deadlock: str
    """Why a step of this kind gets stuck, and what to do."""

    def __init__(self, shape: Shape, policy: Policy, world: World, log: Log | None) -> None:
        self.shape = shape
        self.world = world
        self.log = log
        # Future events by time, each list in order of creation; and a heap of those times.
        self._events: dict[int, list[Event]] = {}
        self._times_ns: list[int] = []
        # Followers decide nothing, and without a log the causes of their waits are not needed.
        num_members = world.num_members if log is not None else 1
        self.members: list[list[Dispatcher]] = [
            [
                Dispatcher(
                    *(shape, rank, policy, self._group(each)),
                    sizes=self._sizes(rank),
                    budget=world.budgets[rank] if world.budgets else None,
                )
                for each in range(num_members)
            ]
            for rank in range(shape.num_ranks)
        ]
        """The dispatchers of each rank, its leader's first."""
        self._num_left = shape.num_ranks * shape.num_tasks_of_a_rank
        self._ends_ns = [0] * shape.num_ranks
        self._busy_ns = [0] * shape.num_ranks
        times = world.times.by_kind(split=shape.splits_backward)
        self._forward_ns, self._backward_ns = times[Kind.F], times[Kind.B]
        self._weight_gradient_ns = times.get(Kind.W, ())

    def _sizes(self, rank: int) -> Sizes | None:
        sizes = self.world.sizes
        return None if sizes is None else sizes.of(self.shape.stages_of(rank))

    def _group(self, member: int) -> Group | None:
        num_members = self.world.num_members
        return Group(num_members, member == 0) if num_members > 1 else None

    def push(self, time_ns: int, what: int, rank: int, member: int, task: Task) -> None:
        events = self._events.get(time_ns)
        if events is None:
            heappush(self._times_ns, time_ns)
            self._events[time_ns] = [(what, rank, member, task)]
        else:
            events.append((what, rank, member, task))

    def has_events(self) -> bool:
        """Whether any event is left."""
        return bool(self._times_ns)

    def take(self) -> tuple[int, list[Event]]:
        """The next time and its events, ordered by priority, then counter."""
        now_ns = heappop(self._times_ns)
        events = self._events.pop(now_ns)
        if len(events) > 1:
            events.sort(key=_PRIORITY)
        return now_ns, events

    def handle(
        self, rank: int, member: int, now_ns: int, stimulus: Stimulus
    ) -> RunTask | Wait | None:
        """Pass a stimulus to a dispatcher; return what to do now, if it says so."""
        instructions = self.members[rank][member].handle(now_ns, stimulus)
        if self.log is not None:
            self.log.took_in(rank, member, now_ns, stimulus)
            for instruction in instructions:
                if type(instruction) is Waited:
                    self.log.waited(rank, member, instruction)
        if instructions:
            last = instructions[-1]
            if type(last) is RunTask or type(last) is Wait:
                return last
        return None

    def run(self, rank: int, start_ns: int, run: RunTask) -> int:
        """Let every member of a rank run a task; return when it ends."""
        task = run.task
        stage, kind, microbatch = task
        if kind is Kind.F:
            time_ns = self._forward_ns[stage][microbatch]
        elif kind is Kind.B:
            time_ns = self._backward_ns[stage][microbatch]
        else:
            time_ns = self._weight_gradient_ns[stage][microbatch]
        if self.world.stretch is not None:
            time_ns = self.world.stretch(rank, start_ns, task, time_ns)
        end_ns = start_ns + time_ns
        self._num_left -= 1
        self._ends_ns[rank] = end_ns
        self._busy_ns[rank] += time_ns
        self.push(end_ns, ENDED, rank, 0, task)
        if self.log is not None:
            for member in range(1, self.world.num_members):
                self.handle(rank, member, start_ns, TaskAgreed(task))
            self.log.ran(rank, start_ns, end_ns, run)
        return end_ns

    def came(self, rank: int, member: int, now_ns: int, task: Task) -> None:
        """The input of a task has arrived at a member: the member counts it, and so does its
        leader."""
        arrived = InputArrived(task, member)
        if self.log is None:
            # An arrival has no instructions as its answer.
            self.members[rank][0].handle(now_ns, arrived)
            return
        self.handle(rank, 0, now_ns, arrived)
        if member:
            self.handle(rank, member, now_ns, InputArrived(task))

    def result(self) -> PipelineRun:
        """The outcome of the step; raises RrfpError if it got stuck before its end."""
        if self._num_left:
            firsts = [of_rank[0].unfinished()[:1] for of_rank in self.members]
            places = [f"rank {rank} at {left[0][0]}" for rank, left in enumerate(firsts) if left]
            more = f" and {len(places) - _NUM_TOLD} more" if len(places) > _NUM_TOLD else ""
            raise RrfpError(
                f"the step is stuck with {self._num_left} tasks left, "
                f"{', '.join(places[:_NUM_TOLD])}{more}: {self.deadlock}"
            )
        return PipelineRun(
            tuple(self._ends_ns),
            tuple(self._busy_ns),
            tuple(of_rank[0].peak_held for of_rank in self.members),
            tuple(of_rank[0].peak_held_bytes for of_rank in self.members),
        )


class AsyncStep(Step):
    """A step whose messages travel while ranks compute."""

    deadlock = "its order deadlocks as a binding one; reorder it or choose --dispatch ready"

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        world: World,
        log: Log | None,
        announcing: Announcing | None = None,
    ) -> None:
        """With `announcing`, ranks tell each other when to expect their output."""
        super().__init__(shape, policy, world, log)
        self._agreement_ns = world.agreement_ns if world.num_members > 1 else 0
        self._is_busy = [False] * shape.num_ranks
        self._to_decide = set(range(shape.num_ranks))
        # By group: its next task, decided ahead, and when that round is over.
        self._ahead: dict[int, tuple[RunTask, int]] = {}
        self._receives = dict(_receiving_stages(shape))
        self._announcing = announcing
        # By rank: when it decides anew at the latest, although nothing came.
        self._deadline_ns: list[int | None] = [None] * shape.num_ranks
        self._link_free_ns: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._last_came_ns: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def play(self) -> PipelineRun:
        now_ns = 0
        while True:
            for rank in sorted(self._to_decide):
                if not self._is_busy[rank]:
                    self._decide(rank, now_ns)
            self._to_decide.clear()
            if not self.has_events():
                return self.result()
            now_ns, events = self.take()
            for what, rank, member, task in events:
                if what == ENDED:
                    self._is_busy[rank] = False
                    self._to_decide.add(rank)
                    self._send_output(rank, now_ns, task)
                elif what == CAME:
                    if self._announcing is not None and member == 0:
                        self._announcing.arrived(rank, task, now_ns)
                    self.came(rank, member, now_ns, task)
                    self._to_decide.add(rank)
                elif what == DECIDES_AHEAD:
                    self._decide_ahead(rank, now_ns)
                elif what == ANNOUNCED:
                    assert self._announcing is not None
                    self.handle(rank, 0, now_ns, self._announcing.heard(rank, task, now_ns))
                elif self._deadline_ns[rank] == now_ns:
                    self._to_decide.add(rank)

    def _decide(self, rank: int, now_ns: int) -> None:
        """Let a free rank begin a task, if one may run."""
        if rank in self._ahead:
            run, agreed_ns = self._ahead.pop(rank)
            start_ns = max(now_ns, agreed_ns)
        else:
            decided = self.handle(rank, 0, now_ns, IDLE)
            if type(decided) is not RunTask:
                if type(decided) is Wait and decided.deadline_ns is not None:
                    self._deadline_ns[rank] = decided.deadline_ns
                    self.push(decided.deadline_ns, LOSES_PATIENCE, rank, 0, _NO_TASK)
                if self.log is not None:
                    self._idle_followers(rank, now_ns)
                return
            run = decided
            start_ns = now_ns + self._agreement_ns
            if self.log is not None:
                self._log_round(self.log, rank, now_ns, start_ns, run.task)
        if self.log is not None and start_ns > now_ns:
            self.log.waited(rank, 0, Waited(Cause.COORDINATION, now_ns, start_ns))
            # The followers have the task's input too, and wait for the decision.
            self._idle_followers(rank, now_ns)
        self._is_busy[rank] = True
        end_ns = self.run(rank, start_ns, run)
        if self._announcing is not None:
            self._deadline_ns[rank] = None
            self._announce(rank, start_ns, end_ns, run.task)
        if self._agreement_ns:
            ahead_ns = max(start_ns, end_ns - self._agreement_ns)
            self.push(ahead_ns, DECIDES_AHEAD, rank, 0, run.task)

    def _idle_followers(self, rank: int, now_ns: int) -> None:
        for member in range(1, len(self.members[rank])):
            self.handle(rank, member, now_ns, IDLE)

    def _decide_ahead(self, rank: int, now_ns: int) -> None:
        run = self.handle(rank, 0, now_ns, DecideAhead())
        if type(run) is RunTask:
            agreed_ns = now_ns + self._agreement_ns
            self._ahead[rank] = (run, agreed_ns)
            if self.log is not None:
                self._log_round(self.log, rank, now_ns, agreed_ns, run.task)

    def _log_round(self, log: Log, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
        if self.world.num_members > 1:
            log.agreed(rank, start_ns, end_ns, task)

    def _announce(self, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
        """Tell the rank of the task that takes this one's output when to expect it."""
        assert self._announcing is not None
        taking_ns = self._announcing.taking_ns(rank, task, end_ns - start_ns)
        receives = self._receives.get((task.stage, task.kind))
        if receives is None or taking_ns is None:
            return
        to_rank, to_stage = receives
        receiver = Task(to_stage, task.kind, task.microbatch)
        transfer = self.world.transfer
        hop_ns = 0 if transfer is None else transfer(rank, to_rank, receiver)
        # It overtakes messages and takes as long as one, so that its hop is the output's, too.
        self._announcing.announce(receiver, taking_ns)
        self.push(start_ns + hop_ns, ANNOUNCED, to_rank, 0, receiver)

    def _send_output(self, rank: int, now_ns: int, task: Task) -> None:
        """Deliver a task's output to the rank of the task that takes it."""
        stage, kind, microbatch = task
        receives = self._receives.get((stage, kind))
        if receives is None:
            return
        to_rank, to_stage = receives
        receiver = Task(to_stage, kind, microbatch)
        world = self.world
        start_ns = end_ns = now_ns
        if world.transfer is not None:
            link = rank, to_rank
            start_ns = max(now_ns, self._link_free_ns[link])
            end_ns = start_ns + world.transfer(rank, to_rank, receiver)
            self._link_free_ns[link] = end_ns
        for member in range(world.num_members):
            came_ns = end_ns
            if member and world.lateness is not None:
                # A member's own link stays in order too.
                end = rank, to_rank, member
                came_ns = max(self._last_came_ns[end], end_ns + world.lateness(member, receiver))
                self._last_came_ns[end] = came_ns
            if self.log is not None:
                self.log.passed(rank, to_rank, member, start_ns, came_ns, receiver)
            if came_ns == now_ns:
                # It arrives at this instant, before any rank decides, so it needs no event.
                if self._announcing is not None and member == 0:
                    self._announcing.arrived(to_rank, receiver, now_ns)
                self.came(to_rank, member, now_ns, receiver)
            else:
                self.push(came_ns, CAME, to_rank, member, receiver)
        self._to_decide.add(to_rank)


def _receiving_stages(shape: Shape) -> Iterator[tuple[tuple[int, Kind], tuple[int, int]]]:
    """By stage and kind that send messages: the rank and stage that take them."""
    for stage in range(shape.num_stages):
        for kind in shape.kinds:
            receiver = shape.receiver(Task(stage, kind, 0))
            link = None if receiver is None else shape.link(receiver)
            if receiver is not None and link is not None:
                yield (stage, kind), (link[1], receiver.stage)
