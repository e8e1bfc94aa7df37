"""The links of one layout of a model: the same process groups, and as many chunks a rank."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rrfp.megatron.pipeline import Pipeline
from rrfp.megatron.step.microbatch_data import DataHabits
from rrfp.trace.records import Record
from rrfp.trace.steps import evaluation_step


def discard(_: Record) -> None:
    """Record nothing."""


@dataclass(slots=True)
class LayoutLinks:
    """What a layout's calls have in common."""

    record: Callable[[Record], None] = discard
    pipeline: Pipeline | None = None
    """None before the first step, and after a failure or a close."""
    num_trained: int = 0
    num_evaluated: int = 0
    habits: defaultdict[tuple[bool, tuple[int, ...]], DataHabits] = field(
        default_factory=lambda: defaultdict(DataHabits)
    )
    """By whether a step only looks at its data, and by the identities of the models: several may
    have the same groups."""

    def count_step(self, *, forward_only: bool) -> int:
        """The number of a step that begins, in the records and on the links. A step that fails
        counts, too: it may have failed on some ranks only."""
        if forward_only:
            self.num_evaluated += 1
            return evaluation_step(self.num_evaluated - 1)
        self.num_trained += 1
        return self.num_trained - 1

    def close(self, *, farewell: bool = True) -> None:
        """Without a farewell, for a rank that fails, the neighbours take this rank for lost."""
        if self.pipeline is not None:
            self.pipeline.close(farewell=farewell)
            self.pipeline = None
