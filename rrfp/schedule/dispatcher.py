"""The dispatcher: the one place that knows what is ready and what runs next.

Theory of operation. A dispatcher serves one pipeline rank for one step. `handle` takes in a
stimulus and answers with instructions; nothing else changes its state, and it reads no clock.

- A task may lack earlier tasks of this rank and, where a neighbouring rank sends its input, one
  arrival at each member of the rank's group. A task that lacks nothing is *ready*. Everything
  counts from dispatch, not from completion: earlier tasks, D, what is held, and the hint's round.
  That is sound because a rank runs its tasks one at a time, in the order of their dispatch, and it
  lets a group decide its next task while one runs (`DecideAhead`).
- `ready` dispatch: ready tasks wait in heaps keyed by the hint, which also says which kinds go
  first. A bound on memory may withhold some of them (`rrfp.schedule.bounds`).
- Patience: a task that another rank has announced may be worth waiting for, up to a deadline, in
  the place of lesser ones that are ready (`rrfp.schedule.patience.announcements`).
- `fixed` dispatch: the hint's order binds; the rank runs the next task of its row or waits for it.
- Groups: ranks that share a collective inside a task run the same sequence. The leader counts
  every member's arrivals and decides; the others follow its decisions (`TaskAgreed`). It runs the
  best of what is ready at every member or, by the paper's rule, what each member would pick by
  itself if all pick the same.

An idle interval has one cause. When the cause changes during it, the interval is split.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop

from rrfp.errors import RrfpError
from rrfp.schedule.books import Books, ReadySet
from rrfp.schedule.bounds import Bounds
from rrfp.schedule.causes import Cause
from rrfp.schedule.hints.hint import Tier
from rrfp.schedule.instructions import Instruction, RunTask, StepDone, Wait, Waited
from rrfp.schedule.order_progress import OrderProgress
from rrfp.schedule.patience.announcements import Announcements
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.stimuli import Announced, ComputeIdle, InputArrived, Stimulus, TaskAgreed
from rrfp.schedule.story import Story, TaskStory
from rrfp.schedule.tasks import Kind, Task

_KINDS = (Kind.F, Kind.B, Kind.W)
_F, _B, _W = range(3)
"""Kinds as the books number them."""

_NUM_RECENT = 8
"""How many of the last stimuli a story keeps."""

_WAITS = {cause: Wait(cause) for cause in Cause}


@dataclass(frozen=True, slots=True)
class Group:
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
        self._lanes = [(kind, chunk) for kind in range(3) for chunk in range(shape.num_chunks)]
        self._order = (
            None if order is None else OrderProgress(list(map(shape.index_of, order.rows[rank])))
        )
        rounds = hint.rounds(policy.w)
        self._top_of_round = _by_place(rounds.tiers())
        self._tiers = self._top_of_round
        self._tiers_after = [_by_place(rounds.tiers(kind)) for kind in _KINDS]
        self._waiting: tuple[Cause, int] | None = None
        self._first_unfinished = 0

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
        elif self._books.num_left and (choice := self._choice()) is not None:
            until_ns = None
            if self._windows:
                until_ns = self._announcements.until(now_ns, choice, self._tiers)
            if until_ns is None:
                answer = self._run(now_ns, choice)
            elif type(stimulus) is ComputeIdle:
                answer = self._wait(now_ns, self._cause(is_patient=True), until_ns)
        elif type(stimulus) is ComputeIdle:
            if self._books.num_left:
                self._tiers = self._top_of_round
                answer = self._wait(now_ns, self._cause())
            else:
                answer = (StepDone(),)
        if self._validates:
            self._validate()
        return answer

    def unfinished(self) -> list[tuple[Task, int]]:
        """Every task not yet dispatched, with the members at which its input has yet to arrive
        (bit i: member i; bit 0: this rank)."""
        books = self._books
        left = filter(books.is_left, range(books.num_tasks))
        return [(books.tasks[number], self._missing[number]) for number in left]

    # Its own account.

    def story(self) -> Story:
        """What each task lacks, who withholds it, and the last stimuli."""
        books = self._books
        by_hint = range(books.num_tasks) if self._order is None else self._order.left()
        waiting = (n for n in by_hint if books.is_left(n) and not books.is_here(n))
        best = next(waiting, None)
        return Story(
            self.rank,
            self.depth,
            self.held,
            tuple(self._story_of(n) for n in range(books.num_tasks) if books.is_left(n)),
            None if best is None else self._story_of(best),
            tuple(self._recent),
        )

    def _story_of(self, number: int) -> TaskStory:
        lacks = self._books.lacking(number)
        withheld_by = None if lacks else self._withheld_by(number)
        return TaskStory(self._books.tasks[number], lacks, self._missing[number], withheld_by)

    def _withheld_by(self, number: int) -> Cause | None:
        """What withholds a task that has all its inputs here."""
        if self._fixed:
            assert self._order is not None
            if number != self._order.best:
                return Cause.ORDER
        elif not self._bounds.permits(number):
            return self._bounds.cause
        return Cause.COORDINATION if self._missing[number] or self._follows else None

    def _validate(self) -> None:
        """Raise DispatchError where the books contradict themselves."""
        books, bounds = self._books, self._bounds
        wrong = books.contradiction()
        if self.depth != books.num_dispatched(_F) - books.num_dispatched(_B):
            wrong = "D"
        if bounds.budget is not None and bounds.used > bounds.budget:
            wrong = f"a hold of {bounds.budget}, of which {bounds.used} is in use"
        if wrong is not None:
            raise DispatchError(f"the dispatcher's books contradict {wrong}\n{self.story()}")

    # Arrivals and agreed tasks.

    def _take_in(self, arrival: InputArrived) -> None:
        number = self._books.number(arrival.task)
        bit = 1 << arrival.member
        if number is None or not self._missing[number] & bit:
            raise DispatchError(
                f"the input of {arrival.task} arrived on member {arrival.member} of pipeline "
                f"rank {self.rank}, which does not lack it; a message was sent twice or to the "
                f"wrong rank\n{self.story()}"
            )
        self._books.arrived(number, bit)
        if self._windows and not self._missing[number]:
            self._windows.pop(number, None)

    def _expect(self, announced: Announced) -> None:
        number = self._books.number(announced.task)
        if number is None or not self._books.comes(number):
            raise DispatchError(
                f"the input of {announced.task} was announced to pipeline rank {self.rank}, to "
                f"which no rank sends it; the announcement went to the wrong rank\n{self.story()}"
            )
        # A follower's leader decides, and a binding order waits as long as it takes.
        if self._missing[number] and self._ready_sets:
            self._announcements.add(number, announced)

    def _agreed(self, task: Task) -> int:
        number = self._books.number(task)
        if not self._follows or number is None or not self._books.is_here(number):
            raise DispatchError(
                f"the group agreed on {task}, which pipeline rank {self.rank} cannot run now; "
                f"its leader's books and these differ\n{self.story()}"
            )
        return number

    # Decision.

    def _choice(self) -> int | None:
        """The number of the best task that may run; None if there is none, or if another rank
        decides."""
        if self._follows:
            return None
        books = self._books
        if self._fixed:
            assert self._order is not None
            number = self._order.best
            return number if books.is_ready(number, books.everybody) else None
        sets = self._ready_sets
        choice = self._best(sets[0])
        if len(sets) > 1 and any(self._best(each) != choice for each in sets):
            return None
        return choice

    def _best(self, ready: ReadySet) -> int | None:
        """The number of the best task of this set that the bounds permit."""
        tiers, bounds = self._tiers, self._bounds
        if bounds.drains:
            number = bounds.next_to_drain()
            if self._books.is_ready(number, ready.mask):
                return number
            tiers = ((_W,),)
        lacks, num_tasks = self._lacks, self._books.num_tasks
        num_microbatches, withholds = self._books.num_microbatches, bounds.withholds_forwards
        for tier in tiers:
            best = None
            for kind in tier:
                for chunk, heap in enumerate(ready.heaps[kind]):
                    while heap and lacks[heap[0] % num_tasks] < 0:
                        heappop(heap)
                    if not heap or (best is not None and heap[0] > best):
                        continue
                    if withholds and kind == _F:
                        microbatch = heap[0] % num_tasks % num_microbatches
                        if not bounds.fits(chunk, microbatch):
                            continue
                    best = heap[0]
            if best is not None:
                return best % num_tasks
        return None

    # Dispatch.

    def _run(self, now_ns: int, number: int) -> tuple[Instruction, ...]:
        books, bounds = self._books, self._bounds
        lane, microbatch = divmod(number, books.num_microbatches)
        kind, chunk = self._lanes[lane]
        forwards, backwards, weight_gradients = bounds.permitted(
            books, books.num_ready, books.everybody
        )
        books.dispatched(number, lane)
        bounds.ran(kind, chunk, microbatch)
        self._tiers = self._tiers_after[kind]
        position, skipped = (-1, -1) if self._order is None else self._order.take(number)
        books.hand_over(number, kind, lane)
        run = RunTask(
            books.tasks[number],
            chunk,
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
        waited = Waited(*self._waiting, now_ns)
        self._waiting = None
        return (waited, run)

    # Waiting.

    def _wait(
        self, now_ns: int, cause: Cause, deadline_ns: int | None = None
    ) -> tuple[Instruction, ...]:
        wait = _WAITS[cause] if deadline_ns is None else Wait(cause, deadline_ns)
        before = self._waiting
        if before is not None and before[0] is cause:
            return (wait,)
        self._waiting = (cause, now_ns)
        return (wait,) if before is None else (Waited(*before, now_ns), wait)

    def _cause(self, *, is_patient: bool = False) -> Cause:
        books = self._books
        if books.num_left == books.num_tasks:
            return Cause.WARMUP
        if is_patient:
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


def _by_place(tiers: tuple[Tier, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(_KINDS.index, tier)) for tier in tiers)
