"""One pipeline's step in virtual time: a queue of events, and the runtime's own dispatchers.

Events are ordered by time, then priority. At one instant tasks end first, then messages arrive,
then free ranks decide, so that a decision takes everything that has arrived into account, as in the
runtime. Nothing depends on the machine.

What is simulated without a record goes by the numbers of tasks (`rrfp.schedule.ready_tracker`) and
asks dispatchers to `decide`, which leaves out what only records tell.
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
    """Nanoseconds of every task of a step, `[stage][microbatch]`.

    `input_gradient` and `weight_gradient` are the two parts of a backward; a whole one takes their
    sum.
    """

    forward: Sequence[Sequence[int]]
    input_gradient: Sequence[Sequence[int]]
    weight_gradient: Sequence[Sequence[int]]

    def by_kind(self, *, split: bool) -> dict[Kind, Sequence[Sequence[int]]]:
        """The times of F, B and W tasks, or of F and whole B ones."""
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
    """How long the message for a task takes from one pipeline rank to another, in ns."""

    def __call__(self, sender: int, receiver: int, task: Task) -> int: ...


class Stretch(Protocol):
    """How long a task really takes, which may depend on what its rank ran before and on when it
    starts. Called once per task, in the order in which a rank starts them."""

    def __call__(self, rank: int, start_ns: int, task: Task, time_ns: int) -> int: ...


class Lateness(Protocol):
    """How much later a message reaches this member than its group's first member, in ns."""

    def __call__(self, member: int, task: Task) -> int: ...


@dataclass(frozen=True, slots=True)
class StepConditions(Value):
    """Everything about one pipeline's step that dispatchers do not decide."""

    times: TaskTimes
    transfer: Transfer | None = None
    """None: messages take no time."""
    stretch: Stretch | None = None
    blocking: bool = False
    """A transfer starts when both ranks are there and blocks both, as in Megatron's own schedules.
    Otherwise messages travel while ranks compute, one at a time on a directed link, in order."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together and must agree (tensor parallelism)."""
    lateness: Lateness | None = None
    num_bytes: Sequence[int] = ()
    """Message sizes by microbatch, for the records; empty: 0."""
    sizes: ActivationSizes | None = None
    """What microbatches keep in memory, by stage; None: not known."""
    budgets: Sequence[int] = ()
    """Bounds in bytes, by pipeline rank, in the place of the policy's; empty: the policy's."""
    expected: TaskTimes | None = None
    """What ranks know of their tasks' times beforehand, if they announce when they will be done;
    None: only what their earlier tasks took."""
    launch_ns: int = 0
    """How long a rank's host takes to launch a task on its device, which decides just in time
    (`rrfp.schedule.punctuality`). 0: ranks decide when a task has ended."""
    launch_risk: float = RISK
    """What a rank risks by waiting with its decision (`JustInTime`)."""
    agreement_ns: int = 0
    """The time of a round of agreement. It is hidden if it is over before the task that runs
    meanwhile; otherwise the group waits."""


# The event loop.


ENDED: Final = 0
CAME: Final = 1
DECIDES_AHEAD: Final = 2
ANNOUNCED: Final = 3
WAIT_ENDS: Final = 4
"""What an event is, and its priority among those of one instant."""

IDLE = ComputeIdle()
AHEAD = DecideAhead()

_NUM_TOLD = 3
"""How many ranks an error names."""

# Compiled code finds these faster than a module's globals.
_pop: Final = heappop
_push: Final = heappush


