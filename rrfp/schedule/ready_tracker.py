"""The state of a rank's tasks in one step: the inputs that each still needs, and which are ready.

Tasks are identified by numbers, because indexing a list is much faster than hashing a task. The
tasks of a rank form a table with a row for each kind and chunk (by kind, then chunk) and a column
for each microbatch. The number of a task is `row * num_microbatches + microbatch`, which is its
index in `Shape.tasks_of`.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from rrfp.schedule.hints import Tier
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

FORWARD: Final = 0
BACKWARD: Final = 1
WEIGHT_GRADIENT: Final = 2
KINDS: Final = (Kind.F, Kind.B, Kind.W)
"""The kinds by their indices."""

NO_TASK: Final = -1
"""Placeholder for the number of a task that does not exist."""
NO_RANK: Final = -1
"""Placeholder for a rank that does not exist."""


class TaskIndex:
    """The table of one rank's tasks: constants of every step of a shape, in lists by row."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape = shape
        self.rank = rank
        self.num_chunks = shape.num_chunks
        self.num_microbatches = shape.num_microbatches
        self.num_per_kind = shape.num_chunks * shape.num_microbatches
        """The number of tasks of a kind. Adding it to a task's number gives the number of the next
        kind of the same microbatch on the same stage."""
        self.num_tasks = shape.num_tasks_of_a_rank
        self.kinds: list[int] = []
        """Indices into `KINDS`."""
        self.chunks: list[int] = []
        self.stages: list[int] = []
        self.num_local_inputs: list[int] = []
        """How many tasks of this rank must run before each of the row's tasks."""
        self.has_remote_input: list[bool] = []
        """Whether another rank sends the tasks' inputs."""
        self.feeds_own_rank: list[bool] = []
        """Whether this rank consumes the tasks' outputs."""
        self.output_rank: list[int] = []
        """The other rank that consumes the tasks' outputs, or `NO_RANK`."""
        self.output_row: list[int] = []
        """The row of the tasks that consume the outputs, on this rank or another."""
        for kind, name in enumerate(shape.kinds):
            for chunk, stage in enumerate(shape.stages_of(rank)):
                first = Task(stage, name, 0)
                sources = [shape.rank_of(needed.stage) for needed in shape.prerequisites(first)]
                self.kinds.append(kind)
                self.chunks.append(chunk)
                self.stages.append(stage)
                self.num_local_inputs.append(sources.count(rank))
                self.has_remote_input.append(any(source != rank for source in sources))
                consumer = shape.receiver(first)
                to_rank = NO_RANK if consumer is None else shape.rank_of(consumer.stage)
                self.feeds_own_rank.append(to_rank == rank)
                self.output_rank.append(NO_RANK if to_rank == rank else to_rank)
                self.output_row.append(
                    0 if consumer is None else shape.index_of(consumer) // shape.num_microbatches
                )

    def task(self, number: int) -> Task:
        """Return the task with this number."""
        row, microbatch = divmod(number, self.num_microbatches)
        return Task(self.stages[row], KINDS[self.kinds[row]], microbatch)

    def number(self, task: Task) -> int:
        """Return the number of a task; `NO_TASK` if this rank does not run it."""
        shape = self.shape
        return shape.index_of(task) if shape.holds(self.rank, task) else NO_TASK


@lru_cache(maxsize=4096)
def task_index(shape: Shape, rank: int) -> TaskIndex:
    """Return the task index of a pipeline rank; cached by shape and rank."""
    return TaskIndex(shape, rank)


# Compiled code finds these faster than a module's globals.
_pop: Final = heappop
_push: Final = heappush


HeapTiers = tuple[tuple[int, ...], ...]
"""The tiers of a hint, best first, as indices of a ready set's heaps."""


class ReadySet:
    """The tasks that are ready at all members of `mask` (one bit per member), best first.

    An entry packs the hint's key and the task's number into one integer. It stays when its task is
    dispatched, and is dropped when it reaches the top.
    """

    def __init__(self, mask: int, num_chunks: int) -> None:
        self.mask = mask
        self.heaps: list[list[int]] = [[] for _ in range(num_chunks + 2)]
        """The forwards of each chunk, because bounds withhold them by chunk; then all backwards,
        and all weight gradients."""
        self.heap_of_row = [
            *self.heaps[:num_chunks],
            *([self.heaps[num_chunks]] * num_chunks),
            *([self.heaps[num_chunks + 1]] * num_chunks),
        ]


@lru_cache(maxsize=256)
def heaps_by_tier(tiers: tuple[Tier, ...], num_chunks: int) -> HeapTiers:
    """Convert tiers of kinds to tiers of heap indices (`ReadySet.heaps`); cached."""
    heaps = {
        Kind.F: tuple(range(num_chunks)),
        Kind.B: (num_chunks,),
        Kind.W: (num_chunks + 1,),
    }
    return tuple([tuple([heap for kind in tier for heap in heaps[kind]]) for tier in tiers])


