"""The pipeline's shape: which tasks a step has, where they run, and what each of them needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Kind, Task


class Placement(StrEnum):
    """Which stages a pipeline rank holds when it holds several chunks."""

    LOOP = "loop"
    """stage = chunk * num_ranks + rank (Megatron's interleaving)."""
    V = "v"
    """Rank r holds stages r and 2 * num_ranks - 1 - r (two chunks, as in ZBV)."""


FORWARD_ONLY = (Kind.F,)
WHOLE_BACKWARD = (Kind.F, Kind.B)
SPLIT_BACKWARD = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True, slots=True)
class Shape:
    """One step of one pipeline: ranks, microbatches, chunks a rank, and the kinds of its tasks."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    placement: Placement = Placement.LOOP
    kinds: tuple[Kind, ...] = WHOLE_BACKWARD

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.kinds not in (FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD):
            raise UsageError(f"a step of kinds {self.kinds} is not F, F B or F B W")
        if self.placement is Placement.V and self.num_chunks != 2:
            raise UsageError(
                f"placement v takes 2 chunks a rank, not {self.num_chunks}; add --chunks 2"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        return Kind.W in self.kinds

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        if self.placement is Placement.V and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def chunk_of(self, stage: int) -> int:
        """The index of a stage among its rank's chunks; chunks rise with the stage."""
        return stage // self.num_ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        if self.placement is Placement.V and chunk == 1:
            return 2 * self.num_ranks - 1 - rank
        return chunk * self.num_ranks + rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.num_chunks))

    def tasks_of(self, rank: int) -> Iterator[Task]:
        """Every task of a rank, by kind, chunk and microbatch."""
        for kind in self.kinds:
            for stage in self.stages_of(rank):
                for microbatch in range(self.num_microbatches):
                    yield Task(stage, kind, microbatch)

    @property
    def num_tasks_of_a_rank(self) -> int:
        return len(self.kinds) * self.num_chunks * self.num_microbatches

    def holds(self, rank: int, task: Task) -> bool:
        """Whether the task exists in this step and runs on that rank."""
        return (
            0 <= task.stage < self.num_stages
            and 0 <= task.microbatch < self.num_microbatches
            and task.kind in self.kinds
            and self.rank_of(task.stage) == rank
        )

    def prerequisites(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must have run before this one (paper section 3.1)."""
        stage, kind, microbatch = task
        if kind is Kind.F:
            return (Task(stage - 1, Kind.F, microbatch),) if stage > 0 else ()
        if kind is Kind.W:
            return (Task(stage, Kind.B, microbatch),)
        forward = Task(stage, Kind.F, microbatch)
        if stage == self.num_stages - 1:
            return (forward,)
        return (forward, Task(stage + 1, Kind.B, microbatch))

    def receiver(self, task: Task) -> Task | None:
        """The task on a neighbouring stage that takes this one's output, if there is one."""
        stage, kind, microbatch = task
        if kind is Kind.F and stage + 1 < self.num_stages:
            return Task(stage + 1, Kind.F, microbatch)
        if kind is Kind.B and stage > 0:
            return Task(stage - 1, Kind.B, microbatch)
        return None

    def sender(self, task: Task) -> Task | None:
        """The task on a neighbouring stage whose output this one takes, if there is one."""
        stage, kind, microbatch = task
        if kind is Kind.F and stage > 0:
            return Task(stage - 1, Kind.F, microbatch)
        if kind is Kind.B and stage + 1 < self.num_stages:
            return Task(stage + 1, Kind.B, microbatch)
        return None
