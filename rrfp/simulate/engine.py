"""One pipeline's step in virtual time: a queue of events, and the runtime's own dispatchers.

Events are ordered by time, then priority. At one instant tasks end first, then messages arrive,
then free ranks decide, so that a decision takes everything that has arrived into account, as in the
runtime. The result does not depend on the machine.

A simulation without a log identifies tasks by numbers (`rrfp.schedule.ready_tracker`) and calls
`Dispatcher.decide`, which skips everything that only records need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Protocol

from rrfp.errors import RrfpError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.policy import Policy
from rrfp.schedule.punctuality import NEVER, RISK
from rrfp.schedule.ready_tracker import KINDS, NO_TASK, TaskIndex, task_index
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Kind,
    RunTask,
    Stimulus,
    Task,
    TaskAgreed,
    Value,
    Waited,
)

# Everything about a simulated step that dispatchers do not decide: how long tasks and messages
# take, and what delays them. All times are whole nanoseconds, so that sums are exact and the same
# on every machine.


@dataclass(frozen=True, slots=True)
class TaskTimes(Value):
    """The times of the tasks of a step in ns, `[stage][microbatch]`.

    `input_gradient` and `weight_gradient` are the two parts of a backward. A whole backward takes
    their sum.
    """

    forward: Sequence[Sequence[int]]
    input_gradient: Sequence[Sequence[int]]
    weight_gradient: Sequence[Sequence[int]]

    def by_kind(self, *, split: bool) -> dict[Kind, Sequence[Sequence[int]]]:
        """Return the times by kind: of F, B and W if `split`, else of F and of B with W added."""
        if split:
            return {
                Kind.F: self.forward,
                Kind.B: self.input_gradient,
                Kind.W: self.weight_gradient,
            }
        whole = [
            [b + w for b, w in zip(*rows, strict=True)]
            for rows in zip(self.input_gradient, self.weight_gradient, strict=True)
        ]
        return {Kind.F: self.forward, Kind.B: whole}


class Transfer(Protocol):
    """Returns the time of the message for a task from one pipeline rank to another, in ns."""

    def __call__(self, sender: int, receiver: int, task: Task, /) -> int: ...


class Stretch(Protocol):
    """Returns the real time of a task in ns, given its nominal time. The result may depend on the
    earlier tasks of its rank and on its start. Called once per task, in the order in which a rank
    starts them."""

    def __call__(self, rank: int, start_ns: int, task: Task, time_ns: int, /) -> int: ...


class Lateness(Protocol):
    """Returns the delay with which a message reaches this member, after its group's first member,
    in ns."""

    def __call__(self, member: int, task: Task, /) -> int: ...


@dataclass(frozen=True, slots=True)
class StepConditions(Value):
    """The inputs of one pipeline's step that dispatchers do not decide."""

    times: TaskTimes
    transfer: Transfer | None = None
    """None: messages take no time."""
    stretch: Stretch | None = None
    blocking: bool = False
    """Whether a transfer starts when both ranks are ready and blocks both, as in Megatron's own
    schedules. Otherwise messages travel while ranks compute, one at a time on a directed link, in
    order."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together and must agree (tensor parallelism)."""
    lateness: Lateness | None = None
    num_bytes: Sequence[int] = ()
    """Message sizes by microbatch, for the records; empty: 0."""
    sizes: ActivationSizes | None = None
    """The activation sizes by stage; None if not known."""
    budgets: Sequence[int] = ()
    """Bounds in bytes by pipeline rank, which replace the policy's; empty: the policy's holds."""
    expected: TaskTimes | None = None
    """The task times that ranks expect, and announce the ends of tasks by. None: they expect the
    mean of their earlier tasks."""
    launch_ns: int = 0
    """The time of launching a task on a device. If above 0, a rank decides just before the running
    task ends (`JustInTime`), else when it has ended."""
    launch_risk: float = RISK
    """The `risk` of `JustInTime`."""
    agreement_ns: int = 0
    """The time of a round of agreement. The group waits only for the part that the running task
    does not hide."""


# The event loop.


ENDED: Final = 0
ARRIVED: Final = 1
DECIDES_AHEAD: Final = 2
ANNOUNCED: Final = 3
WAIT_ENDS: Final = 4
"""The types of events, which are also their priorities at one instant, the smallest first."""

IDLE = ComputeIdle()
AHEAD = DecideAhead()

_NUM_LISTED = 3
"""The number of ranks that an error names."""

