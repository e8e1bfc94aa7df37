"""The dispatcher: the one place that knows what is ready and what runs next.

Theory of operation. A dispatcher serves one pipeline rank for one step. `handle` takes in a
stimulus and answers with instructions; nothing else changes its state, and it reads no clock.
(`arrived` and `decide` do the same for simulations, by the numbers of tasks alone.)

- A task may lack earlier tasks of this rank and, where a neighbouring rank sends its input, one
  arrival at each member of the rank's group. A task that lacks nothing is *ready*. Everything
  counts from dispatch, not from completion: earlier tasks, D, what is held, and the hint's round.
  That is sound because a rank runs its tasks one at a time, in the order of their dispatch, and it
  lets a group decide its next task while one runs (`DecideAhead`).
- `ready` dispatch: ready tasks wait in heaps keyed by the hint, which also says which kinds go
  first. A bound on memory may withhold some of them (`rrfp.schedule.bounds`).
- Patience: a task that another rank has announced may be worth waiting for, up to a deadline, in
  the place of lesser ones that are ready (`rrfp.schedule.punctuality`).
- `fixed` dispatch: the hint's order binds; the rank runs the next task of its row or waits for it.
- Groups: ranks that share a collective inside a task run the same sequence. The leader counts
  every member's arrivals and decides; the others follow its decisions (`TaskAgreed`). It runs the
  best of what is ready at every member or, by the paper's rule, what each member would pick by
  itself if all pick the same.

An idle interval has one cause. When the cause changes during it, the interval is split.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.schedule.bounds import Bounds, Sizes
from rrfp.schedule.order import OrderProgress
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.punctuality import NEVER, Announcements
from rrfp.schedule.ready_tracker import KINDS, NOTHING, Books, ReadySet, by_heap
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

# A dispatcher's account of itself: what each task still lacks, and who withholds it.


_NUM_LISTED = 6
"""Tasks that the text lists; it counts the rest."""


class TaskStory(NamedTuple):
    """What holds up a task that has not been dispatched."""

    task: Task
    lacks: tuple[Task, ...]
    """The tasks whose output it still needs on this rank."""
    missing_members: int
    """The members of the group at which its input has yet to arrive (bit i: member i; bit 0: this
    rank)."""
    withheld_by: Cause | None
    """What withholds it although all its inputs are here: a bound, the order, or the group's
    agreement. None if nothing does, or if an input is missing."""

    def __str__(self) -> str:
        if self.lacks:
            return f"{self.task} lacks {', '.join(map(str, self.lacks))}"
        if self.withheld_by is not None:
            return f"{self.task} is here, withheld by {self.withheld_by}"
        return f"{self.task} may run"


@dataclass(frozen=True, slots=True)
class Story(Value):
    """What a dispatcher knows at one moment; `str` gives it as text."""

    rank: int
    """The pipeline rank."""
    depth: int
    """D: chunk-forwards minus chunk-backwards run."""
    held: int
    """Activations held, in slots of one chunk and one microbatch."""
    tasks: tuple[TaskStory, ...]
    """The tasks not yet dispatched, by kind, chunk and microbatch."""
    best_waiting: TaskStory | None
    """The hint's best task among those that lack an input on this rank."""
    recent: tuple[tuple[int, Stimulus], ...]
    """The last stimuli, each with its time in ns, the latest last."""

    @property
    def ready(self) -> tuple[TaskStory, ...]:
        """The tasks with all inputs on this rank, withheld ones included."""
        return tuple(each for each in self.tasks if not each.lacks)

    def __str__(self) -> str:
        """A line for each of the first tasks, those with all inputs here first, then the last
        stimuli."""
        tasks = sorted(self.tasks, key=lambda each: bool(each.lacks))
        lines = [
            f"pipeline rank {self.rank} has {len(self.tasks)} tasks left, D {self.depth}, "
            f"{self.held} held"
        ]
        lines += [f"  {each}" for each in tasks[:_NUM_LISTED]]
        if len(tasks) > _NUM_LISTED:
            lines.append(f"  and {len(tasks) - _NUM_LISTED} more")
        lines.append("  it last took in")
        lines += [f"    {time_ns} ns: {_text_of(stimulus)}" for time_ns, stimulus in self.recent]
        return "\n".join(lines)


