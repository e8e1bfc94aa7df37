"""The dispatcher: the one place that knows what is ready and what runs next.

Theory of operation. A dispatcher serves one pipeline rank for one step. State enters by `handle`
as a stimulus and leaves as instructions; nothing else changes it, and it reads no clock.

- Every task lacks a number of things: tasks before it on this rank, and one arrival (at each member
  of the rank's group) where a neighbouring rank sends its input. A task that lacks nothing is
  *ready*. Everything counts from the dispatch on, not from completion: the tasks before it, D, what
  is held, and the hint's round; for a rank runs its tasks one at a time, in the sequence of their
  dispatch. That is what lets a group decide for its next task while one runs (`DecideAhead`).
- `ready` dispatch: ready tasks wait in heaps keyed by the hint, which also says which kind goes
  first. Two bounds may withhold them, one at a time:
  `limit` on D, the chunk-forwards minus the chunk-backwards run in this step (paper App. C). Where
  D has reached it, one chunk a rank runs backwards only; several chunks *drain*: microbatches are
  finished one by one in index order, each in the order F0..F(C-1), B(C-1)..B0, and waited for. The
  smallest unfinished microbatch of the whole pipeline can always go on, so no limit deadlocks.
  `hold` on the slots in use, the activations kept from F until W (until B where it is whole). A
  forward of chunk c may start only while fewer than hold - (C - 1 - c) slots are in use: deeper
  chunks have slots reserved. Slots used by chunks up to c then never exceed hold - (C - 1 - c), so
  the successor of the deepest stage that holds an activation is permitted, and no hold from C
  slots on deadlocks. A plain cap would: shallow chunks fill it and nothing can come back.
- `fixed` dispatch: the hint's order is binding; the next task of the row runs or is waited for.
- Group: the ranks that share a collective inside a task run the same sequence. The leader counts
  every member's arrivals and decides; the others run what they are told (`TaskAgreed`). It runs
  the best of what is ready at every member, or, by the paper's rule, what each member would pick
  by itself if all of them pick the same.

An idle interval has one cause. When the cause changes in mid-idle the interval is split.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.causes import Cause
from rrfp.schedule.hints import Hint, Turns, splits_backward
from rrfp.schedule.order import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

F, B, W = Kind.F, Kind.B, Kind.W

_KINDS = (F, B, W)
_F, _B, _W = range(3)
"""Kinds by their place in `_KINDS`, for lists: an enum's hash is a call."""

DEFAULT_LIMIT = 32
"""The paper's limit on D (its App. C), for `ready` dispatch without a bound of its own."""

Turn = tuple[int, ...]
"""Kinds that compete by the hint's keys."""


class Dispatch(StrEnum):
    """What the hint is to the dispatcher."""

    READY = "ready"
    """It ranks what is ready."""
    FIXED = "fixed"
    """Its order is binding."""


class WeightGradients(StrEnum):
    """When an order, used as a hint, runs the weight gradients that are split off the backward."""

    IDLE = "idle"
    """When neither a forward nor a backward may run; the order ranks them among themselves."""
    RANKED = "ranked"
    """By their places in the order, like any other task."""


def check_weight_gradients(w: WeightGradients, hint: Hint) -> None:
    """Raise UsageError when the hint has no places for the weight gradients to be ranked by."""
    if w is WeightGradients.RANKED and not (isinstance(hint, Order) and splits_backward(hint)):
        raise UsageError(
            f"w ranked needs an order that ranks the weight gradients and {hint.name} ranks none; "
            "leave --w out or choose an order such as zb-h1"
        )


class AgreementRule(StrEnum):
    """What a group runs, given what is ready at each of its members."""

    INTERSECTION = "intersection"
    """The best of the tasks that are ready at all of them."""
    UNANIMOUS = "unanimous"
    """What each member would pick by itself, if all pick the same (paper section 4.2)."""


