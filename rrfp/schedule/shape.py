"""The pipeline's shape: the tasks of a step, their ranks, and their dependencies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import SupportsIndex

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Kind, Task, Value, whole_number


class Placement(StrEnum):
    """The placement of stages on pipeline ranks of several chunks."""

    LOOP = "loop"
    """stage = chunk * num_ranks + rank (Megatron's interleaving)."""
    V = "v"
    """Rank r holds stages r and 2 * num_ranks - 1 - r (two chunks, as in ZBV)."""


FORWARD_ONLY = (Kind.F,)
WHOLE_BACKWARD = (Kind.F, Kind.B)
SPLIT_BACKWARD = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True, slots=True, init=False)
class Shape(Value):
    """One step of one pipeline: ranks, microbatches, chunks per rank, and kinds of task."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    placement: Placement = Placement.LOOP
    kinds: tuple[Kind, ...] = WHOLE_BACKWARD

    def __init__(
        self,
        num_ranks: SupportsIndex,
        num_microbatches: SupportsIndex,
        num_chunks: SupportsIndex = 1,
        placement: Placement = Placement.LOOP,
        kinds: tuple[Kind, ...] = WHOLE_BACKWARD,
    ) -> None:
        """Numbers may be of any library. Raises UsageError for an impossible shape."""
        object.__setattr__(self, "num_ranks", whole_number(num_ranks, "num_ranks"))
        microbatches = whole_number(num_microbatches, "num_microbatches")
        object.__setattr__(self, "num_microbatches", microbatches)
        object.__setattr__(self, "num_chunks", whole_number(num_chunks, "num_chunks"))
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "kinds", kinds)
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.kinds not in (FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD):
            raise UsageError(f"a step of kinds {self.kinds} is not F, F B or F B W")
        if self.placement is Placement.V and self.num_chunks != 2:
            raise UsageError(
                f"placement v takes 2 chunks per rank, not {self.num_chunks}; give it --chunks 2 "
                "(in a job of your own, a virtual pipeline size of 2)"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients (W) are separate tasks."""
        return Kind.W in self.kinds

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        if self.placement is Placement.V and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def chunk_of(self, stage: int) -> int:
        """Return the index of a stage among its rank's chunks, which are numbered in model
        order."""
        return stage // self.num_ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that a rank holds as this chunk."""
        if self.placement is Placement.V and chunk == 1:
            return 2 * self.num_ranks - 1 - rank
        return chunk * self.num_ranks + rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, by chunk."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.num_chunks))

    def tasks_of(self, rank: int) -> Iterator[Task]:
        """Yield the tasks of a rank, ordered by kind, chunk and microbatch."""
        for kind in self.kinds:
            for stage in self.stages_of(rank):
                for microbatch in range(self.num_microbatches):
                    yield Task(stage, kind, microbatch)

    def index_of(self, task: Task) -> int:
        """Return the index of a task in its rank's `tasks_of`. The task must be one of the step
        (not checked)."""
        stage, kind, microbatch = task
        row = stage // self.num_ranks
        if kind is not Kind.F:
            row += self.num_chunks * (1 if kind is Kind.B else 2)
        return row * self.num_microbatches + microbatch

    @property
    def num_tasks_of_a_rank(self) -> int:
        """The number of tasks of each rank: kinds times chunks times microbatches."""
        return len(self.kinds) * self.num_chunks * self.num_microbatches

    def holds(self, rank: int, task: Task) -> bool:
        """True if the task exists in this step and runs on this rank."""
        return (
            0 <= task.stage < self.num_stages
            and 0 <= task.microbatch < self.num_microbatches
            and task.kind in self.kinds
            and self.rank_of(task.stage) == rank
        )

    def prerequisites(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that must have run before this one (paper section 3.1): for a backward,
        its own forward, and for a forward or backward, the sender of its input, if another stage
        sends it; for a weight gradient only its backward."""
        stage, kind, microbatch = task
        if kind is Kind.W:
            return (Task(stage, Kind.B, microbatch),)
        sender = self.sender(task)
        received = () if sender is None else (sender,)
        return received if kind is Kind.F else (Task(stage, Kind.F, microbatch), *received)

    def sender(self, task: Task) -> Task | None:
        """Return the task on a neighboring stage whose output this one consumes; None for a forward
        on the first stage, a backward on the last one, and weight gradients. It may be on the same
        rank."""
        return self._on_stage(sending_stage(task.kind, task.stage), task)

    def receiver(self, task: Task) -> Task | None:
        """Return the task on a neighboring stage that consumes this one's output; None for a
        forward on the last stage, a backward on the first one, and weight gradients. It may be on
        the same rank."""
        return self._on_stage(receiving_stage(task.kind, task.stage), task)

    def link(self, task: Task) -> tuple[int, int] | None:
        """Return the pipeline ranks that send and receive the message for a task.

        None if it needs no message: it consumes no other stage's output, or one of its own rank.
        """
        sender = self.sender(task)
        if sender is None:
            return None
        source, destination = self.rank_of(sender.stage), self.rank_of(task.stage)
        return None if source == destination else (source, destination)

    def neighbors(self, rank: int) -> set[int]:
        """Return the other pipeline ranks that hold a stage adjacent to one of this rank's."""
        adjacent = {each for stage in self.stages_of(rank) for each in (stage - 1, stage + 1)}
        return {self.rank_of(each) for each in adjacent if 0 <= each < self.num_stages} - {rank}

    def _on_stage(self, stage: int | None, task: Task) -> Task | None:
        """Return the task of the same kind and microbatch on another stage; None without such a
        stage."""
        if stage is None or not 0 <= stage < self.num_stages:
            return None
        return Task(stage, task.kind, task.microbatch)


def sending_stage(kind: str, stage: int) -> int | None:
    """Return the stage whose output a task of this kind and stage consumes; None for a weight
    gradient. The stage may lie beyond the pipeline's ends."""
    if kind == Kind.F:
        return stage - 1
    return stage + 1 if kind == Kind.B else None


def receiving_stage(kind: str, stage: int) -> int | None:
    """Return the stage that consumes the output of a task of this kind and stage; None for a weight
    gradient. The stage may lie beyond the pipeline's ends."""
    if kind == Kind.F:
        return stage + 1
    return stage - 1 if kind == Kind.B else None


def shape_of_stages(
    stages: Mapping[int, tuple[int, ...]], num_microbatches: int, kinds: tuple[Kind, ...]
) -> Shape | None:
    """Find the shape in which each pipeline rank holds these stages (by rank): a loop or, with two
    chunks, a V; None if neither does that. The loop is tried first."""
    num_ranks, num_chunks = 1 + max(stages), len(next(iter(stages.values())))
    for placement in Placement:
        if placement is Placement.V and num_chunks != 2:
            continue
        shape = Shape(num_ranks, num_microbatches, num_chunks, placement, kinds)
        if all(stages.get(rank) == shape.stages_of(rank) for rank in range(num_ranks)):
            return shape
    return None
