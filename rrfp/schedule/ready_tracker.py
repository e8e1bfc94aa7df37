"""A rank's books of one step: what each of its tasks still lacks, and which are ready.

Tasks go by their numbers (`rrfp.schedule.ready_tracker`).
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from rrfp.schedule.hints import Tier
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

# Lanes: what a rank runs of one kind on one chunk.
#
# Lanes run by kind, then chunk. A task's *number* is its index among the tasks of its rank
# (`Shape.tasks_of`): `lane * num_microbatches + microbatch`. Whoever decides or simulates goes by
# numbers, because indexing a list is much faster than hashing a task.


FORWARD: Final = 0
BACKWARD: Final = 1
WEIGHT_GRADIENT: Final = 2
KINDS: Final = (Kind.F, Kind.B, Kind.W)
"""Kinds by their places in a shape's."""

NOTHING: Final = -1
"""In the place of a task's number: none."""
NO_RANK: Final = -1


class Lanes:
    """The lanes of one rank, which are the same in every step of a shape."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape = shape
        self.rank = rank
        self.num_chunks = shape.num_chunks
        self.num_microbatches = shape.num_microbatches
        self.num_of_a_kind = shape.num_chunks * shape.num_microbatches
        """The tasks of a kind, which is also how far a task's number is from that of the next kind
        on its stage."""
        self.num_tasks = shape.num_tasks_of_a_rank
        # Of each lane:
        self.kinds: list[int] = []
        """Its kind, as a place in `KINDS`."""
        self.chunks: list[int] = []
        self.stages: list[int] = []
        self.num_lacked: list[int] = []
        """How many tasks of this rank must run before each of its tasks."""
        self.comes: list[bool] = []
        """Whether another rank sends its tasks' inputs."""
        self.hands_over: list[bool] = []
        """Whether this rank takes its tasks' outputs."""
        self.to_rank: list[int] = []
        """The other rank that takes its tasks' outputs, or `NO_RANK`."""
        self.to_lane: list[int] = []
        """The lane of the tasks that take them, on whatever rank."""
        for kind, name in enumerate(shape.kinds):
            for chunk, stage in enumerate(shape.stages_of(rank)):
                first = Task(stage, name, 0)
                givers = [shape.rank_of(needed.stage) for needed in shape.prerequisites(first)]
                self.kinds.append(kind)
                self.chunks.append(chunk)
                self.stages.append(stage)
                self.num_lacked.append(givers.count(rank))
                self.comes.append(any(giver != rank for giver in givers))
                taker = shape.receiver(first)
                taken_by = NO_RANK if taker is None else shape.rank_of(taker.stage)
                self.hands_over.append(taken_by == rank)
                self.to_rank.append(NO_RANK if taken_by == rank else taken_by)
                self.to_lane.append(
                    0 if taker is None else shape.index_of(taker) // shape.num_microbatches
                )

    def task(self, number: int) -> Task:
        """The task of this number."""
        lane, microbatch = divmod(number, self.num_microbatches)
        return Task(self.stages[lane], KINDS[self.kinds[lane]], microbatch)

    def number(self, task: Task) -> int:
        """The number of a task; `NOTHING` if this rank does not have it."""
        shape = self.shape
        return shape.index_of(task) if shape.holds(self.rank, task) else NOTHING


@lru_cache(maxsize=4096)
def lanes_of(shape: Shape, rank: int) -> Lanes:
    """The lanes of a rank of a pipeline of this shape."""
    return Lanes(shape, rank)


# Compiled code finds these faster than a module's globals.
_pop: Final = heappop
_push: Final = heappush


Tiers = tuple[tuple[int, ...], ...]
"""Heaps of a ready set whose tasks compete, by their places in it, the best tier first."""


class ReadySet:
    """The tasks ready at all members of `mask` (one bit per member), best first.

    An entry packs the hint's key and the task's number into one integer. It stays when its task
    is dispatched, and is dropped when it reaches the top.
    """

    def __init__(self, mask: int, num_chunks: int) -> None:
        self.mask = mask
        self.heaps: list[list[int]] = [[] for _ in range(num_chunks + 2)]
        """The forwards of each chunk, because bounds withhold them by chunk; then all backwards,
        and all weight gradients."""
        self.heap_of_lane = [
            *self.heaps[:num_chunks],
            *([self.heaps[num_chunks]] * num_chunks),
            *([self.heaps[num_chunks + 1]] * num_chunks),
        ]


