"""Lanes: what a rank runs of one kind on one chunk.

Lanes run by kind, then chunk. A task's *number* is its index among the tasks of its rank
(`Shape.tasks_of`): `lane * num_microbatches + microbatch`. Whoever decides or simulates goes by
numbers, because indexing a list is much faster than hashing a task.
"""

from functools import lru_cache
from typing import Final

from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

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