class InputArrived(NamedTuple):
    """Stimulus: what a neighbouring stage sends for a task is here (`member` 0: on this rank;
    another: on that member of the group this rank leads)."""

    task: Task
    member: int = 0


class ComputeIdle(NamedTuple):
    """Stimulus: the compute thread is free, and everything that has arrived was handed in."""


class DecideAhead(NamedTuple):
    """Stimulus: a task is running; decide for the next one already, if something is ready."""


class TaskAgreed(NamedTuple):
    """Stimulus: the compute thread is free, and the group's leader has decided for this task."""

    task: Task


Stimulus = InputArrived | ComputeIdle | DecideAhead | TaskAgreed


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
    """Of those; what a bound withholds is not ready."""
    ready_backwards: int


class Wait(NamedTuple):
    """Instruction: nothing can run; ask again when something has arrived."""

    cause: Cause


_WAITS = {cause: Wait(cause) for cause in Cause}


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
    rule: AgreementRule = AgreementRule.INTERSECTION


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

    def unfinished(self) -> Iterator[int]:
        """The numbers of the unfinished tasks, in the order's sequence."""
        ahead = set(self._taken_ahead)
        for position in range(self._first, len(self._numbers)):
            if position not in ahead:
                yield self._numbers[position]

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


class _ReadySet:
    """What is ready, best first, in the eyes of some members of the group (a bit each in `mask`).

    Entries are the hint's key and the task's number in one integer. An entry stays when its task
    is dispatched, and is dropped when it comes to the top.
    """

    def __init__(self, mask: int, num_chunks: int) -> None:
        self.mask = mask
        # A heap a chunk for the forwards, which bounds withhold by chunk; one for the other kinds.
        forwards: list[list[int]] = [[] for _ in range(num_chunks)]
        backwards: list[int] = []
        weight_gradients: list[int] = []
        self.heaps = (forwards, [backwards], [weight_gradients])
        self.heap_of_lane = [
            *forwards,
            *([backwards] * num_chunks),
            *([weight_gradients] * num_chunks),
        ]


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
        hold: int | None = None,
        w: WeightGradients = WeightGradients.IDLE,
        order: Order | None = None,
        group: Group | None = None,
    ) -> None:
        """Start a step of `shape` on pipeline rank `rank`.

        `limit` bounds D and `hold` the slots in use (activations of one chunk each); they bind
        `ready` dispatch in steps with a backward, and exclude each other. `w` applies to a hint
        that is an order. `order` is the order that the hint gives (`order_of`); positions and
        deviations are counted against it, and `fixed` dispatch needs it. Raises UsageError for a
        limit below 1 or a hold below one slot a chunk, and for both.
        """
        if isinstance(hint, Order):
            order = hint
        if dispatch is Dispatch.FIXED and order is None:
            raise ValueError("fixed dispatch needs the order that its hint gives")
        if order is not None and order.shape != shape:
            raise ValueError(f"order {order.name} is for {order.shape}, not for {shape}")
        if limit is not None and hold is not None:
            raise UsageError(
                f"a limit of {limit} and a hold of {hold} exclude each other; choose one of the two"
            )
        if limit is not None and limit < 1:
            raise UsageError(f"the limit is {limit}; it must be at least 1")
        if hold is not None and hold < shape.num_chunks:
            raise UsageError(
                f"a hold of {hold} slots cannot carry a microbatch through {shape.num_chunks} "
                "chunks; it must be at least one slot a chunk"
            )
        is_bound = B in shape.kinds and dispatch is Dispatch.READY
        self.shape = shape
        self.rank = rank
        self.depth = 0
        self.held = 0
        self.peak_held = 0
        self._hint = hint
        self._w = w
        self._keeps_activations = B in shape.kinds
        self._fixed = dispatch is Dispatch.FIXED
        self._limit = limit if is_bound else None
        self._hold = hold if is_bound else None
        self._follows = group is not None and not group.leads
        self._ranks = not self._fixed and not self._follows
        # A task's number, by which the lists below are indexed, goes by kind, then chunk, then
        # microbatch; its lane, by kind, then chunk.
        num_chunks, num_microbatches = shape.num_chunks, shape.num_microbatches
        self._num_microbatches = num_microbatches
        self._num_of_a_kind = num_chunks * num_microbatches
        self._lanes = [(kind, chunk) for kind in range(3) for chunk in range(num_chunks)]
        self._first_number = {
            stage: shape.chunk_of(stage) * num_microbatches for stage in shape.stages_of(rank)
        }
        self._order = (
            None
            if order is None
            else _OrderProgress([self._index(task) for task in order.rows[rank]])
        )
        self._frees_held = _W if shape.splits_backward else _B
        self._last_kind = len(shape.kinds) - 1

        self._tasks = list(shape.tasks_of(rank))
        self._num_tasks = self._num_left = len(self._tasks)
        num_members = group.num_members if group is not None and group.leads else 1
        everybody = (1 << num_members) - 1
        self._everybody = everybody
        # Tasks of this rank that are to be dispatched before it; below 0 once it was dispatched.
        self._lacks: list[int] = []
        # The members at which its input is still to arrive, one bit each.
        self._missing: list[int] = []
        # Whether a task's output stays on this rank, by lane.
        self._hands_over: list[bool] = []
        for first in self._tasks[::num_microbatches]:
            ranks = [shape.rank_of(needed.stage) for needed in shape.prerequisites(first)]
            comes = any(other != rank for other in ranks)
            self._lacks += [ranks.count(rank)] * num_microbatches
            self._missing += [everybody if comes else 0] * num_microbatches
            receiver = shape.receiver(first)
            self._hands_over.append(receiver is not None and shape.rank_of(receiver.stage) == rank)
        self._key = self._keys()

        self._is_unanimous = group is not None and group.rule is AgreementRule.UNANIMOUS
        masks = [1 << member for member in range(num_members)]
        self._ready_sets = [
            _ReadySet(mask, num_chunks) for mask in (masks if self._is_unanimous else [everybody])
        ]
        self._ready_set = self._ready_sets[0]
        # How many tasks are ready in the group, and by this rank's own inputs; by lane.
        self._num_ready = [0] * (len(_KINDS) * num_chunks)
        self._num_here = [0] * (len(_KINDS) * num_chunks)
        # How many forwards and backwards of each microbatch were dispatched.
        self._progress = [0] * num_microbatches
        self._smallest_unfinished = 0
        self._drains = False
        self._first_open_chunk = 0
        self._top_of_round = self._round()
        self._turns = self._top_of_round
        self._turns_after = [self._half_left_after(kind) for kind in range(3)]
        self._waiting: tuple[Cause, int] | None = None
        self._first_unfinished = 0
        for number, (lacked, missing) in enumerate(zip(self._lacks, self._missing, strict=True)):
            if lacked == 0 and missing != everybody:
                self._is_ready_at(number, everybody & ~missing)

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]:
        """Take in one stimulus and say what follows from it.

        An arrival only changes the books: hand in all that has arrived, then `ComputeIdle`, which
        answers with `RunTask`, `Wait` or `StepDone`, a `Waited` before it where a wait ends.
        `DecideAhead` answers with the `RunTask` that comes next, or with nothing. Raises
        DispatchError for a stimulus that cannot be.
        """
        if type(stimulus) is InputArrived:
            self._take_in(stimulus)
            return ()
        if type(stimulus) is TaskAgreed:
            return self._run(now_ns, self._agreed(stimulus.task))
        choice = None if self._num_left == 0 else self._choice()
        if choice is not None:
            return self._run(now_ns, choice)
        if type(stimulus) is DecideAhead:
            return ()
        return (StepDone(),) if self._num_left == 0 else self._wait(now_ns)

    def unfinished(self) -> list[tuple[Task, int]]:
        """Every task not yet dispatched, and the members at which its input is still to arrive
        (bit i: member i; bit 0: this rank)."""
        return [
            (task, missing)
            for task, lacked, missing in zip(self._tasks, self._lacks, self._missing, strict=True)
            if lacked >= 0
        ]

    def ready_tasks(self) -> list[Task]:
        """The tasks not yet dispatched whose every input is on this rank, withheld ones too."""
        return [task for number, task in enumerate(self._tasks) if self._is_here(number)]

    def best_waiting(self) -> tuple[Task, list[Task]] | None:
        """The hint's best task that lacks an input on this rank, and the tasks whose output it
        lacks, if there is one."""
        for number in self._by_hint():
            if self._lacks[number] >= 0 and not self._is_here(number):
                task = self._tasks[number]
                return task, [
                    needed
                    for needed in self.shape.prerequisites(task)
                    if self._owes(needed, number)
                ]
        return None

    # Books: what each task still lacks.

    def _number(self, task: Task) -> int | None:
        """The number of a task, if this rank has it."""
        stage, kind, microbatch = task
        first = self._first_number.get(stage)
        if first is None or not 0 <= microbatch < self._num_microbatches:
            return None
        if kind is F:
            return first + microbatch
        if kind not in self.shape.kinds:
            return None
        return first + microbatch + self._num_of_a_kind * (_B if kind is B else _W)

    def _index(self, task: Task) -> int:
        """The number of a task that this rank has."""
        number = self._number(task)
        assert number is not None
        return number

    def _take_in(self, arrival: InputArrived) -> None:
        number = self._number(arrival.task)
        bit = 1 << arrival.member
        if number is None or not self._missing[number] & bit:
            raise DispatchError(
                f"the input of {arrival.task} arrived on member {arrival.member} of pipeline "
                f"rank {self.rank}, which does not lack it; a message was sent twice or to the "
                "wrong rank"
            )
        self._missing[number] ^= bit
        if self._lacks[number] == 0:
            self._is_ready_at(number, bit)

    def _one_less(self, number: int) -> None:
        self._lacks[number] -= 1
        if self._lacks[number] == 0:
            members = self._everybody & ~self._missing[number]
            if members:
                self._is_ready_at(number, members)

    def _is_ready_at(self, number: int, members: int) -> None:
        """A task has become ready at these members (bits)."""
        lane = number // self._num_microbatches
        missing = self._missing[number]
        if members & 1:
            self._num_here[lane] += 1
        if missing == 0:
            self._num_ready[lane] += 1
        if self._ranks:
            entry = self._key[number] * self._num_tasks + number
            for ready in self._ready_sets:
                if members & ready.mask and not missing & ready.mask:
                    heappush(ready.heap_of_lane[lane], entry)

    def _is_here(self, number: int) -> bool:
        return self._lacks[number] == 0 and not self._missing[number] & 1

    def _owes(self, needed: Task, number: int) -> bool:
        """Whether a prerequisite of a task has not been dispatched, or not arrived, here."""
        if self.shape.rank_of(needed.stage) == self.rank:
            return self._lacks[self._index(needed)] >= 0
        return bool(self._missing[number] & 1)

    def _by_hint(self) -> Iterator[int]:
        return iter(range(len(self._tasks))) if self._order is None else self._order.unfinished()

    # Decision.

    def _agreed(self, task: Task) -> int:
        number = self._number(task)
        if not self._follows or number is None or not self._is_here(number):
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
        num_chunks, num_microbatches = self.shape.num_chunks, self.shape.num_microbatches
        keys = []
        for kind in range(len(self.shape.kinds)):
            prefers_shallow = kind == _F and not self._hint.deep
            for chunk in range(num_chunks):
                preference = chunk if prefers_shallow else num_chunks - 1 - chunk
                start = preference * num_microbatches
                keys += range(start, start + num_microbatches)
        return keys

    def _round(self) -> tuple[Turn, ...]:
        """What is asked, in turn; the kinds of one turn compete by their keys."""
        if isinstance(self._hint, Turns):
            turns: tuple[Turn, ...] = ((_F,), (_B,)) if self._hint.first is F else ((_B,), (_F,))
        elif self._w is WeightGradients.RANKED:
            return ((_F, _B, _W),)
        else:
            turns = ((_F, _B),)
        return (*turns, (_W,)) if self.shape.splits_backward else turns

    def _half_left_after(self, kind: int) -> tuple[Turn, ...]:
        """The other half of the round after its first, else the top of a new one."""
        top = self._top_of_round
        if isinstance(self._hint, Turns) and self._hint.in_rounds and kind == top[0][0]:
            return (top[1], top[0], *top[2:])
        return top

    def _choice(self) -> int | None:
        """The number of the best task that may run, if there is one and this rank decides."""
        if self._follows:
            return None
        if self._fixed:
            assert self._order is not None
            number = self._order.best
            return number if self._is_ready(number, self._everybody) else None
        choice = self._best(self._ready_set)
        if self._is_unanimous and any(self._best(each) != choice for each in self._ready_sets):
            return None
        return choice

    def _is_ready(self, number: int, mask: int) -> bool:
        return self._lacks[number] == 0 and not self._missing[number] & mask

    def _best(self, ready: _ReadySet) -> int | None:
        """The number of the best task in this set that no bound withholds."""
        turns = self._turns
        if self._drains:
            number = self._next_to_drain()
            if self._is_ready(number, ready.mask):
                return number
            turns = ((_W,),)
        lacks, num_tasks, withheld = self._lacks, self._num_tasks, self._first_open_chunk
        for turn in turns:
            best = None
            for kind in turn:
                heaps = ready.heaps[kind]
                if kind == _F and withheld:
                    heaps = heaps[withheld:]
                for heap in heaps:
                    while heap and lacks[heap[0] % num_tasks] < 0:
                        heappop(heap)
                    if heap and (best is None or heap[0] < best):
                        best = heap[0]
            if best is not None:
                return best % num_tasks
        return None

    # Bounds.

    def _apply_bounds(self) -> None:
        """Work out what D, or the slots in use, withhold from now on: forwards of the chunks below
        the first open one, and while this rank drains all but one microbatch."""
        num_chunks = self.shape.num_chunks
        if self._hold is not None:
            self._first_open_chunk = max(0, num_chunks - (self._hold - self.held))
        elif self._limit is not None:
            is_at_limit = self.depth >= self._limit
            self._first_open_chunk = num_chunks if is_at_limit else 0
            self._drains = is_at_limit and num_chunks > 1

    def _next_to_drain(self) -> int:
        """The next task of the smallest unfinished microbatch; its tasks run in this order anyway,
        as each needs the one before it."""
        num_chunks, num_microbatches = self.shape.num_chunks, self.shape.num_microbatches
        while self._progress[self._smallest_unfinished] == 2 * num_chunks:
            self._smallest_unfinished += 1
        progress = self._progress[self._smallest_unfinished]
        # Numbers go by kind, chunk and microbatch; backwards run from the deepest chunk.
        place = progress if progress < num_chunks else 3 * num_chunks - 1 - progress
        return place * num_microbatches + self._smallest_unfinished

    def _permitted(self, counts: list[int], mask: int) -> tuple[int, int, int]:
        """How many forwards, backwards and weight gradients of `counts`, by lane, no bound
        withholds; the counts are those of the members in `mask`."""
        num_chunks = self.shape.num_chunks
        if num_chunks == 1:
            # What the sums below come to, without making lists: most pipelines are such.
            forwards, backwards, weight_gradients = counts
            return 0 if self._first_open_chunk else forwards, backwards, weight_gradients
        weight_gradients = sum(counts[2 * num_chunks :])
        if self._drains:
            number = self._next_to_drain()
            drains = int(self._is_ready(number, mask))
            is_forward = number < self._num_of_a_kind
            return drains * is_forward, drains * (not is_forward), weight_gradients
        forwards = sum(counts[self._first_open_chunk : num_chunks])
        return forwards, sum(counts[num_chunks : 2 * num_chunks]), weight_gradients

    # Dispatch.

    def _run(self, now_ns: int, number: int) -> tuple[Instruction, ...]:
        lane = number // self._num_microbatches
        kind, chunk = self._lanes[lane]
        forwards, backwards, weight_gradients = self._permitted(self._num_ready, self._everybody)
        self._lacks[number] = -1
        self._num_left -= 1
        self._num_ready[lane] -= 1
        self._num_here[lane] -= 1
        self._turns = self._turns_after[kind]
        if kind != _W:
            self._progress[number % self._num_microbatches] += 1
        if kind == _F:
            self.depth += 1
            # A step without backward keeps nothing.
            self.held += self._keeps_activations
            if self.held > self.peak_held:
                self.peak_held = self.held
        elif kind == _B:
            self.depth -= 1
        if kind == self._frees_held:
            self.held -= 1
        self._apply_bounds()
        position, skipped = (-1, -1) if self._order is None else self._order.take(number)
        self._hand_over(number, kind, lane)
        run = RunTask(
            self._tasks[number],
            chunk,
            position,
            forwards + backwards + weight_gradients,
            skipped,
            self.depth,
            self.held,
            forwards,
            backwards,
        )
        if self._waiting is None:
            return (run,)
        cause, since_ns = self._waiting
        self._waiting = None
        return (Waited(cause, since_ns, now_ns), run)

    def _hand_over(self, number: int, kind: int, lane: int) -> None:
        """Count this task, from its dispatch on, to what waits for it on this rank: the next kind
        of its own stage, and the same kind of the next stage where that is here too."""
        if kind != self._last_kind:
            self._one_less(number + self._num_of_a_kind)
        if self._hands_over[lane]:
            to_next_stage = self._num_microbatches if kind == _F else -self._num_microbatches
            self._one_less(number + to_next_stage)

    # Waiting.

    def _wait(self, now_ns: int) -> tuple[Instruction, ...]:
        self._turns = self._top_of_round
        cause = self._cause()
        if self._waiting is None:
            self._waiting = (cause, now_ns)
            return (_WAITS[cause],)
        before, since_ns = self._waiting
        if before is cause:
            return (_WAITS[cause],)
        self._waiting = (cause, now_ns)
        return (Waited(before, since_ns, now_ns), _WAITS[cause])

    def _cause(self) -> Cause:
        if self._num_left == self._num_tasks:
            return Cause.WARMUP
        is_any_here = any(self._num_here)
        if self._fixed:
            assert self._order is not None
            if self._is_here(self._order.best):
                return Cause.COORDINATION
            if is_any_here:
                return Cause.ORDER
        elif is_any_here:
            # Nothing may run by the group's books; what may run by this rank's waits for the group.
            if any(self._permitted(self._num_here, 1)):
                return Cause.COORDINATION
            return Cause.LIMIT if self._hold is None else Cause.HOLD
        return Cause.FORWARD_INPUT if self._best_lacks_forward() else Cause.BACKWARD_INPUT

    def _best_lacks_forward(self) -> bool:
        """Whether the hint's best unfinished task waits, itself or through its F, for an
        activation. Without an order, the first of the unfinished tasks stands for it."""
        if self._order is None:
            while self._lacks[self._first_unfinished] < 0:
                self._first_unfinished += 1
            best = self._first_unfinished
        else:
            best = self._order.best
        # Its F, or it itself: the numbers of the forwards come first.
        return self._lacks[best % self._num_of_a_kind] >= 0
