"""The dispatcher: the one place that knows what is ready and what runs next.

Theory of operation. A dispatcher serves one pipeline rank for one step. State enters by `handle`
as a stimulus and leaves as instructions; nothing else changes it, and it reads no clock.

- Every task lacks a number of things: the local task before it, and one arrival (of each member
  of the rank's group) where a neighbouring stage sends its input. A task that lacks nothing is
  *ready*. Local prerequisites count from their dispatch on, for a rank runs one task at a time;
  that is also what lets a group decide ahead of completion (paper section 4.2).
- `ready` dispatch: ready tasks wait in one heap a kind, keyed by the hint. When the compute
  thread is idle, the hint says which kind goes first; a forward is withheld while D, the
  chunk-forwards minus the chunk-backwards run in this step, is at the limit (paper App. C).
- `fixed` dispatch: the hint's order is binding; the next task of the row runs or is waited for.
- Group: the ranks that share a collective inside a task run the same sequence. The leader counts
  every member's arrivals, so that what it finds ready is the intersection of the members' ready
  sets, and decides; the others run what they are told (`TaskAgreed`).

An idle interval has one cause. When the cause changes in mid-idle the interval is split.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.causes import Cause
from rrfp.schedule.hints import Hint, Turns
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

F, B, W = Kind.F, Kind.B, Kind.W


class Dispatch(StrEnum):
    """What the hint is to the dispatcher."""

    READY = "ready"
    """It ranks what is ready."""
    FIXED = "fixed"
    """Its order is binding."""


class InputArrived(NamedTuple):
    """Stimulus: what a neighbouring stage sends for a task is here (`member` 0: on this rank;
    another: on that member of the group this rank leads)."""

    task: Task
    member: int = 0


class ComputeIdle(NamedTuple):
    """Stimulus: the compute thread is free, and everything that has arrived was handed in."""


class TaskAgreed(NamedTuple):
    """Stimulus: the compute thread is free, and the group's leader has decided for this task."""

    task: Task


Stimulus = InputArrived | ComputeIdle | TaskAgreed


class RunTask(NamedTuple):
    """Instruction: run this task now. The counts are those of the moment of decision."""

    task: Task
    chunk: int
    hint_position: int
    """Its place in the hint's order, -1 when the dispatcher was given none."""
    ready: int
    """Tasks that were ready, this one included."""
    skipped: int
    """Unfinished tasks that the hint's order puts before it, -1 when there is no order."""
    depth: int
    """D once this task has run."""
    held: int
    """Activations held once this task has run, in chunks."""
    ready_forwards: int
    """Of those; withheld forwards are not ready."""
    ready_backwards: int


class Wait(NamedTuple):
    """Instruction: nothing can run; ask again when something has arrived."""

    cause: Cause


class Waited(NamedTuple):
    """Instruction: account this idle interval, which is over, to its cause."""

    cause: Cause
    start_ns: int
    end_ns: int


class StepDone(NamedTuple):
    """Instruction: every task of the step was dispatched."""


Instruction = RunTask | Wait | Waited | StepDone


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's part among the ranks that must run their tasks in one order."""

    num_members: int
    leads: bool


class DispatchError(RrfpError):
    """A stimulus that cannot be: an input that nobody lacks, or an agreed task that cannot run."""