@dataclass(frozen=True, slots=True)
class PipelineRun(Value):
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
    """The ranks of a step: what travelling and blocking transfers have in common."""

    deadlock: str
    """Why a step of this kind gets stuck, and what to do."""

    def __init__(
        self, shape: Shape, policy: Policy, world: StepConditions, log: Log | None
    ) -> None:
        self.shape = shape
        self.world = world
        self.log = log
        # Followers decide nothing, and without a log the causes of their waits are not needed.
        num_members = world.num_members if log is not None else 1
        self.members = [
            [self._dispatcher(policy, rank, member) for member in range(num_members)]
            for rank in range(shape.num_ranks)
        ]
        """The dispatchers of each rank, its leader's first."""
        self.leaders = [of_rank[0] for of_rank in self.members]
        self.indices = [task_index(shape, rank) for rank in range(shape.num_ranks)]
        # Future events, each packed into one integer: its time, what it is, its rank and member,
        # and the number of its task on that rank.
        self._events: list[int] = []
        self._member_shift = shape.num_tasks_of_a_rank.bit_length()
        self._rank_shift = self._member_shift + world.num_members.bit_length()
        self._what_shift = self._rank_shift + shape.num_ranks.bit_length()
        self._time_shift = self._what_shift + WAIT_ENDS.bit_length()
        self._number_bits = (1 << self._member_shift) - 1
        self._member_bits = (1 << self._rank_shift) - 1
        self._rank_bits = (1 << self._what_shift) - 1
        self._what_bits = (1 << self._time_shift) - 1
        self._num_left = shape.num_ranks * shape.num_tasks_of_a_rank
        self._ends_ns = [0] * shape.num_ranks
        self._busy_ns = [0] * shape.num_ranks
        self._times = world.times.by_kind(split=shape.splits_backward)
        self._times_ns = [self._times_of(index) for index in self.indices]
        # With a log: what each rank decided last.
        self._runs: list[RunTask | None] = [None] * shape.num_ranks

    def _dispatcher(self, policy: Policy, rank: int, member: int) -> Dispatcher:
        world, shape = self.world, self.shape
        sizes: ActivationSizes | None = None
        if world.sizes is not None:
            sizes = world.sizes.of(shape.stages_of(rank))
        group = Group(world.num_members, member == 0) if world.num_members > 1 else None
        budget = world.budgets[rank] if world.budgets else None
        return Dispatcher(shape, rank, policy, group, sizes=sizes, budget=budget)

    def _times_of(self, index: TaskIndex) -> list[int]:
        """The times of a rank's tasks, by number."""
        times = self._times
        times_ns: list[int] = []
        for kind, stage in zip(index.kinds, index.stages, strict=True):
            times_ns += times[KINDS[kind]][stage]
        return times_ns

    def push(self, time_ns: int, what: int, rank: int, member: int, number: int) -> None:
        """Add an event: what happens then to the task of this number."""
        _push(
            self._events,
            time_ns << self._time_shift
            | what << self._what_shift
            | rank << self._rank_shift
            | member << self._member_shift
            | number,
        )

    def next_ns(self) -> int:
        """The time of the next event; `NEVER` without one."""
        return self._events[0] >> self._time_shift if self._events else NEVER

    def take(self) -> tuple[int, int, int, int]:
        """Take the next event: what it is, and of which rank, member and task."""
        event = _pop(self._events)
        return (
            (event & self._what_bits) >> self._what_shift,
            (event & self._rank_bits) >> self._rank_shift,
            (event & self._member_bits) >> self._member_shift,
            event & self._number_bits,
        )

    def decide(self, rank: int, now_ns: int, *, is_idle: bool = True) -> int:
        """Let a rank decide; the number of the task to run next, or `NO_TASK`."""
        if self.log is None:
            return self.leaders[rank].decide(now_ns, is_idle=is_idle)
        run = self.handle(rank, 0, now_ns, IDLE if is_idle else AHEAD)
        self._runs[rank] = run
        return NO_TASK if run is None else self.indices[rank].number(run.task)

    def handle(self, rank: int, member: int, now_ns: int, stimulus: Stimulus) -> RunTask | None:
        """Pass a stimulus to a dispatcher and log what follows; return what it says to run now."""
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
        """Let every member of a rank run the task that it decided; return when it ends."""
        time_ns = self._times_ns[rank][number]
        if self.world.stretch is not None:
            task = self.indices[rank].task(number)
            time_ns = self.world.stretch(rank, start_ns, task, time_ns)
        end_ns = start_ns + time_ns
        self._num_left -= 1
        self._ends_ns[rank] = end_ns
        self._busy_ns[rank] += time_ns
        self.push(end_ns, ENDED, rank, 0, number)
        if self.log is not None:
            run = self._runs[rank]
            assert run is not None
            for member in range(1, self.world.num_members):
                self.handle(rank, member, start_ns, TaskAgreed(run.task))
            self.log.ran(rank, start_ns, end_ns, run)
        return end_ns

    def came(self, rank: int, member: int, now_ns: int, number: int) -> None:
        """The input of a task has arrived at a member: the member counts it, and so does its
        leader."""
        if self.log is None:
            self.leaders[rank].input_arrived(number, member)
            return
        task = self.indices[rank].task(number)
        self.handle(rank, 0, now_ns, InputArrived(task, member))
        if member:
            self.handle(rank, member, now_ns, InputArrived(task))

    def result(self) -> PipelineRun:
        """The outcome of the step; raises RrfpError if it got stuck before its end."""
        if self._num_left:
            firsts = [leader.unfinished()[:1] for leader in self.leaders]
            places = [f"rank {rank} at {left[0][0]}" for rank, left in enumerate(firsts) if left]
            more = f" and {len(places) - _NUM_TOLD} more" if len(places) > _NUM_TOLD else ""
            raise RrfpError(
                f"the step is stuck with {self._num_left} tasks left, "
                f"{', '.join(places[:_NUM_TOLD])}{more}: {self.deadlock}"
            )
        return PipelineRun(
            tuple(self._ends_ns),
            tuple(self._busy_ns),
            tuple([leader.peak_held for leader in self.leaders]),
            tuple([leader.peak_held_bytes for leader in self.leaders]),
        )
