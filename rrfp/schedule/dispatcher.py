"""The dispatcher: the only place that decides which task a rank runs next.

Theory of operation. A dispatcher serves one pipeline rank for one step. `handle` takes one stimulus
and returns instructions; nothing else changes its state, and it reads no clock. (`input_arrived`
and `decide` do the same for simulations, by the numbers of tasks alone.)

- A task may lack earlier tasks of this rank and, where a neighboring rank sends its input, one
  arrival at each member of the rank's group. A task that lacks nothing is *ready*. Everything
  counts from dispatch, not from completion: earlier tasks, D, what is held, and the hint's round.
  That is sound because a rank runs its tasks one at a time, in the order of their dispatch, and it
  lets a group decide its next task while one runs (`DecideAhead`).
- `ready` dispatch: ready tasks wait in heaps keyed by the hint, which also says which kinds go
  first. A bound on memory may withhold some of them (`rrfp.schedule.bounds`).
- Patience: a rank may wait for a better task that another rank has announced, up to a deadline,
  although lesser ones are ready (`rrfp.schedule.punctuality`).
- `fixed` dispatch: the hint's order binds; the rank runs the next task of its row or waits for it.
- Groups: ranks that share a collective inside a task run the same sequence. The leader counts
  every member's arrivals and decides; the others follow its decisions (`TaskAgreed`). It picks the
  best task that is ready at every member or, by the paper's rule, the task that each member would
  pick by itself, if all pick the same.

An idle interval has one cause. When the cause changes during it, the interval is split.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.schedule.bounds import ActivationSizes, Bounds
from rrfp.schedule.hints import OrderProgress
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.punctuality import NEVER, Announcements
from rrfp.schedule.ready_tracker import KINDS, NO_TASK, ReadySet, ReadyTracker, heaps_by_tier
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    Announced,
    Cause,
    ComputeIdle,
    InputArrived,
    Instruction,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Value,
    Wait,
    Waited,
)

# The status of a dispatcher: what each task still lacks, and what withholds it.


_NUM_LISTED = 6
"""The number of tasks that the text lists. It counts the rest."""


class TaskStatus(NamedTuple):
    """The reason why a task has not been dispatched."""

    task: Task
    lacks: tuple[Task, ...]
    """The tasks whose output it still needs on this rank."""
    missing_members: int
    """The members of the group at which its input has yet to arrive (bit i: member i; bit 0: this
    rank)."""
    withheld_by: Cause | None
    """The cause that withholds it although all its inputs are here: a bound, the order, or the
    group's agreement. None if nothing does, or if an input is missing."""

    def __str__(self) -> str:
        if self.lacks:
            return f"{self.task} lacks {', '.join(map(str, self.lacks))}"
        if self.withheld_by is not None:
            return f"{self.task} is here, withheld by {self.withheld_by}"
        return f"{self.task} may run"


@dataclass(frozen=True, slots=True)
class DispatcherStatus(Value):
    """A snapshot of a dispatcher; `str` formats it as text."""

    rank: int
    """The pipeline rank."""
    depth: int
    """D: chunk-forwards minus chunk-backwards run."""
    held: int
    """Activations held, in slots of one chunk and one microbatch."""
    tasks: tuple[TaskStatus, ...]
    """The tasks not yet dispatched, by kind, chunk and microbatch."""
    best_waiting: TaskStatus | None
    """The hint's best task among those that lack an input on this rank."""
    recent: tuple[tuple[int, Stimulus], ...]
    """The last stimuli, each with its time in ns, the latest last."""

    @property
    def ready(self) -> tuple[TaskStatus, ...]:
        """The tasks with all inputs from this rank's own tasks and from arrivals here, tasks that
        something withholds included."""
        return tuple(each for each in self.tasks if not each.lacks)

    def __str__(self) -> str:
        """A line for each of the first tasks, ready ones first, then the last stimuli."""
        tasks = sorted(self.tasks, key=lambda each: bool(each.lacks))
        lines = [
            f"pipeline rank {self.rank} has {len(self.tasks)} tasks left, D {self.depth}, "
            f"{self.held} held"
        ]
        lines += [f"  {each}" for each in tasks[:_NUM_LISTED]]
        if len(tasks) > _NUM_LISTED:
            lines.append(f"  and {len(tasks) - _NUM_LISTED} more")
        lines.append("  it last took in")
        lines += [
            f"    {time_ns} ns: {_format_stimulus(stimulus)}" for time_ns, stimulus in self.recent
        ]
        return "\n".join(lines)