class _OrderProgress:
    """How far a rank has come in an order whose entries may be run out of turn."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._position = {number: position for position, number in enumerate(numbers)}
        self._first = 0
        self._taken_ahead: list[int] = []  # positions behind the first unfinished one, sorted

    @property
    def best(self) -> int:
        """The number of the first unfinished task."""
        return self._numbers[self._first]

    def take(self, number: int) -> tuple[int, int]:
        """Finish a task: its position, and how many unfinished tasks stand before it."""
        position = self._position[number]
        ahead = self._taken_ahead
        if position > self._first:
            place = bisect_left(ahead, position)
            ahead.insert(place, position)
            return position, position - self._first - place
        self._first += 1
        done = 0
        while done < len(ahead) and ahead[done] == self._first:
            self._first += 1
            done += 1
        del ahead[:done]
        return position, 0


class Dispatcher:
    """Decides what one pipeline rank runs next in one step."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        hint: Hint,
        *,
        dispatch: Dispatch = Dispatch.READY,
        limit: int | None = None,
        order: Order | None = None,
        group: Group | None = None,
    ) -> None:
        """Start a step of `shape` on pipeline rank `rank`.

        `limit` is the D at which forwards are withheld (`ready` dispatch, one chunk a rank, steps
        with a backward). `order` is the order that the hint gives (`order_of`); positions and
        deviations are counted against it, and `fixed` dispatch needs it. Raises UsageError for a
        limit below 1.
        """
        if isinstance(hint, Order):
            order = hint
        if dispatch is Dispatch.FIXED and order is None:
            raise ValueError("fixed dispatch needs the order that its hint gives")
        if order is not None and order.shape != shape:
            raise ValueError(f"order {order.name} is for {order.shape}, not for {shape}")
        if limit is not None and limit < 1:
            raise UsageError(f"the limit is {limit}; it must be at least 1")
        if limit is not None and shape.num_chunks > 1:
            raise UsageError(
                f"the limit is defined for one chunk a rank, not {shape.num_chunks}; leave it out"
            )
        self.shape = shape
        self.rank = rank
        self.depth = 0
        self.held = 0
        self.peak_held = 0
        self._hint = hint
        self._fixed = dispatch is Dispatch.FIXED
        self._limit = limit if B in shape.kinds and not self._fixed else None
        self._follows = group is not None and not group.leads
        self._ranks = not self._fixed and not self._follows
        self._order = (
            None
            if order is None
            else _OrderProgress([self._index(task) for task in order.rows[rank]])
        )
        self._frees_held = W if shape.splits_backward else B

        # The lists below are indexed by a task's number: by kind, then chunk, then microbatch.
        self._tasks = list(shape.tasks_of(rank))
        self._num_left = len(self._tasks)
        num_members = group.num_members if group is not None and group.leads else 1
        # The members at which a task's input is still to arrive, one bit each.
        self._arrivals_missing = [
            (1 << num_members) - 1 if self._comes_from_elsewhere(task) else 0
            for task in self._tasks
        ]
        self._lacks_here = [len(shape.prerequisites(task)) for task in self._tasks]
        self._lacks = [
            lacked + max(0, missing.bit_count() - 1)
            for lacked, missing in zip(self._lacks_here, self._arrivals_missing, strict=True)
        ]
        self._key = self._keys()

        self._heaps: dict[Kind, list[int]] = {kind: [] for kind in shape.kinds}
        self._num_ready = dict.fromkeys(Kind, 0)
        self._num_here = dict.fromkeys(Kind, 0)
        self._in_turn = isinstance(hint, Turns)
        self._top_of_round = self._turns = self._round()
        self._waiting: tuple[Cause, int] | None = None
        for number, lacked in enumerate(self._lacks):
            if lacked == 0:
                self._num_here[self._tasks[number].kind] += 1
                self._becomes_ready(number)

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        """Take in one stimulus and say what follows from it.

        An arrival only changes the books: hand in all that has arrived, then `ComputeIdle`, which
        answers with `RunTask`, `Wait` or `StepDone`, a `Waited` before it where a wait ends.
        Raises DispatchError for a stimulus that cannot be.
        """
        if type(stimulus) is InputArrived:
            self._take_in(stimulus)
            return ()
        if type(stimulus) is TaskAgreed:
            return self._run(now_ns, self._agreed(stimulus.task))
        if self._num_left == 0:
            return (StepDone(),)
        choice = self._choice()
        return self._wait(now_ns) if choice is None else self._run(now_ns, choice)

    def unfinished(self) -> list[tuple[Task, int]]:
        """Every task not yet dispatched, and how many arrivals it still lacks."""
        return [
            (task, missing.bit_count())
            for task, lacked, missing in zip(
                self._tasks, self._lacks, self._arrivals_missing, strict=True
            )
            if lacked >= 0
        ]

    # Books: what each task still lacks.

    def _index(self, task: Task) -> int:
        block = 0 if task.kind is F else 1 if task.kind is B else 2
        shape = self.shape
        chunk = shape.chunk_of(task.stage)
        return (block * shape.num_chunks + chunk) * shape.num_microbatches + task.microbatch

    def _number(self, task: Task) -> int | None:
        return self._index(task) if self.shape.holds(self.rank, task) else None

    def _comes_from_elsewhere(self, task: Task) -> bool:
        sender = self.shape.sender(task)
        return sender is not None and self.shape.rank_of(sender.stage) != self.rank

    def _take_in(self, arrival: InputArrived) -> None:
        number = self._number(arrival.task)
        bit = 1 << arrival.member
        if number is None or not self._arrivals_missing[number] & bit:
            raise DispatchError(
                f"the input of {arrival.task} arrived on member {arrival.member} of pipeline "
                f"rank {self.rank}, which does not lack it; a message was sent twice or to the "
                "wrong rank"
            )
        self._arrivals_missing[number] ^= bit
        if arrival.member == 0:
            self._one_less_here(number)
        self._one_less(number)

    def _one_less_here(self, number: int) -> None:
        self._lacks_here[number] -= 1
        if self._lacks_here[number] == 0:
            self._num_here[self._tasks[number].kind] += 1

    def _one_less(self, number: int) -> None:
        self._lacks[number] -= 1
        if self._lacks[number] == 0:
            self._becomes_ready(number)

    def _becomes_ready(self, number: int) -> None:
        kind = self._tasks[number].kind
        self._num_ready[kind] += 1
        if self._ranks:
            heappush(self._heaps[kind], self._key[number] * len(self._tasks) + number)

    # Decision.

    def _agreed(self, task: Task) -> int:
        number = self._number(task)
        if not self._follows or number is None or self._lacks[number] != 0:
            raise DispatchError(
                f"the group agreed on {task}, which pipeline rank {self.rank} cannot run now; "
                "its leader's books and these differ"
            )
        return number

    def _keys(self) -> list[int]:
        """Each task's rank within its kind, smaller is better: by place, or by chunk and index."""
        if isinstance(self._hint, Order):
            keys = [0] * len(self._tasks)
            for position, task in enumerate(self._hint.rows[self.rank]):
                keys[self._index(task)] = position
            return keys
        shape = self.shape
        keys = []
        for task in self._tasks:
            chunk = shape.chunk_of(task.stage)
            preference = chunk if task.kind is F else shape.num_chunks - 1 - chunk
            keys.append(preference * shape.num_microbatches + task.microbatch)
        return keys

    def _round(self) -> tuple[Kind, ...]:
        """The kinds in the order in which a round asks them; W only when neither has a task."""
        first = self._hint.first if isinstance(self._hint, Turns) else F
        second = self._hint.second if isinstance(self._hint, Turns) else B
        return tuple(kind for kind in (first, second, W) if kind in self.shape.kinds)

    def _turns_after(self, kind: Kind) -> tuple[Kind, ...]:
        """The other half of the round after its first, else the top of a new one."""
        top = self._top_of_round
        if isinstance(self._hint, Turns) and self._hint.in_rounds and kind is top[0]:
            return (*top[1:2], top[0], *top[2:])
        return top

    def _withholds_forwards(self) -> bool:
        return self._limit is not None and self.depth >= self._limit

    def _choice(self) -> int | None:
        """The number of the best task that may run, if there is one and this rank decides."""
        if self._follows:
            return None
        if self._fixed:
            assert self._order is not None
            number = self._order.best
            return number if self._lacks[number] == 0 else None
        best = None
        for kind in self._turns:
            heap = self._heaps[kind]
            if not heap or (kind is F and self._withholds_forwards()):
                continue
            if self._in_turn:
                return heap[0] % len(self._tasks)
            if best is None or (kind is not W and heap[0] < best):
                best = heap[0]
        return None if best is None else best % len(self._tasks)

    def _run(self, now_ns: int, number: int) -> tuple[Instruction, ...]:
        task = self._tasks[number]
        kind = task.kind
        num_ready = self._num_ready
        ready_forwards = 0 if self._withholds_forwards() else num_ready[F]
        ready_backwards = num_ready[B]
        ready = ready_forwards + ready_backwards + num_ready[W]
        self._lacks[number] = -1
        self._num_left -= 1
        num_ready[kind] -= 1
        self._num_here[kind] -= 1
        if self._ranks:
            heappop(self._heaps[kind])
            self._turns = self._turns_after(kind)
        if kind is F:
            self.depth += 1
            self.held += 1
            self.peak_held = max(self.peak_held, self.held)
        elif kind is B:
            self.depth -= 1
        if kind is self._frees_held:
            self.held -= 1
        position, skipped = (-1, -1) if self._order is None else self._order.take(number)
        self._hand_over(task)
        run = RunTask(
            task,
            self.shape.chunk_of(task.stage),
            position,
            ready,
            skipped,
            self.depth,
            self.held,
            ready_forwards,
            ready_backwards,
        )
        if self._waiting is None:
            return (run,)
        cause, since_ns = self._waiting
        self._waiting = None
        return (Waited(cause, since_ns, now_ns), run)

    def _hand_over(self, task: Task) -> None:
        """Count this task, from its dispatch on, to what waits for it on this rank."""
        stage, kind, microbatch = task
        if kind is F and B in self.shape.kinds:
            self._one_less_everywhere(Task(stage, B, microbatch))
        elif kind is B and self.shape.splits_backward:
            self._one_less_everywhere(Task(stage, W, microbatch))
        receiver = self.shape.receiver(task)
        # On the last stage B takes over from F of its own stage, which is counted above.
        if receiver is not None and self.shape.rank_of(receiver.stage) == self.rank:
            self._one_less_everywhere(receiver)

    def _one_less_everywhere(self, task: Task) -> None:
        number = self._index(task)
        self._one_less_here(number)
        self._one_less(number)

    # Waiting.

    def _wait(self, now_ns: int) -> tuple[Instruction, ...]:
        self._turns = self._top_of_round
        cause = self._cause()
        if self._waiting is None:
            self._waiting = (cause, now_ns)
            return (Wait(cause),)
        before, since_ns = self._waiting
        if before is cause:
            return (Wait(cause),)
        self._waiting = (cause, now_ns)
        return (Waited(before, since_ns, now_ns), Wait(cause))

    def _cause(self) -> Cause:
        if self._num_left == len(self._tasks):
            return Cause.WARMUP
        here = sum(self._num_here.values())
        if self._fixed:
            assert self._order is not None
            if self._lacks_here[self._order.best] == 0:
                return Cause.COORDINATION
            if here:
                return Cause.ORDER
        else:
            # Nothing may run by the group's books; what is ready here alone waits for the group.
            withheld = self._num_here[F] if self._withholds_forwards() else 0
            if here > withheld:
                return Cause.COORDINATION
            if withheld:
                return Cause.LIMIT
        return Cause.FORWARD_INPUT if self._best_lacks_forward() else Cause.BACKWARD_INPUT

    def _best_lacks_forward(self) -> bool:
        """Whether the hint's best unfinished task waits, itself or through its F, for an
        activation. Without an order, the oldest unfinished task stands for it."""
        number = (
            next(number for number, lacked in enumerate(self._lacks) if lacked >= 0)
            if self._order is None
            else self._order.best
        )
        best = self._tasks[number]
        return best.kind is F or self._lacks[self._index(best._replace(kind=F))] >= 0