@lru_cache(maxsize=256)
def by_heap(tiers: tuple[Tier, ...], num_chunks: int) -> Tiers:
    """The tiers as places of a ready set's heaps."""
    heaps = {
        Kind.F: tuple(range(num_chunks)),
        Kind.B: (num_chunks,),
        Kind.W: (num_chunks + 1,),
    }
    return tuple([tuple([heap for kind in tier for heap in heaps[kind]]) for tier in tiers])


class Books:
    """What one rank, perhaps the leader of a group, knows about its tasks. A task counts as done
    once dispatched."""

    def __init__(
        self, shape: Shape, rank: int, keys: list[int], num_members: int, masks: Iterable[int]
    ) -> None:
        """`keys` come from the hint. Each mask (a set of members) gets its own sorted ready set."""
        self.shape = shape
        self.rank = rank
        self.lanes = lanes = lanes_of(shape, rank)
        self.num_tasks = self.num_left = lanes.num_tasks
        self.num_microbatches = lanes.num_microbatches
        self.num_of_a_kind = lanes.num_of_a_kind
        self.everybody = (1 << num_members) - 1
        self.lacks: list[int] = []
        """By number: how many tasks of this rank must be dispatched first; negative once the task
        itself was dispatched."""
        self.missing: list[int] = []
        """By number: the members at which its input has yet to arrive, one bit each."""
        num_lanes = len(KINDS) * shape.num_chunks
        self.num_ready = [0] * num_lanes
        """By lane: how many tasks are ready at all members."""
        # A rank without a group counts both as one.
        self._is_alone = num_members == 1
        self.num_here = self.num_ready if self._is_alone else [0] * num_lanes
        """By lane: how many are ready as far as this rank's own inputs go."""
        self.ready_sets = [ReadySet(mask, shape.num_chunks) for mask in masks]
        self._keys = keys
        self._num_bits = self.num_tasks.bit_length()
        self._number_bits = (1 << self._num_bits) - 1
        self._last_kind = len(shape.kinds) - 1
        self._hands_over = lanes.hands_over
        for lane in range(len(lanes.kinds)):
            lacked = lanes.num_lacked[lane]
            comes = lanes.comes[lane]
            self.lacks += [lacked] * self.num_microbatches
            self.missing += [self.everybody if comes else 0] * self.num_microbatches
            if not lacked and not comes:
                self._begins_ready(lane)

    def _begins_ready(self, lane: int) -> None:
        """A lane lacks nothing from the start."""
        self.num_here[lane] = self.num_ready[lane] = self.num_microbatches
        first = lane * self.num_microbatches
        for ready in self.ready_sets:
            heap = ready.heap_of_lane[lane]
            heap += [self.entry(number) for number in range(first, first + self.num_microbatches)]
            heapify(heap)

    # Queries.

    def comes(self, number: int) -> bool:
        """Whether another rank sends this task's input."""
        return self.lanes.comes[number // self.num_microbatches]

    def is_left(self, number: int) -> bool:
        return self.lacks[number] >= 0

    def is_here(self, number: int) -> bool:
        """Whether all of a task's inputs are on this rank."""
        return self.lacks[number] == 0 and not self.missing[number] & 1

    def is_ready(self, number: int, mask: int) -> bool:
        """Whether all of a task's inputs have arrived at all members of the mask."""
        return self.lacks[number] == 0 and not self.missing[number] & mask

    def entry(self, number: int) -> int:
        """What stands for a task in a ready set."""
        return self._keys[number] << self._num_bits | number

    def number_of(self, entry: int) -> int:
        """The task that an entry stands for."""
        return entry & self._number_bits

    def best(self, heap: list[int]) -> int:
        """The best entry of a ready set's heap; `NOTHING` if it is empty."""
        lacks, number_bits = self.lacks, self._number_bits
        while heap:
            entry = heap[0]
            if lacks[entry & number_bits] >= 0:
                return entry
            _pop(heap)
        return NOTHING

    def best_forward(self, chunk: int, mask: int) -> int:
        """The number of the best forward of a chunk that is ready at all members of the mask, of
        which there must be one."""
        first = chunk * self.num_microbatches
        ready = [
            number
            for number in range(first, first + self.num_microbatches)
            if self.is_ready(number, mask)
        ]
        return min(ready, key=self._keys.__getitem__)

    def lacking(self, number: int) -> tuple[Task, ...]:
        """The tasks whose output a task still needs on this rank."""
        needed = self.shape.prerequisites(self.lanes.task(number))
        return tuple([each for each in needed if self._owes(each, number)])

    def _owes(self, needed: Task, number: int) -> bool:
        """Whether a prerequisite of a task has not been dispatched, or not arrived, here."""
        if self.shape.rank_of(needed.stage) == self.rank:
            return self.lacks[self.shape.index_of(needed)] >= 0
        return bool(self.missing[number] & 1)

    # Changes.

    def arrived(self, number: int, bit: int) -> None:
        """Note that an input a task lacked has arrived at a member."""
        self.missing[number] ^= bit
        if self.lacks[number] == 0:
            self._becomes_ready(number, bit)

    def dispatched(self, number: int, lane: int) -> None:
        """Count a task as done."""
        self.lacks[number] = -1
        self.num_left -= 1
        self.num_ready[lane] -= 1
        if not self._is_alone:
            self.num_here[lane] -= 1

    def hand_over(self, number: int, kind: int, lane: int) -> None:
        """Credit a dispatched task to the tasks waiting for it on this rank: the next kind on its
        own stage, and the same kind on the next stage if that is here too."""
        if kind != self._last_kind:
            self._one_less(number + self.num_of_a_kind)
        if self._hands_over[lane]:
            ahead = kind == FORWARD
            self._one_less(number + (self.num_microbatches if ahead else -self.num_microbatches))

    def _one_less(self, number: int) -> None:
        lacked = self.lacks[number] - 1
        self.lacks[number] = lacked
        if lacked == 0:
            members = self.everybody & ~self.missing[number]
            if members:
                self._becomes_ready(number, members)

    def _becomes_ready(self, number: int, members: int) -> None:
        """A task has become ready at these members (bits)."""
        lane = number // self.num_microbatches
        missing = self.missing[number]
        if missing == 0:
            self.num_ready[lane] += 1
        if not self._is_alone and members & 1:
            self.num_here[lane] += 1
        for ready in self.ready_sets:
            if members & ready.mask and not missing & ready.mask:
                _push(ready.heap_of_lane[lane], self.entry(number))

    # Invariants.

    def contradiction(self) -> str | None:
        """Which part of the books contradicts the rest, in a few words; None if all agree. Takes
        time linear in the tasks of the step."""
        left = [number for number in range(self.num_tasks) if self.is_left(number)]
        here = [number for number in left if self.is_here(number)]
        ready = [number for number in left if self.is_ready(number, self.everybody)]
        agreements = {
            "the count of tasks left": self.num_left == len(left),
            "the counts of tasks that are ready": self.num_ready == self._by_lane(ready),
            "the counts of tasks that are here": self.num_here == self._by_lane(here),
            "what a task lacks here": all(
                self.lacks[number] == self._num_owed_here(number) for number in left
            ),
            "a task that is ready and not in its heap": all(
                self.entry(number) in entries
                for each in self.ready_sets
                for entries in [set().union(*each.heaps)]
                for number in left
                if self.is_ready(number, each.mask)
            ),
        }
        return next((what for what, holds in agreements.items() if not holds), None)

    def depth(self) -> int:
        """The forwards minus the backwards dispatched, counted anew."""
        return self._num_dispatched(FORWARD) - self._num_dispatched(BACKWARD)

    def _num_dispatched(self, kind: int) -> int:
        of_kind = self.lacks[kind * self.num_of_a_kind : (kind + 1) * self.num_of_a_kind]
        return sum([lacked < 0 for lacked in of_kind])

    def _by_lane(self, numbers: Iterable[int]) -> list[int]:
        counts = Counter([number // self.num_microbatches for number in numbers])
        return [counts[lane] for lane in range(len(self.num_here))]

    def _num_owed_here(self, number: int) -> int:
        """How many tasks of this rank have yet to be dispatched before this one."""
        rank_of = self.shape.rank_of
        needed = self.shape.prerequisites(self.lanes.task(number))
        mine = [self.shape.index_of(each) for each in needed if rank_of(each.stage) == self.rank]
        return sum([self.is_left(each) for each in mine])
