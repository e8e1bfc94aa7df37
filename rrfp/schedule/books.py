"""A rank's books of one step: what each of its tasks still lacks, and which are ready.

A task's *number* indexes the lists; numbers run by kind, then chunk, then microbatch. Its *lane*
runs by kind, then chunk. A kind is its place in F, B, W, because indexing a list is much faster
than hashing an enum.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappush

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task


class ReadySet:
    """The tasks ready at all members of `mask` (one bit per member), best first.

    An entry packs the hint's key and the task's number into one integer. It stays when its task
    is dispatched, and is dropped when it reaches the top.
    """

    def __init__(self, mask: int, num_chunks: int) -> None:
        self.mask = mask
        # Forwards have a heap per chunk, because bounds withhold them by chunk.
        forwards: list[list[int]] = [[] for _ in range(num_chunks)]
        backwards: list[int] = []
        weight_gradients: list[int] = []
        self.heaps = (forwards, [backwards], [weight_gradients])
        self.heap_of_lane = [
            *forwards,
            *([backwards] * num_chunks),
            *([weight_gradients] * num_chunks),
        ]


class Books:
    """What one rank, perhaps the leader of a group, knows about its tasks. A task counts as done
    once dispatched."""

    def __init__(
        self, shape: Shape, rank: int, keys: Sequence[int], num_members: int, masks: Iterable[int]
    ) -> None:
        """`keys` come from the hint. Each mask (a set of members) gets its own sorted ready set."""
        self.shape = shape
        self.rank = rank
        self.tasks = list(shape.tasks_of(rank))
        self.num_tasks = self.num_left = len(self.tasks)
        self.num_microbatches = shape.num_microbatches
        self.num_of_a_kind = shape.num_chunks * shape.num_microbatches
        self.everybody = (1 << num_members) - 1
        self.lacks: list[int] = []
        """By number: how many tasks of this rank must be dispatched first; negative once the task
        itself was dispatched."""
        self.missing: list[int] = []
        """By number: the members at which its input has yet to arrive, one bit each."""
        num_lanes = len(Kind) * shape.num_chunks
        self.num_ready = [0] * num_lanes
        """By lane: how many tasks are ready at all members."""
        self.num_here = [0] * num_lanes
        """By lane: how many are ready as far as this rank's own inputs go."""
        self.ready_sets = [ReadySet(mask, shape.num_chunks) for mask in masks]
        self._keys = keys
        self._last_kind = len(shape.kinds) - 1
        self._first_number = {
            stage: shape.chunk_of(stage) * shape.num_microbatches for stage in shape.stages_of(rank)
        }
        # Whether a task's output stays on this rank, by lane.
        self._hands_over: list[bool] = []
        self._comes: list[bool] = []
        for first in self.tasks[:: shape.num_microbatches]:
            ranks = [shape.rank_of(needed.stage) for needed in shape.prerequisites(first)]
            comes = any(other != rank for other in ranks)
            self._comes.append(comes)
            self.lacks += [ranks.count(rank)] * shape.num_microbatches
            self.missing += [self.everybody if comes else 0] * shape.num_microbatches
            receiver = shape.receiver(first)
            self._hands_over.append(receiver is not None and shape.rank_of(receiver.stage) == rank)
        for number, (lacked, missing) in enumerate(zip(self.lacks, self.missing, strict=True)):
            if lacked == 0 and missing != self.everybody:
                self._becomes_ready(number, self.everybody & ~missing)

    # Queries.

    def number(self, task: Task) -> int | None:
        """The number of a task; None if this rank does not have it."""
        stage, kind, microbatch = task
        first = self._first_number.get(stage)
        if first is None or not 0 <= microbatch < self.num_microbatches:
            return None
        if kind is Kind.F:
            return first + microbatch
        if kind not in self.shape.kinds:
            return None
        return first + microbatch + self.num_of_a_kind * (1 if kind is Kind.B else 2)

    def comes(self, number: int) -> bool:
        """Whether another rank sends this task's input."""
        return self._comes[number // self.num_microbatches]

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
        return self._keys[number] * self.num_tasks + number

    def best_forward(self, chunk: int, mask: int) -> int:
        """The number of the best forward of a chunk that is ready at all members of the mask, of
        which there must be one."""
        first = chunk * self.num_microbatches
        return min(
            (n for n in range(first, first + self.num_microbatches) if self.is_ready(n, mask)),
            key=self._keys.__getitem__,
        )

    def lacking(self, number: int) -> tuple[Task, ...]:
        """The tasks whose output a task still needs on this rank."""
        return tuple(
            needed
            for needed in self.shape.prerequisites(self.tasks[number])
            if self._owes(needed, number)
        )

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
        self.num_here[lane] -= 1

    def hand_over(self, number: int, kind: int, lane: int) -> None:
        """Credit a dispatched task to the tasks waiting for it on this rank: the next kind on its
        own stage, and the same kind on the next stage if that is here too."""
        if kind != self._last_kind:
            self._one_less(number + self.num_of_a_kind)
        if self._hands_over[lane]:
            self._one_less(number + (-self.num_microbatches if kind else self.num_microbatches))

    def _one_less(self, number: int) -> None:
        self.lacks[number] -= 1
        if self.lacks[number] == 0:
            members = self.everybody & ~self.missing[number]
            if members:
                self._becomes_ready(number, members)

    def _becomes_ready(self, number: int, members: int) -> None:
        """A task has become ready at these members (bits)."""
        lane = number // self.num_microbatches
        missing = self.missing[number]
        if members & 1:
            self.num_here[lane] += 1
        if missing == 0:
            self.num_ready[lane] += 1
        if self.ready_sets:
            entry = self.entry(number)
            for ready in self.ready_sets:
                if members & ready.mask and not missing & ready.mask:
                    heappush(ready.heap_of_lane[lane], entry)

    # Invariants.

    def contradiction(self) -> str | None:
        """Which part of the books contradicts the rest, in a few words; None if all agree. Takes
        time linear in the tasks of the step."""
        left = [number for number in range(self.num_tasks) if self.is_left(number)]
        here = [number for number in left if self.is_here(number)]
        ready = [number for number in left if self.is_ready(number, self.everybody)]
        agreements = {
            "the count of tasks left": self.num_left == len(left),
            "the counts of tasks that are here": self.num_here == self._by_lane(here),
            "the counts of tasks that are ready": self.num_ready == self._by_lane(ready),
            "what a task lacks here": all(
                self.lacks[number] == self._num_owed_here(number) for number in left
            ),
            "a task that is ready and not in its heap": all(
                self.entry(number) in entries
                for each in self.ready_sets
                for entries in [set().union(*each.heap_of_lane)]
                for number in left
                if self.is_ready(number, each.mask)
            ),
        }
        return next((what for what, holds in agreements.items() if not holds), None)

    def num_dispatched(self, kind: int) -> int:
        of_kind = self.lacks[kind * self.num_of_a_kind : (kind + 1) * self.num_of_a_kind]
        return sum(lacked < 0 for lacked in of_kind)

    def _by_lane(self, numbers: Iterable[int]) -> list[int]:
        counts = Counter(number // self.num_microbatches for number in numbers)
        return [counts[lane] for lane in range(len(self.num_here))]

    def _num_owed_here(self, number: int) -> int:
        """How many tasks of this rank have yet to be dispatched before this one."""
        rank_of = self.shape.rank_of
        return sum(
            self.is_left(self.shape.index_of(needed))
            for needed in self.shape.prerequisites(self.tasks[number])
            if rank_of(needed.stage) == self.rank
        )