def _format_stimulus(stimulus: Stimulus) -> str:
    """Format a stimulus as its type's name and its fields, separated by spaces."""
    return " ".join([type(stimulus).__name__, *map(str, stimulus)])


_NUM_RECENT = 8
"""The number of the last stimuli that a status lists."""

_WAITS = {cause: Wait(cause) for cause in Cause}


@dataclass(frozen=True, slots=True)
class Group(Value):
    """A rank's role among the ranks that must run their tasks in one order."""

    num_members: int
    leads: bool


class DispatchError(RrfpError):
    """An impossible stimulus (an input that no task lacks, or an agreed task that cannot run), or
    an inconsistent state. The message is one sentence, with the dispatcher's status below it."""


class Dispatcher:
    """Decides what one pipeline rank runs next in one step."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        policy: Policy,
        group: Group | None = None,
        *,
        sizes: ActivationSizes | None = None,
        budget: int | None = None,
        validate: bool = False,
    ) -> None:
        """Start a step of `shape` on pipeline rank `rank`.

        The policy's bounds apply to `ready` dispatch in steps with backwards. Positions and
        deviations are counted against its order, which `fixed` dispatch requires. `sizes` are those
        of this rank's chunks; a hold in bytes requires them, and `budget` is this rank's own, in
        bytes, where ranks differ. `validate` checks the state after each stimulus, in time linear
        in the tasks of the step. Raises ValueError if the policy lacks an order or sizes that it
        needs, or has an order of another shape, and UsageError for a hold with which the rank could
        get stuck.
        """
        hint, order = policy.hint, policy.order
        if policy.dispatch is Dispatch.MEGATRON:
            raise ValueError("Megatron's own schedule has no dispatcher")
        if policy.dispatch is Dispatch.FIXED and order is None:
            raise ValueError("fixed dispatch needs the order that its hint gives")
        if order is not None and order.shape != shape:
            raise ValueError(f"order {order.name} is for {order.shape}, not for {shape}")
        self.shape = shape
        self.rank = rank
        self.policy = policy
        self._validates = validate
        self._recent: deque[tuple[int, Stimulus]] = deque(maxlen=_NUM_RECENT)
        self._fixed = policy.dispatch is Dispatch.FIXED
        self._follows = group is not None and not group.leads
        num_members = group.num_members if group is not None and group.leads else 1
        if self._fixed or self._follows:
            masks: list[int] = []  # It ranks nothing.
        elif policy.agreement is AgreementRule.UNANIMOUS:
            masks = [1 << member for member in range(num_members)]
        else:
            masks = [(1 << num_members) - 1]
        self._tracker = tracker = ReadyTracker(
            shape, rank, hint.keys(shape, rank), num_members, masks
        )
        self._bounds = Bounds(shape, policy, sizes, budget)
        self._announcements = Announcements(tracker, self._bounds)
        # Shorthands for lists of the tracker.
        self._unmet, self._missing = tracker.unmet, tracker.missing
        self._ready_sets = tracker.ready_sets
        self._windows = self._announcements.windows
        self._kinds, self._chunks = tracker.index.kinds, tracker.index.chunks
        self._order = (
            None
            if order is None
            else OrderProgress(order.numbers(rank), order.keys(shape, rank), tracker.unmet)
        )
        rounds = hint.rounds(policy.w)
        num_chunks = shape.num_chunks
        self._top_of_round = heaps_by_tier(rounds.tiers(), num_chunks)
        self._tiers = self._top_of_round
        self._tiers_after = [heaps_by_tier(rounds.tiers(kind), num_chunks) for kind in KINDS]
        self._weight_gradients = ((num_chunks + 1,),)
        self._waiting: tuple[Cause, int] | None = None
        self._first_unfinished = 0
        self.deadline_ns = NEVER
        """After a decision to run nothing: the time to ask again although nothing arrived, or
        `NEVER`."""

    def __repr__(self) -> str:
        policy, tracker = self.policy, self._tracker
        return (
            f"<Dispatcher of pipeline rank {self.rank}: {policy.hint.name} {policy.dispatch}, "
            f"{tracker.num_unfinished} of {tracker.num_tasks} tasks left>"
        )

    @property
    def depth(self) -> int:
        """D: chunk-forwards minus chunk-backwards dispatched so far."""
        return self._bounds.depth

    @property
    def held(self) -> int:
        """Activations held now, in slots of one chunk and one microbatch."""
        return self._bounds.held

    @property
    def peak_held(self) -> int:
        """The most activations held at once in this step, in slots of one chunk and one
        microbatch."""
        return self._bounds.peak_held

    @property
    def peak_held_bytes(self) -> int:
        """The most bytes of activations held at once in this step; 0 without sizes."""
        return self._bounds.peak_held_bytes

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        """Process one stimulus and return the instructions that follow from it. The stimulus is
        kept for the status. With `validate`, the state is checked afterwards.

        Arrivals and announcements return none. Pass in all that arrived, then `ComputeIdle`, which
        returns `RunTask`, `Wait` or `StepDone`; `Waited` precedes the first two where a wait ends
        or its cause changes. `TaskAgreed` returns `RunTask` likewise, `DecideAhead` the next
        `RunTask` or nothing. Raises DispatchError for an impossible stimulus or, with `validate`, a
        wrong state.
        """
        self._recent.append((now_ns, stimulus))
        answer: tuple[Instruction, ...] = ()
        if type(stimulus) is InputArrived:
            self._handle_arrival(stimulus)
        elif type(stimulus) is TaskAgreed:
            answer = self._dispatch_and_answer(now_ns, self._number_agreed_on(stimulus.task))
        elif type(stimulus) is Announced:
            self._handle_announcement(stimulus)
        else:
            answer = self._decide_and_answer(now_ns, is_idle=type(stimulus) is ComputeIdle)
        if self._validates:
            self._validate()
        return answer

    def input_arrived(self, number: int, member: int) -> None:
        """Record that the input of the task `number` has arrived at a member, as `InputArrived`
        does. Once all members have it, the task's announcement is dropped. Raises DispatchError if
        the input is not missing there."""
        bit = 1 << member
        missing = self._missing[number]
        if not missing & bit:
            raise self._arrival_error(self._tracker.index.task(number), member)
        self._tracker.mark_arrived(number, bit)
        if missing == bit and self._windows:
            self._windows.pop(number, None)

    def decide(self, now_ns: int, *, is_idle: bool = True) -> int:
        """Choose the task to run next, count it as dispatched and return its number; `NO_TASK` to
        wait, or if no task is left. With `is_idle` it decides as for `ComputeIdle`, else as for
        `DecideAhead`, but records no waits, causes or positions in the order."""
        number = self._choose(now_ns, is_idle=is_idle)
        if number != NO_TASK:
            self._dispatch(number, number // self._tracker.num_microbatches)
        return number

    def unfinished(self) -> list[tuple[Task, int]]:
        """The tasks not yet dispatched, each with the members at which its input has yet to arrive
        (bit i: member i; bit 0: this rank)."""
        tracker = self._tracker
        left = filter(tracker.is_unfinished, range(tracker.num_tasks))
        return [(tracker.index.task(number), self._missing[number]) for number in left]

    # Its status.

    def status(self) -> DispatcherStatus:
        """Return a snapshot: the unfinished tasks, with what each lacks or what withholds it, the
        hint's best task that lacks an input here (without an order, the first by number), and the
        last 8 stimuli."""
        tracker, bounds = self._tracker, self._bounds
        numbers = range(tracker.num_tasks)
        by_hint = numbers if self._order is None else self._order.unfinished()
        waiting = [n for n in by_hint if tracker.is_unfinished(n) and not tracker.is_ready_here(n)]
        return DispatcherStatus(
            tracker.rank,
            bounds.depth,
            bounds.held,
            tuple([self._status_of(n) for n in numbers if tracker.is_unfinished(n)]),
            self._status_of(waiting[0]) if waiting else None,
            tuple(self._recent),
        )

    def _status_of(self, number: int) -> TaskStatus:
        """Return the status of a task: the prerequisites that it lacks here, the members without
        its input and, if it lacks nothing here, the cause that withholds it, if any."""
        tracker = self._tracker
        lacks = tracker.unmet_prerequisites(number)
        withheld_by = None if lacks else self._withheld_by(number)
        return TaskStatus(tracker.index.task(number), lacks, tracker.missing[number], withheld_by)

    def _withheld_by(self, number: int) -> Cause | None:
        """Return the cause that withholds a task whose inputs are all here: the binding order, the
        bound, or the group (an input is missing at a member, or the leader decides). None if
        nothing does."""
        if self._fixed:
            assert self._order is not None
            if number != self._order.best:
                return Cause.ORDER
        elif not self._bounds.permits(number):
            return self._bounds.cause
        return Cause.COORDINATION if self._missing[number] or self._follows else None

    def _validate(self) -> None:
        """Raise DispatchError if more than the budget is in use, if D is wrong, or if the tracker's
        state is inconsistent."""
        tracker, bounds = self._tracker, self._bounds
        if bounds.has_budget and bounds.used > bounds.budget:
            wrong: str | None = f"a hold of {bounds.budget}, of which {bounds.used} is in use"
        elif bounds.depth != tracker.depth():
            wrong = "D"
        else:
            wrong = tracker.find_inconsistency()
        if wrong is not None:
            raise DispatchError(f"the dispatcher's state is inconsistent: {wrong}\n{self.status()}")

    # Arrivals and agreed tasks.

    def _handle_arrival(self, arrival: InputArrived) -> None:
        """Record the arrival of a task's input at a member. Raises DispatchError if this rank does
        not run the task, or the input is not missing there."""
        number = self._tracker.index.number(arrival.task)
        if number == NO_TASK:
            raise self._arrival_error(arrival.task, arrival.member)
        self.input_arrived(number, arrival.member)

    def _arrival_error(self, task: Task, member: int) -> DispatchError:
        """Make the error for an input that arrived although its task does not lack it, with the
        dispatcher's status."""
        return DispatchError(
            f"the input of {task} arrived on member {member} of pipeline rank {self.rank}, which "
            "does not lack it; a message was sent twice or to the wrong rank\n"
            f"{self.status()}"
        )

    def _handle_announcement(self, announced: Announced) -> None:
        """Record an announcement. It is ignored if the input has arrived at all members, and on a
        rank that follows a leader or a binding order. Raises DispatchError if this rank does not
        run the task, or no other rank sends its input."""
        number = self._tracker.index.number(announced.task)
        if number == NO_TASK or not self._tracker.has_remote_input(number):
            raise DispatchError(
                f"the input of {announced.task} was announced to pipeline rank {self.rank}, to "
                f"which no rank sends it; the announcement went to the wrong rank\n{self.status()}"
            )
        # A follower's leader decides, and a binding order waits as long as it takes.
        if self._missing[number] and self._ready_sets:
            self._announcements.add(number, announced)

    def _number_agreed_on(self, task: Task) -> int:
        """Return the number of the task that the group agreed on. Raises DispatchError unless this
        rank follows a leader, and the task is ready here."""
        number = self._tracker.index.number(task)
        if not self._follows or number == NO_TASK or not self._tracker.is_ready_here(number):
            raise DispatchError(
                f"the group agreed on {task}, which pipeline rank {self.rank} cannot run now; "
                f"its leader counts other arrivals than this rank\n{self.status()}"
            )
        return number

    # Decision.

    def _choose(self, now_ns: int, *, is_idle: bool) -> int:
        """Choose the task to run now and return its number, without dispatching it. `NO_TASK` if
        none may run (an idle rank then starts a new round), or to wait for a better announced task
        until `deadline_ns`, which it sets."""
        self.deadline_ns = NEVER
        choice = self._best_permitted() if self._tracker.num_unfinished else NO_TASK
        if choice == NO_TASK:
            if is_idle:
                self._tiers = self._top_of_round
        elif self._windows:
            self.deadline_ns = self._announcements.until(now_ns, choice, self._tiers)
            if self.deadline_ns != NEVER:
                return NO_TASK
        return choice

    def _best_permitted(self) -> int:
        """Return the number of the best task that may run, or `NO_TASK`. A follower decides
        nothing. Under a binding order it is the next task, if ready at all members. With several
        ready sets (the unanimous rule), all must agree on the task."""
        if self._follows:
            return NO_TASK
        tracker = self._tracker
        if self._fixed:
            assert self._order is not None
            number = self._order.best
            return number if tracker.is_ready(number, tracker.all_members) else NO_TASK
        sets = self._ready_sets
        choice = self._best_of_set(sets[0])
        for each in sets[1:]:
            if self._best_of_set(each) != choice:
                return NO_TASK
        return choice

    def _best_of_set(self, ready: ReadySet) -> int:
        """Return the number of the best task of a ready set that the bounds permit, or `NO_TASK`. A
        rank that drains takes the next task to drain, else a weight gradient; otherwise the first
        tier that has a permitted task decides."""
        tiers, tracker, bounds = self._tiers, self._tracker, self._bounds
        if bounds.drains:
            number = bounds.next_to_drain()
            if tracker.is_ready(number, ready.mask):
                return number
            tiers = self._weight_gradients
        heaps, num_chunks = ready.heaps, tracker.index.num_chunks
        withholds = bounds.withholds_forwards
        for tier in tiers:
            best = NO_TASK
            for place in tier:
                entry = tracker.best(heaps[place])
                if entry == NO_TASK or (best != NO_TASK and entry > best):
                    continue
                if withholds and place < num_chunks:
                    microbatch = tracker.number_in_entry(entry) - place * tracker.num_microbatches
                    if not bounds.fits(place, microbatch):
                        continue
                best = entry
            if best != NO_TASK:
                return tracker.number_in_entry(best)
        return NO_TASK

    # Dispatch.

    def _dispatch(self, number: int, row: int) -> None:
        """Count a task as done in the tracker and the bounds, move on in the hint's round, and
        credit the task to those that need it."""
        tracker, kind = self._tracker, self._kinds[row]
        microbatch = number - row * tracker.num_microbatches
        tracker.mark_dispatched(number, row)
        self._bounds.count_dispatched(kind, self._chunks[row], microbatch)
        self._tiers = self._tiers_after[kind]
        tracker.credit_dependents(number, kind, row)

    def _decide_and_answer(self, now_ns: int, *, is_idle: bool) -> tuple[Instruction, ...]:
        """Choose the next task, and return `RunTask` after dispatching it. If none may run, return
        `Wait` (or `StepDone` at the end of the step) on an idle rank, else nothing."""
        number = self._choose(now_ns, is_idle=is_idle)
        if number != NO_TASK:
            return self._dispatch_and_answer(now_ns, number)
        if not is_idle:
            return ()
        return self._answer_wait(now_ns) if self._tracker.num_unfinished else (StepDone(),)

    def _dispatch_and_answer(self, now_ns: int, number: int) -> tuple[Instruction, ...]:
        """Dispatch a task and return `RunTask`, preceded by `Waited` if that ends a wait. The
        numbers of ready tasks are from before the dispatch, D and the activations held from after
        it. Without an order, its position and the skipped tasks are -1."""
        tracker, bounds = self._tracker, self._bounds
        row = number // tracker.num_microbatches
        forwards, backwards, weight_gradients = bounds.count_permitted(
            tracker, tracker.num_ready, tracker.all_members
        )
        position, skipped = (-1, -1) if self._order is None else self._order.take(number)
        self._dispatch(number, row)
        run = RunTask(
            tracker.index.task(number),
            self._chunks[row],
            position,
            forwards + backwards + weight_gradients,
            skipped,
            bounds.depth,
            bounds.held,
            forwards,
            backwards,
            bounds.held_bytes,
        )
        if self._waiting is None:
            return (run,)
        cause, since_ns = self._waiting
        self._waiting = None
        return (Waited(cause, since_ns, now_ns), run)

    # Waiting.

    def _answer_wait(self, now_ns: int) -> tuple[Instruction, ...]:
        """Return `Wait` with its cause and deadline, if any. A wait whose cause has changed is
        split: `Waited` for the earlier cause precedes it. The start of the wait is remembered."""
        cause = self._cause_of_wait()
        wait = _WAITS[cause] if self.deadline_ns == NEVER else Wait(cause, self.deadline_ns)
        before = self._waiting
        if before is not None and before[0] is cause:
            return (wait,)
        self._waiting = (cause, now_ns)
        return (wait,) if before is None else (Waited(*before, now_ns), wait)

    def _cause_of_wait(self) -> Cause:
        """Return the cause for which the rank runs nothing now: before its first task always
        `WARMUP`, then patience, the group, the order or the bound that withholds a ready task, else
        the kind of input that the hint's best task waits for."""
        tracker = self._tracker
        if tracker.num_unfinished == tracker.num_tasks:
            return Cause.WARMUP
        if self.deadline_ns != NEVER:
            return Cause.PATIENCE
        is_any_here = any(tracker.num_ready_here)
        if self._fixed:
            assert self._order is not None
            if tracker.is_ready_here(self._order.best):
                return Cause.COORDINATION
            if is_any_here:
                return Cause.ORDER
        elif is_any_here:
            # Nothing may run at all members; what could run here waits for the group.
            is_permitted = any(self._bounds.count_permitted(tracker, tracker.num_ready_here, 1))
            return Cause.COORDINATION if is_permitted else self._bounds.cause
        return Cause.FORWARD_INPUT if self._best_lacks_forward() else Cause.BACKWARD_INPUT

    def _best_lacks_forward(self) -> bool:
        """True if the forward of the hint's best unfinished task (or the task itself) has yet to be
        dispatched on this rank. Without an order, the first unfinished task by number counts as the
        best."""
        if self._order is None:
            while self._unmet[self._first_unfinished] < 0:
                self._first_unfinished += 1
            best = self._first_unfinished
        else:
            best = self._order.best
        # Forwards have the first numbers, so this is its F (or the task itself).
        return self._unmet[best % self._tracker.num_per_kind] >= 0