# Compiled code finds these faster than a module's globals.
_pop: Final = heappop
_push: Final = heappush


@dataclass(frozen=True, slots=True)
class PipelineRun(Value):
    """The outcome of one pipeline's step, by pipeline rank."""

    ends_ns: tuple[int, ...]
    """The end of the last task, since the start of the step."""
    busy_ns: tuple[int, ...]
    """Time in F, B and W."""
    peak_held: tuple[int, ...]
    """The most activations held, in slots of one chunk and one microbatch."""
    peak_held_bytes: tuple[int, ...]
    """The most bytes of activations held; zeros if sizes are not known."""

    @property
    def makespan_ns(self) -> int:
        return max(self.ends_ns)


class Log(Protocol):
    """Receives the events on every member of every pipeline rank."""

    def took_in(self, rank: int, member: int, now_ns: int, stimulus: Stimulus) -> None:
        """Receive a stimulus that a member's dispatcher has processed."""

    def waited(self, rank: int, member: int, waited: Waited) -> None:
        """Receive an idle interval of a member that has ended."""

    def ran(self, rank: int, start_ns: int, end_ns: int, run: RunTask) -> None:
        """Receive a task that every member of a rank runs, when it starts."""

    def agreed(self, rank: int, start_ns: int, end_ns: int, task: Task) -> None:
        """Receive a round in which a group agreed on its next task, perhaps while another one
        ran."""

    def passed(
        self, sender: int, receiver: int, member: int, start_ns: int, end_ns: int, task: Task
    ) -> None:
        """Receive the message for a task, from a member of one rank to that member of another."""