class Account:
    """What a dispatcher's story is told from."""

    def __init__(
        self,
        books: Books,
        bounds: Bounds,
        order: OrderProgress | None,
        *,
        binds: bool,
        follows: bool,
    ) -> None:
        """`binds` says that the order binds, and `follows` that another rank decides."""
        self._books = books
        self._bounds = bounds
        self._order = order
        self._binds = binds
        self._follows = follows

    def story(self, recent: Iterable[tuple[int, Stimulus]]) -> Story:
        """What each task lacks, who withholds it, and the last stimuli."""
        books, bounds = self._books, self._bounds
        numbers = range(books.num_tasks)
        by_hint = numbers if self._order is None else self._order.left()
        waiting = [n for n in by_hint if books.is_left(n) and not books.is_here(n)]
        return Story(
            books.rank,
            bounds.depth,
            bounds.held,
            tuple([self._story_of(n) for n in numbers if books.is_left(n)]),
            self._story_of(waiting[0]) if waiting else None,
            tuple(recent),
        )

    def _story_of(self, number: int) -> TaskStory:
        books = self._books
        lacks = books.lacking(number)
        withheld_by = None if lacks else self._withheld_by(number)
        return TaskStory(books.lanes.task(number), lacks, books.missing[number], withheld_by)

    def _withheld_by(self, number: int) -> Cause | None:
        """What withholds a task that has all its inputs here."""
        if self._binds:
            assert self._order is not None
            if number != self._order.best:
                return Cause.ORDER
        elif not self._bounds.permits(number):
            return self._bounds.cause
        return Cause.COORDINATION if self._books.missing[number] or self._follows else None

    def contradiction(self) -> str | None:
        """What contradicts the rest of the books, in a few words; None if all agree. Takes time
        linear in the tasks of the step."""
        books, bounds = self._books, self._bounds
        if bounds.has_budget and bounds.used > bounds.budget:
            return f"a hold of {bounds.budget}, of which {bounds.used} is in use"
        if bounds.depth != books.depth():
            return "D"
        return books.contradiction()


def _text_of(stimulus: Stimulus) -> str:
    return " ".join([type(stimulus).__name__, *map(str, stimulus)])


_NUM_RECENT = 8
"""How many of the last stimuli a story keeps."""

_WAITS = {cause: Wait(cause) for cause in Cause}


@dataclass(frozen=True, slots=True)
class Group(Value):
    """A rank's part among the ranks that must run their tasks in one order."""

    num_members: int
    leads: bool


class DispatchError(RrfpError):
    """An impossible stimulus (an input that no task lacks, or an agreed task that cannot run), or
    books that contradict themselves. One sentence, with the dispatcher's story below it."""


