"""The links of one layout: of all models with the same process groups and number of chunks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rrfp.megatron.memory.bound import MemoryBound
from rrfp.megatron.pipeline import Pipeline
from rrfp.megatron.planning.chooser import HintChooser
from rrfp.megatron.planning.next_items import AheadIterators
from rrfp.megatron.planning.planner import EntryPlanner
from rrfp.megatron.step.microbatch_data import DataHabits
from rrfp.schedule.hints.auto import AutoHint
from rrfp.schedule.hold import Auto, Bytes
from rrfp.schedule.policy import Policy
from rrfp.schedule.values import whole_number
from rrfp.trace.records import Record
from rrfp.trace.steps import evaluation_step


def discard(_: Record) -> None:
    """Record nothing."""


@dataclass(slots=True)
class LayoutLinks:
    """State shared by all calls of a layout."""

    record: Callable[[Record], None] = discard
    pipeline: Pipeline | None = None
    """None before the first step, and after a failure or a close."""
    timeout_s: float = 0.0
    """How long the pipeline's process group waits."""
    num_trained: int = 0
    num_evaluated: int = 0
    habits: defaultdict[tuple[bool, tuple[int, ...]], DataHabits] = field(
        default_factory=lambda: defaultdict(DataHabits)
    )
    """By whether a step is an evaluation, and by the ids of the models: several models may have the
    same groups."""

    chooser: HintChooser | None = None
    """What chooses the hint, with `auto`."""
    planner: EntryPlanner | None = None
    """What plans the order of entry, with `admit plan`."""
    ahead: AheadIterators = field(default_factory=AheadIterators)
    """The iterators whose next items it looks at."""

    bounds: dict[tuple[int, ...], MemoryBound] = field(default_factory=dict)
    """By the ids of the models."""

    def __post_init__(self) -> None:
        self.num_trained = whole_number(self.num_trained, "the first step")

    def chooser_of(self, policy: Policy) -> HintChooser | None:
        """What chooses the policies of training steps; None if they have the one that they were
        given."""
        if self.chooser is None and isinstance(policy.hint, AutoHint):
            self.chooser = HintChooser(policy)
        return self.chooser

    def bound_of(self, models: Sequence[Any], hold: object, device: torch.device) -> MemoryBound:
        """What bounds these models' steps in bytes; `hold` is in bytes or `auto`."""
        assert isinstance(hold, Bytes | Auto)
        key = tuple(map(id, models))
        if key not in self.bounds:
            self.bounds[key] = MemoryBound(hold, len(models), device)
        return self.bounds[key]

    def count_step(self, *, forward_only: bool) -> int:
        """The number of a step that begins, in records and on links. A failed step counts too: it
        may have failed on some ranks only."""
        if forward_only:
            self.num_evaluated += 1
            return evaluation_step(self.num_evaluated - 1)
        self.num_trained += 1
        return self.num_trained - 1

    def close(self, *, farewell: bool = True) -> None:
        """Close the links. Without a farewell, for a rank that fails, the neighbours consider this
        rank lost."""
        if self.chooser is not None:
            self.chooser.close()
        if self.pipeline is not None:
            self.pipeline.close(farewell=farewell)
            self.pipeline = None