class Step:
    """The state of a simulated step, with dispatchers and events: the base of both kinds of
    transfers."""

    deadlock: str
    """The cause of a deadlock and its remedy, for errors."""

    def __init__(
        self, shape: Shape, policy: Policy, conditions: StepConditions, log: Log | None
    ) -> None:
        self.shape = shape
        self.conditions = conditions
        self.log = log
        # Followers decide nothing. Only a log needs the causes of their waits.
        num_members = conditions.num_members if log is not None else 1
        self.members = [
            [self._dispatcher(policy, rank, member) for member in range(num_members)]
            for rank in range(shape.num_ranks)
        ]
        """The dispatchers of each rank, its leader's first."""
        self.leaders = [of_rank[0] for of_rank in self.members]
        self.indices = [task_index(shape, rank) for rank in range(shape.num_ranks)]
        # Future events, each packed into one integer: time, type, rank, member, and the number of
        # the task on that rank.
        self._events: list[int] = []
        self._member_shift = shape.num_tasks_of_a_rank.bit_length()
        self._rank_shift = self._member_shift + conditions.num_members.bit_length()
        self._what_shift = self._rank_shift + shape.num_ranks.bit_length()
        self._time_shift = self._what_shift + WAIT_ENDS.bit_length()
        self._number_bits = (1 << self._member_shift) - 1
        self._member_bits = (1 << self._rank_shift) - 1
        self._rank_bits = (1 << self._what_shift) - 1
        self._what_bits = (1 << self._time_shift) - 1
        self._num_left = shape.num_ranks * shape.num_tasks_of_a_rank
        self._ends_ns = [0] * shape.num_ranks
        self._busy_ns = [0] * shape.num_ranks
        self._times = conditions.times.by_kind(split=shape.splits_backward)
        self._times_ns = [self._times_of(index) for index in self.indices]
        # With a log: the last decision of each rank.
        self._runs: list[RunTask | None] = [None] * shape.num_ranks

    def _dispatcher(self, policy: Policy, rank: int, member: int) -> Dispatcher:
        """Make the dispatcher of a member of a rank, with the activation sizes and the budget of
        that rank; the first of several members leads the group."""
        conditions, shape = self.conditions, self.shape
        sizes: ActivationSizes | None = None
        if conditions.sizes is not None:
            sizes = conditions.sizes.of(shape.stages_of(rank))
        group = Group(conditions.num_members, member == 0) if conditions.num_members > 1 else None
        budget = conditions.budgets[rank] if conditions.budgets else None
        return Dispatcher(shape, rank, policy, group, sizes=sizes, budget=budget)

    def _times_of(self, index: TaskIndex) -> list[int]:
        """Return the nominal times of a rank's tasks in ns, by task number."""
        times = self._times
        times_ns: list[int] = []
        for kind, stage in zip(index.kinds, index.stages, strict=True):
            times_ns += times[KINDS[kind]][stage]
        return times_ns

    def push(self, time_ns: int, what: int, rank: int, member: int, number: int) -> None:
        """Schedule an event of type `what` for the task `number`, at a time in ns."""
        _push(
            self._events,
            time_ns << self._time_shift
            | what << self._what_shift
            | rank << self._rank_shift
            | member << self._member_shift
            | number,
        )

    def next_ns(self) -> int:
        """Return the time of the next event without removing it; `NEVER` without one."""
        return self._events[0] >> self._time_shift if self._events else NEVER

    def pop(self) -> tuple[int, int, int, int]:
        """Remove the next event, by time and then by type; return its type, rank, member and task
        number."""
        event = _pop(self._events)
        return (
            (event & self._what_bits) >> self._what_shift,
            (event & self._rank_bits) >> self._rank_shift,
            (event & self._member_bits) >> self._member_shift,
            event & self._number_bits,
        )

    def decide(self, rank: int, now_ns: int, *, is_idle: bool = True) -> int:
        """Let a rank's leader choose and dispatch its next task; return its number, or `NO_TASK`.
        With a log, the stimulus is logged and the decision kept for `run`."""
        if self.log is None:
            return self.leaders[rank].decide(now_ns, is_idle=is_idle)
        run = self.handle(rank, 0, now_ns, IDLE if is_idle else AHEAD)
        self._runs[rank] = run
        return NO_TASK if run is None else self.indices[rank].number(run.task)

    def handle(self, rank: int, member: int, now_ns: int, stimulus: Stimulus) -> RunTask | None:
        """Pass a stimulus to a member's dispatcher, log the stimulus and the end of a wait, and
        return the decision to run a task, if any. Only for steps with a log."""
        assert self.log is not None
        instructions = self.members[rank][member].handle(now_ns, stimulus)
        self.log.took_in(rank, member, now_ns, stimulus)
        for instruction in instructions:
            if isinstance(instruction, Waited):
                self.log.waited(rank, member, instruction)
            elif isinstance(instruction, RunTask):
                return instruction
        return None

    def run(self, rank: int, start_ns: int, number: int) -> int:
        """Start the decided task on every member of a rank: stretch its time, count it and schedule
        its end. With a log, the followers take in `TaskAgreed`, and the task is logged. Return the
        end in ns."""
        time_ns = self._times_ns[rank][number]
        if self.conditions.stretch is not None:
            task = self.indices[rank].task(number)
            time_ns = self.conditions.stretch(rank, start_ns, task, time_ns)
        end_ns = start_ns + time_ns
        self._num_left -= 1
        self._ends_ns[rank] = end_ns
        self._busy_ns[rank] += time_ns
        self.push(end_ns, ENDED, rank, 0, number)
        if self.log is not None:
            run = self._runs[rank]
            assert run is not None
            for member in range(1, self.conditions.num_members):
                self.handle(rank, member, start_ns, TaskAgreed(run.task))
            self.log.ran(rank, start_ns, end_ns, run)
        return end_ns

    def deliver(self, rank: int, member: int, now_ns: int, number: int) -> None:
        """Deliver the input of a task to a member: with a log, the leader and that member count it;
        without one, the leader alone."""
        if self.log is None:
            self.leaders[rank].input_arrived(number, member)
            return
        task = self.indices[rank].task(number)
        self.handle(rank, 0, now_ns, InputArrived(task, member))
        if member:
            self.handle(rank, member, now_ns, InputArrived(task))

    def result(self) -> PipelineRun:
        """Return the outcome of the step. Raises RrfpError if tasks are left, which means a
        deadlock; it names up to 3 ranks, each with its first task left."""
        if self._num_left:
            firsts = [leader.unfinished()[:1] for leader in self.leaders]
            places = [f"rank {rank} at {left[0][0]}" for rank, left in enumerate(firsts) if left]
            more = f" and {len(places) - _NUM_LISTED} more" if len(places) > _NUM_LISTED else ""
            raise RrfpError(
                f"the step is stuck with {self._num_left} tasks left, "
                f"{', '.join(places[:_NUM_LISTED])}{more}: {self.deadlock}"
            )
        return PipelineRun(
            tuple(self._ends_ns),
            tuple(self._busy_ns),
            tuple([leader.peak_held for leader in self.leaders]),
            tuple([leader.peak_held_bytes for leader in self.leaders]),
        )