class Dispatcher:
    """Decides what one pipeline rank runs next in one step."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        policy: Policy,
        group: Group | None = None,
        *,
        sizes: Sizes | None = None,
        budget: int | None = None,
        validate: bool = False,
    ) -> None:
        """Start a step of `shape` on pipeline rank `rank`.

        The policy's bounds apply to `ready` dispatch in steps with backwards. Positions and
        deviations are counted against its order, which `fixed` dispatch requires. `sizes` are those
        of this rank's chunks; a hold in bytes requires them, and `budget` is this rank's own, in
        bytes, where ranks differ. `validate` checks the books after each stimulus, in time linear
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
            masks: list[int] = []  # nothing is ranked
        elif policy.agreement is AgreementRule.UNANIMOUS:
            masks = [1 << member for member in range(num_members)]
        else:
            masks = [(1 << num_members) - 1]
        self._books = books = Books(shape, rank, hint.keys(shape, rank), num_members, masks)
        self._bounds = Bounds(shape, policy, sizes, budget)
        self._announcements = Announcements(books, self._bounds)
        # Shorthands for the books' own lists.
        self._lacks, self._missing = books.lacks, books.missing
        self._ready_sets = books.ready_sets
        self._windows = self._announcements.windows
        self._kinds, self._chunks = books.lanes.kinds, books.lanes.chunks
        self._order = (
            None
            if order is None
            else OrderProgress(order.numbers(rank), order.keys(shape, rank), books.lacks)
        )
        self._account = Account(
            *(books, self._bounds, self._order), binds=self._fixed, follows=self._follows
        )
        rounds = hint.rounds(policy.w)
        num_chunks = shape.num_chunks
        self._top_of_round = by_heap(rounds.tiers(), num_chunks)
        self._tiers = self._top_of_round
        self._tiers_after = [by_heap(rounds.tiers(kind), num_chunks) for kind in KINDS]
        self._weight_gradients = ((num_chunks + 1,),)
        self._waiting: tuple[Cause, int] | None = None
        self._first_unfinished = 0
        self.deadline_ns = NEVER
        """After a decision to run nothing: when to ask again although nothing came, or `NEVER`."""

    def __repr__(self) -> str:
        policy, books = self.policy, self._books
        return (
            f"<Dispatcher of pipeline rank {self.rank}: {policy.hint.name} {policy.dispatch}, "
            f"{books.num_left} of {books.num_tasks} tasks left>"
        )

    @property
    def depth(self) -> int:
        """D: chunk-forwards minus chunk-backwards run."""
        return self._bounds.depth

    @property
    def held(self) -> int:
        """Activations held, in slots of one chunk and one microbatch."""
        return self._bounds.held

    @property
    def peak_held(self) -> int:
        """The most activations held at once."""
        return self._bounds.peak_held

    @property
    def peak_held_bytes(self) -> int:
        """The most bytes of activations held at once; 0 without sizes."""
        return self._bounds.peak_held_bytes

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        """Take in one stimulus and return the instructions that follow from it.

        Arrivals and announcements only update the books. Pass in all that came, then `ComputeIdle`,
        which answers with `RunTask`, `Wait` or `StepDone`, preceded by `Waited` where a wait ends.
        `DecideAhead` answers with the next `RunTask`, or with nothing. Raises DispatchError for an
        impossible stimulus.
        """
        self._recent.append((now_ns, stimulus))
        answer: tuple[Instruction, ...] = ()
        if type(stimulus) is InputArrived:
            self._take_in(stimulus)
        elif type(stimulus) is TaskAgreed:
            answer = self._run(now_ns, self._agreed(stimulus.task))
        elif type(stimulus) is Announced:
            self._expect(stimulus)
        else:
            answer = self._decided(now_ns, is_idle=type(stimulus) is ComputeIdle)
        if self._validates:
            self._validate()
        return answer

    def arrived(self, number: int, member: int) -> None:
        """The input of the task of this number has arrived at a member (`InputArrived`)."""
        bit = 1 << member
        missing = self._missing[number]
        if not missing & bit:
            raise self._unexpected(self._books.lanes.task(number), member)
        self._books.arrived(number, bit)
        if missing == bit and self._windows:
            self._windows.pop(number, None)

    def decide(self, now_ns: int, *, is_idle: bool = True) -> int:
        """The number of the task to run next, which counts as dispatched; `NOTHING` to wait
        (`ComputeIdle` or, unless `is_idle`, `DecideAhead`), without a run's counts and causes."""
        number = self._choose(now_ns, is_idle=is_idle)
        if number != NOTHING:
            self._dispatch(number, number // self._books.num_microbatches)
        return number

    def unfinished(self) -> list[tuple[Task, int]]:
        """Every task not yet dispatched, with the members at which its input has yet to arrive
        (bit i: member i; bit 0: this rank)."""
        books = self._books
        left = filter(books.is_left, range(books.num_tasks))
        return [(books.lanes.task(number), self._missing[number]) for number in left]

    # Its own account.

    def story(self) -> Story:
        """What each task lacks, who withholds it, and the last stimuli."""
        return self._account.story(self._recent)

    def _validate(self) -> None:
        """Raise DispatchError where the books contradict themselves."""
        wrong = self._account.contradiction()
        if wrong is not None:
            raise DispatchError(f"the dispatcher's books contradict {wrong}\n{self.story()}")

    # Arrivals and agreed tasks.

    def _take_in(self, arrival: InputArrived) -> None:
        number = self._books.lanes.number(arrival.task)
        if number == NOTHING:
            raise self._unexpected(arrival.task, arrival.member)
        self.arrived(number, arrival.member)

    def _unexpected(self, task: Task, member: int) -> DispatchError:
        return DispatchError(
            f"the input of {task} arrived on member {member} of pipeline rank {self.rank}, which "
            "does not lack it; a message was sent twice or to the wrong rank\n"
            f"{self.story()}"
        )

    def _expect(self, announced: Announced) -> None:
        number = self._books.lanes.number(announced.task)
        if number == NOTHING or not self._books.comes(number):
            raise DispatchError(
                f"the input of {announced.task} was announced to pipeline rank {self.rank}, to "
                f"which no rank sends it; the announcement went to the wrong rank\n{self.story()}"
            )
        # A follower's leader decides, and a binding order waits as long as it takes.
        if self._missing[number] and self._ready_sets:
            self._announcements.add(number, announced)

    def _agreed(self, task: Task) -> int:
        number = self._books.lanes.number(task)
        if not self._follows or number == NOTHING or not self._books.is_here(number):
            raise DispatchError(
                f"the group agreed on {task}, which pipeline rank {self.rank} cannot run now; "
                f"its leader's books and these differ\n{self.story()}"
            )
        return number

    # Decision.

    def _choose(self, now_ns: int, *, is_idle: bool) -> int:
        """The number of the task to run now; `NOTHING` to run none, until `deadline_ns`."""
        self.deadline_ns = NEVER
        choice = self._choice() if self._books.num_left else NOTHING
        if choice == NOTHING:
            if is_idle:
                self._tiers = self._top_of_round
        elif self._windows:
            self.deadline_ns = self._announcements.until(now_ns, choice, self._tiers)
            if self.deadline_ns != NEVER:
                return NOTHING
        return choice

    def _choice(self) -> int:
        """The number of the best task that may run; `NOTHING` if there is none, or if another rank
        decides."""
        if self._follows:
            return NOTHING
        books = self._books
        if self._fixed:
            assert self._order is not None
            number = self._order.best
            return number if books.is_ready(number, books.everybody) else NOTHING
        sets = self._ready_sets
        choice = self._best(sets[0])
        for each in sets[1:]:
            if self._best(each) != choice:
                return NOTHING
        return choice

    def _best(self, ready: ReadySet) -> int:
        """The number of the best task of this set that the bounds permit; `NOTHING` if they permit
        none."""
        tiers, books, bounds = self._tiers, self._books, self._bounds
        if bounds.drains:
            number = bounds.next_to_drain()
            if books.is_ready(number, ready.mask):
                return number
            tiers = self._weight_gradients
        heaps, num_chunks = ready.heaps, books.lanes.num_chunks
        withholds = bounds.withholds_forwards
        for tier in tiers:
            best = NOTHING
            for place in tier:
                entry = books.best(heaps[place])
                if entry == NOTHING or (best != NOTHING and entry > best):
                    continue
                if withholds and place < num_chunks:
                    microbatch = books.number_of(entry) - place * books.num_microbatches
                    if not bounds.fits(place, microbatch):
                        continue
                best = entry
            if best != NOTHING:
                return books.number_of(best)
        return NOTHING

    # Dispatch.

    def _dispatch(self, number: int, lane: int) -> None:
        """Count a task as done."""
        books, kind = self._books, self._kinds[lane]
        microbatch = number - lane * books.num_microbatches
        books.dispatched(number, lane)
        self._bounds.ran(kind, self._chunks[lane], microbatch)
        self._tiers = self._tiers_after[kind]
        books.hand_over(number, kind, lane)

    def _decided(self, now_ns: int, *, is_idle: bool) -> tuple[Instruction, ...]:
        """What follows from a decision."""
        number = self._choose(now_ns, is_idle=is_idle)
        if number != NOTHING:
            return self._run(now_ns, number)
        if not is_idle:
            return ()
        return self._wait(now_ns) if self._books.num_left else (StepDone(),)

    def _run(self, now_ns: int, number: int) -> tuple[Instruction, ...]:
        books, bounds = self._books, self._bounds
        lane = number // books.num_microbatches
        forwards, backwards, weight_gradients = bounds.permitted(
            books, books.num_ready, books.everybody
        )
        position, skipped = (-1, -1) if self._order is None else self._order.take(number)
        self._dispatch(number, lane)
        run = RunTask(
            books.lanes.task(number),
            self._chunks[lane],
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

    def _wait(self, now_ns: int) -> tuple[Instruction, ...]:
        cause = self._cause()
        wait = _WAITS[cause] if self.deadline_ns == NEVER else Wait(cause, self.deadline_ns)
        before = self._waiting
        if before is not None and before[0] is cause:
            return (wait,)
        self._waiting = (cause, now_ns)
        return (wait,) if before is None else (Waited(*before, now_ns), wait)

    def _cause(self) -> Cause:
        books = self._books
        if books.num_left == books.num_tasks:
            return Cause.WARMUP
        if self.deadline_ns != NEVER:
            return Cause.PATIENCE
        is_any_here = any(books.num_here)
        if self._fixed:
            assert self._order is not None
            if books.is_here(self._order.best):
                return Cause.COORDINATION
            if is_any_here:
                return Cause.ORDER
        elif is_any_here:
            # Nothing may run at all members; what could run here waits for the group.
            is_permitted = any(self._bounds.permitted(books, books.num_here, 1))
            return Cause.COORDINATION if is_permitted else self._bounds.cause
        return Cause.FORWARD_INPUT if self._best_lacks_forward() else Cause.BACKWARD_INPUT

    def _best_lacks_forward(self) -> bool:
        """Whether the hint's best unfinished task, or its F, waits for an activation. Without an
        order, the first unfinished task stands in for the best one."""
        if self._order is None:
            while self._lacks[self._first_unfinished] < 0:
                self._first_unfinished += 1
            best = self._first_unfinished
        else:
            best = self._order.best
        # Numbers of forwards come first, so this is its F (or the task itself).
        return self._lacks[best % self._books.num_of_a_kind] >= 0
