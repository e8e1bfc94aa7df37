"""The executable specification of the dispatcher, which scans all tasks at every decision.

Its state is the tasks that have run and the inputs that have arrived at each member. It is written
from the method's definitions, not from the dispatcher, and has two uses: `Checked` compares a
dispatcher with it at every stimulus, and subclasses that break one rule are deliberately wrong.
"""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.dispatcher import Group
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import Alternation
from rrfp.schedule.policy import AgreementRule, Bytes, Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    Announced,
    Cause,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Instruction,
    Kind,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Wait,
    Waited,
)
from tests.properties.virtual_time import Decider

F, B, W = Kind.F, Kind.B, Kind.W


class NaiveDispatcher:
    """Takes the arguments of a `Dispatcher` and gives the instructions that it must give."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        policy: Policy,
        group: Group | None = None,
        *,
        sizes: ActivationSizes | None = None,
        budget: int | None = None,
    ) -> None:
        order = policy.order
        self.rank = rank
        self.sizes = sizes
        binds = policy.dispatch is Dispatch.READY and B in shape.kinds
        self.shape = shape
        self.hint = policy.hint
        self.limit = policy.limit if binds else None
        hold = policy.hold
        self.hold = None
        if binds and isinstance(hold, int | Fraction):
            self.hold = int(hold * shape.num_chunks)
        if budget is None and isinstance(hold, Bytes):
            budget = hold.num
        self.budget = budget if binds else None
        self.w = policy.w
        self.rule = policy.agreement
        self.group = group if group is not None else Group(1, leads=True)
        self.row = [] if order is None else list(order.rows[rank])
        self.is_fixed = policy.dispatch is Dispatch.FIXED
        self.unfinished = list(shape.tasks_of(rank))
        self.done: set[Task] = set()
        self.num_done: Counter[Kind] = Counter()
        self.arrived: list[set[Task]] = [
            set() for _ in range(self.group.num_members if self.group.leads else 1)
        ]
        self.announced: dict[Task, Announced] = {}
        self.round_is_half_done = False
        self.waiting: Waited | None = None
        mine = set(self.unfinished)
        self.local_inputs = {
            task: [needed for needed in shape.prerequisites(task) if needed in mine]
            for task in self.unfinished
        }
        self.awaits_message = {
            task
            for task in self.unfinished
            if len(self.local_inputs[task]) < len(shape.prerequisites(task))
        }

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        match stimulus:
            case InputArrived(task, member):
                self.arrived[member].add(task)
                return ()
            case Announced(task):
                self.announced.setdefault(task, stimulus)
                return ()
            case TaskAgreed(task):
                return (*self.end_wait(now_ns), self.run(task))
            case DecideAhead():
                choice = self.choice() if self.unfinished else None
                is_open = choice is None or self.awaited(now_ns, choice) is not None
                return () if choice is None or is_open else (self.run(choice),)
            case ComputeIdle():
                if not self.unfinished:
                    return (StepDone(),)
                choice = self.choice()
                if choice is None:
                    self.round_is_half_done = False
                    return self.wait(now_ns, Wait(self.cause()))
                awaited = self.awaited(now_ns, choice)
                if awaited is None:
                    return (*self.end_wait(now_ns), self.run(choice))
                cause = Cause.PATIENCE if self.done else Cause.WARMUP
                return self.wait(now_ns, Wait(cause, self.window(awaited)[1]))

    # Ready tasks and permitted tasks.

    def here(self, arrived: set[Task]) -> list[Task]:
        """The unfinished tasks whose inputs are all present, given the arrived ones."""
        return [
            task
            for task in self.unfinished
            if (task in arrived or task not in self.awaits_message)
            and self.done.issuperset(self.local_inputs[task])
        ]

    def permitted(self, arrived: set[Task]) -> list[Task]:
        """The tasks of `here` that no bound withholds."""
        here = self.here(arrived)
        if self.drains():
            next_one = self.next_of_smallest_microbatch()
            return [task for task in here if task.kind is W or task == next_one]
        return [task for task in here if self.permits(self.first_of_its_chunk(task, here))]

    def first_of_its_chunk(self, task: Task, here: list[Task]) -> Task:
        """The present forward that must run before this one in its chunk under a hold in bytes. In
        all other cases it is the task itself."""
        if task.kind is not F or self.budget is None:
            return task
        alike = [other for other in here if other.kind is F and other.stage == task.stage]
        rank_by = self.preference if isinstance(self.hint, Alternation) else self.place
        return min(alike, key=rank_by)

    def permits(self, task: Task) -> bool:
        if self.budget is not None and task.kind is F:
            return self.used() + self.size(task) <= self.budget - self.reserve(task.stage)
        if self.hold is not None and task.kind is F:
            slots_for_deeper_chunks = self.shape.num_chunks - 1 - self.shape.chunk_of(task.stage)
            return self.held() < self.hold - slots_for_deeper_chunks
        return task.kind is not F or not self.is_at_limit()

    def size(self, forward: Task) -> int:
        assert self.sizes is not None
        return self.sizes.activations[self.shape.chunk_of(forward.stage)][forward.microbatch]

    def used(self) -> int:
        """Activation bytes in memory: all from F until B, and the pending ones until W."""
        if self.sizes is None or B not in self.shape.kinds:
            return 0
        used = 0
        for task in self.done:
            if task.kind is not F or task._replace(kind=self.shape.kinds[-1]) in self.done:
                continue
            rows = self.sizes.activations
            if self.sizes.pending_w is not None and task._replace(kind=B) in self.done:
                rows = self.sizes.pending_w
            used += rows[self.shape.chunk_of(task.stage)][task.microbatch]
        return used

    def reserve(self, stage: int) -> int:
        """Bytes to reserve for the rank's deeper chunks: the largest unfinished forward of each."""
        return sum(
            max(
                (self.size(f) for f in self.unfinished if f.kind is F and f.stage == deeper),
                default=0,
            )
            for deeper in self.shape.stages_of(self.rank)
            if deeper > stage
        )

    def is_at_limit(self) -> bool:
        return self.limit is not None and self.depth() >= self.limit

    def drains(self) -> bool:
        return self.is_at_limit() and self.shape.num_chunks > 1

    def depth(self) -> int:
        return self.num_done[F] - self.num_done[B]

    def held(self) -> int:
        if B not in self.shape.kinds:
            return 0
        return self.num_done[F] - self.num_done[W if self.shape.splits_backward else B]

    def next_of_smallest_microbatch(self) -> Task:
        """The next task of the smallest microbatch with an F or B left, in order F0 F1 .. B1 B0."""

        def place(task: Task) -> tuple[int, bool, int]:
            chunk = self.shape.chunk_of(task.stage)
            return (task.microbatch, task.kind is B, chunk if task.kind is F else -chunk)

        return min((task for task in self.unfinished if task.kind is not W), key=place)

    # The choice of the next task.

    def choice(self) -> Task | None:
        if not self.group.leads:
            return None
        if self.rule is AgreementRule.INTERSECTION:
            return self.first_pick(set.intersection(*self.arrived))
        first_picks = {self.first_pick(arrived) for arrived in self.arrived}
        return first_picks.pop() if len(first_picks) == 1 else None

    def first_pick(self, arrived: set[Task]) -> Task | None:
        candidates = self.permitted(arrived)
        if self.is_fixed:
            return self.best_unfinished() if self.best_unfinished() in candidates else None
        if isinstance(self.hint, Alternation):
            for kind in self.kinds_in_sequence(self.hint):
                of_kind = [task for task in candidates if task.kind is kind]
                if of_kind:
                    return min(of_kind, key=self.preference)
            return None
        return min(candidates, key=self.place, default=None)

    # Announced tasks.

    def awaited(self, now_ns: int, choice: Task) -> Task | None:
        """The announced task to wait for instead of `choice`: the best of those that would be
        chosen now if their input had arrived. Only the leader of a group calls it."""
        if self.is_fixed or self.fills_idle_time(choice):
            return None
        arrived = self.arrived_by_rule()
        soon = set()
        for task in self.announced:
            from_ns, until_ns = self.window(task)
            is_due = from_ns <= now_ns < until_ns and task not in arrived
            if is_due and self.first_pick(arrived | {task}) == task:
                soon.add(task)
        return self.first_pick(arrived | soon) if soon else None

    def fills_idle_time(self, task: Task) -> bool:
        """True for a weight gradient that runs only in idle time."""
        is_ranked = self.w is WeightGradients.RANKED and not self.drains()
        return task.kind is W and not is_ranked

    def arrived_by_rule(self) -> set[Task]:
        """The arrived inputs that count: those at all members (intersection), or at the leader."""
        if self.rule is AgreementRule.INTERSECTION:
            return set.intersection(*self.arrived)
        return self.arrived[0]

    def window(self, task: Task) -> tuple[int, int]:
        """The times in ns from which and until which a rank waits for the task."""
        _, expected_ns, patience_ns = self.announced[task]
        return expected_ns - patience_ns, expected_ns + patience_ns

    def kinds_in_sequence(self, hint: Alternation) -> Iterable[Kind]:
        first, second = (F, B) if hint.first is F else (B, F)
        return (second, first, W) if self.round_is_half_done else (first, second, W)

    def preference(self, task: Task) -> tuple[int, int]:
        """Sort key within a kind: shallow chunks first for forwards, unless the hint is deep; deep
        chunks first for other kinds."""
        assert isinstance(self.hint, Alternation)
        chunk = self.shape.chunk_of(task.stage)
        shallow = task.kind is F and not self.hint.deep
        return (chunk if shallow else -chunk, task.microbatch)

    def place(self, task: Task) -> tuple[bool, int]:
        """Sort key in an order: the position. Weight gradients are last if they run in idle time,
        or while the rank finishes microbatches one by one."""
        is_last = task.kind is W and (self.w is WeightGradients.IDLE or self.drains())
        return (is_last, self.row.index(task))

    def run(self, task: Task) -> RunTask:
        # A follower counts tasks that are ready on itself, a leader those ready at all members.
        kinds = [each.kind for each in self.permitted(set.intersection(*self.arrived))]
        position = skipped = -1
        if self.row:
            position = self.row.index(task)
            skipped = sum(each not in self.done for each in self.row[:position])
        self.unfinished.remove(task)
        self.done.add(task)
        self.num_done[task.kind] += 1
        hint = self.hint
        self.round_is_half_done = (
            isinstance(hint, Alternation) and hint.in_rounds and task.kind is hint.first
        )
        return RunTask(
            task,
            self.shape.chunk_of(task.stage),
            position,
            len(kinds),
            skipped,
            self.depth(),
            self.held(),
            kinds.count(F),
            kinds.count(B),
            self.used(),
        )

    # Waits.

    def wait(self, now_ns: int, wait: Wait) -> tuple[Instruction, ...]:
        if self.waiting is not None and self.waiting.cause is wait.cause:
            return (wait,)
        ended = self.end_wait(now_ns)
        self.waiting = Waited(wait.cause, now_ns, now_ns)
        return (*ended, wait)

    def end_wait(self, now_ns: int) -> tuple[Instruction, ...]:
        ended = () if self.waiting is None else (self.waiting._replace(end_ns=now_ns),)
        self.waiting = None
        return ended

    def cause(self) -> Cause:
        if not self.done:
            return Cause.WARMUP
        here = self.here(self.arrived[0])
        if self.is_fixed:
            if self.best_unfinished() in here:
                return Cause.COORDINATION
            if here:
                return Cause.ORDER
        elif self.permitted(self.arrived[0]):
            return Cause.COORDINATION
        elif here:
            return Cause.LIMIT if self.hold is None and self.budget is None else Cause.HOLD
        best = self.best_unfinished()
        forward = Task(best.stage, F, best.microbatch)
        return Cause.BACKWARD_INPUT if forward in self.done else Cause.FORWARD_INPUT

    def best_unfinished(self) -> Task:
        """The first unfinished task of the hint's order, or without one, of the rank's tasks."""
        return next(task for task in self.row or self.unfinished if task not in self.done)


class Checked:
    """A dispatcher that is compared with its specification at every stimulus."""

    def __init__(self, dispatcher: Decider, specification: Decider) -> None:
        self._dispatcher = dispatcher
        self._specification = specification

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        answer = self._dispatcher.handle(now_ns, stimulus)
        expected = self._specification.handle(now_ns, stimulus)
        assert answer == expected, f"{stimulus} at {now_ns}: {answer}, not {expected}"
        return answer