class ReadyTracker:
    """Tracks which tasks of one rank, perhaps the leader of a group, are ready. A task counts as
    done once it is dispatched."""

    def __init__(
        self, shape: Shape, rank: int, keys: list[int], num_members: int, masks: Iterable[int]
    ) -> None:
        """Start a step. `keys` are the hint's, by task number. Each of `masks` (a set of members,
        as bits) gets a ready set of its own."""
        self.shape = shape
        self.rank = rank
        self.index = index = task_index(shape, rank)
        self.num_tasks = self.num_unfinished = index.num_tasks
        self.num_microbatches = index.num_microbatches
        self.num_per_kind = index.num_per_kind
        self.all_members = (1 << num_members) - 1
        self.unmet: list[int] = []
        """By number: how many tasks of this rank must be dispatched first; negative once the task
        itself was dispatched."""
        self.missing: list[int] = []
        """By number: the members at which its input has yet to arrive, one bit each."""
        num_rows = len(KINDS) * shape.num_chunks
        self.num_ready = [0] * num_rows
        """By row: how many tasks are ready at all members."""
        # Without a group, both counts are the same list.
        self._is_alone = num_members == 1
        self.num_ready_here = self.num_ready if self._is_alone else [0] * num_rows
        """By row: how many tasks are ready as far as this rank's own inputs are concerned."""
        self.ready_sets = [ReadySet(mask, shape.num_chunks) for mask in masks]
        self._keys = keys
        self._num_bits = self.num_tasks.bit_length()
        self._number_bits = (1 << self._num_bits) - 1
        self._last_kind = len(shape.kinds) - 1
        self._feeds_own_rank = index.feeds_own_rank
        for row in range(len(index.kinds)):
            unmet = index.num_local_inputs[row]
            is_remote = index.has_remote_input[row]
            self.unmet += [unmet] * self.num_microbatches
            self.missing += [self.all_members if is_remote else 0] * self.num_microbatches
            if not unmet and not is_remote:
                self._add_ready_row(row)

    def _add_ready_row(self, row: int) -> None:
        """Mark all tasks of a row as ready from the start: in the counts, and in the heaps of all
        ready sets."""
        self.num_ready_here[row] = self.num_ready[row] = self.num_microbatches
        first = row * self.num_microbatches
        for ready in self.ready_sets:
            heap = ready.heap_of_row[row]
            heap += [self.entry(number) for number in range(first, first + self.num_microbatches)]
            heapify(heap)

    # Queries.

    def has_remote_input(self, number: int) -> bool:
        """True if another rank sends this task's input."""
        return self.index.has_remote_input[number // self.num_microbatches]

    def is_unfinished(self, number: int) -> bool:
        """True if a task has yet to be dispatched."""
        return self.unmet[number] >= 0

    def is_ready_here(self, number: int) -> bool:
        """True if a task was not dispatched and all of its inputs are on this rank, whatever other
        members lack."""
        return self.unmet[number] == 0 and not self.missing[number] & 1

    def is_ready(self, number: int, mask: int) -> bool:
        """True if a task was not dispatched and all of its inputs have arrived at all members of
        the mask."""
        return self.unmet[number] == 0 and not self.missing[number] & mask

    def entry(self, number: int) -> int:
        """Return the entry of a task in the heaps of ready sets, which packs its key and number
        into one integer; the smaller of two is better."""
        return self._keys[number] << self._num_bits | number

    def number_in_entry(self, entry: int) -> int:
        """Return the number of the task that a heap's entry stands for."""
        return entry & self._number_bits

    def best(self, heap: list[int]) -> int:
        """Return the best entry of a ready set's heap without removing it, or `NO_TASK`. Entries of
        dispatched tasks above it are removed."""
        unmet, number_bits = self.unmet, self._number_bits
        while heap:
            entry = heap[0]
            if unmet[entry & number_bits] >= 0:
                return entry
            _pop(heap)
        return NO_TASK

    def best_ready_forward(self, chunk: int, mask: int) -> int:
        """Return the number of the best forward, by the hint's keys, of those of a chunk that are
        ready at all members of the mask. At least one must be."""
        first = chunk * self.num_microbatches
        ready = [
            number
            for number in range(first, first + self.num_microbatches)
            if self.is_ready(number, mask)
        ]
        return min(ready, key=self._keys.__getitem__)

    def unmet_prerequisites(self, number: int) -> tuple[Task, ...]:
        """Return the tasks whose output a task still needs on this rank: those of this rank that
        were not dispatched, and those of other ranks whose output has not arrived here."""
        needed = self.shape.prerequisites(self.index.task(number))
        return tuple([each for each in needed if self._is_unmet(each, number)])

    def _is_unmet(self, needed: Task, number: int) -> bool:
        """True if a prerequisite of the task `number` is one of this rank that was not dispatched,
        or one of another rank whose output has not arrived at this rank (member 0)."""
        if self.shape.rank_of(needed.stage) == self.rank:
            return self.unmet[self.shape.index_of(needed)] >= 0
        return bool(self.missing[number] & 1)

    # Changes.

    def mark_arrived(self, number: int, bit: int) -> None:
        """Record that the missing input of a task has arrived at a member, given as a bit; a task
        that lacks nothing else there may become ready. The caller checks that it was missing."""
        self.missing[number] ^= bit
        if self.unmet[number] == 0:
            self._mark_ready(number, bit)

    def mark_dispatched(self, number: int, row: int) -> None:
        """Count a task as dispatched: it is no longer unfinished or ready. `credit_dependents` must
        follow."""
        self.unmet[number] = -1
        self.num_unfinished -= 1
        self.num_ready[row] -= 1
        if not self._is_alone:
            self.num_ready_here[row] -= 1

    def credit_dependents(self, number: int, kind: int, row: int) -> None:
        """Credit a dispatched task to the tasks of this rank that need it, which may become ready:
        the next kind on its own stage, and the task that consumes its output, if that is on this
        rank too."""
        if kind != self._last_kind:
            self._decrement_unmet(number + self.num_per_kind)
        if self._feeds_own_rank[row]:
            goes_up = kind == FORWARD
            step = self.num_microbatches if goes_up else -self.num_microbatches
            self._decrement_unmet(number + step)

    def _decrement_unmet(self, number: int) -> None:
        """Record that one more of a task's prerequisites on this rank is met. With the last one it
        becomes ready at the members that have its input."""
        unmet = self.unmet[number] - 1
        self.unmet[number] = unmet
        if unmet == 0:
            members = self.all_members & ~self.missing[number]
            if members:
                self._mark_ready(number, members)

    def _mark_ready(self, number: int, members: int) -> None:
        """Add a task that has become ready at these members (bits) to the counts, and to the ready
        sets all of whose members now have its input."""
        row = number // self.num_microbatches
        missing = self.missing[number]
        if missing == 0:
            self.num_ready[row] += 1
        if not self._is_alone and members & 1:
            self.num_ready_here[row] += 1
        for ready in self.ready_sets:
            if members & ready.mask and not missing & ready.mask:
                _push(ready.heap_of_row[row], self.entry(number))

    # Invariants.

    def find_inconsistency(self) -> str | None:
        """Return the name of the first part of the state that contradicts the rest; None if all
        agree. It raises and repairs nothing, and takes time linear in the tasks of the step."""
        left = [number for number in range(self.num_tasks) if self.is_unfinished(number)]
        here = [number for number in left if self.is_ready_here(number)]
        ready = [number for number in left if self.is_ready(number, self.all_members)]
        checks = {
            "the count of unfinished tasks": self.num_unfinished == len(left),
            "the counts of ready tasks": self.num_ready == self._count_by_row(ready),
            "the counts of tasks ready here": self.num_ready_here == self._count_by_row(here),
            "a task's unmet prerequisites": all(
                self.unmet[number] == self._count_unmet(number) for number in left
            ),
            "a ready task that is not in its heap": all(
                self.entry(number) in entries
                for each in self.ready_sets
                for entries in [set().union(*each.heaps)]
                for number in left
                if self.is_ready(number, each.mask)
            ),
        }
        return next((what for what, holds in checks.items() if not holds), None)

    def depth(self) -> int:
        """Recount D, the forwards minus the backwards dispatched, from the state of each task."""
        return self._num_dispatched(FORWARD) - self._num_dispatched(BACKWARD)

    def _num_dispatched(self, kind: int) -> int:
        """Count the dispatched tasks of a kind."""
        of_kind = self.unmet[kind * self.num_per_kind : (kind + 1) * self.num_per_kind]
        return sum([unmet < 0 for unmet in of_kind])

    def _count_by_row(self, numbers: Iterable[int]) -> list[int]:
        """Count these tasks by row of the table (kind and chunk); 0 for a row without any."""
        counts = Counter([number // self.num_microbatches for number in numbers])
        return [counts[row] for row in range(len(self.num_ready_here))]

    def _count_unmet(self, number: int) -> int:
        """Count the prerequisites of a task on this rank that have yet to be dispatched."""
        rank_of = self.shape.rank_of
        needed = self.shape.prerequisites(self.index.task(number))
        local = [self.shape.index_of(each) for each in needed if rank_of(each.stage) == self.rank]
        return sum([self.is_unfinished(each) for each in local])
