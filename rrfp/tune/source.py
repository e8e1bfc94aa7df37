"""What is tuned: costs, the pipeline that they are of, and what may be chosen about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints.hint import kinds_of
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.hold import Bytes, Hold, ShareOf1F1B
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.simulate.budgets import peak_of_1f1b
from rrfp.simulate.costs.flops import FlopCosts
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.costs.units import CutCosts, Layered, even_cut
from rrfp.simulate.jitter import NO_JITTER, Jitter
from rrfp.tune.candidate import Candidate
from rrfp.tune.overheads import WithOverheads

_WEIGHED = 4
"""Steps that tell whether microbatches weigh differently."""
_SIGNAL = 2.0
"""How many times the variance that noise explains the weights of microbatches must have."""
_EVEN = 1e-6
"""The variance of weights that is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Costs to tune on."""

    costs: Costs
    shape: Shape
    """As the costs, or the run, have it; its kinds do not count."""
    layered: Layered | None = None
    """The same costs by layer; None where layers cannot be told apart."""
    split: tuple[int, ...] | None = None
    """Layers by stage as the costs have them."""
    moves_layers: bool = True
    """Whether stages may have different numbers of layers."""
    layouts: Sequence[tuple[int, Placement]] = ()
    """The chunks and placements that may be chosen."""
    sizes: Sequence[tuple[int, int]] = ((1, 1),)
    """The sizes of microbatches that may be chosen: so many joined, or divided into so many."""
    micro_batch_size: int | None = None
    """Sequences in a microbatch, where that is known."""
    is_text: bool = True
    """A language model alone, as Megatron-LM's scripts train it."""
    is_uniform: bool = False
    """All microbatches are of one size, and what differs between them is noise."""
    admitted: str | None = None
    """The run's own `--admit`, which stays: its microbatches are recorded in that order."""
    jitter: Jitter = NO_JITTER
    num_members: int = 1
    num_replicas: int = 1
    task_ns: int = 0
    """The runtime's own time between two tasks."""
    message_ns: int = 0
    """The runtime's own time for a message."""
    tail_ns: int = 0
    """What a step takes after its last task."""
    seeds: Sequence[int] = ()
    """The steps to search by; empty: any seed is a step of its own."""
    fresh_seeds: Sequence[int] = ()
    """The steps that predictions are made for."""
    numbers: Sequence[int] = ()
    """The number of each step in the run."""
    own: Candidate | None = None
    """What the run was: where its settings are known."""
    measured_s: float | None = None
    """The mean time of the run's own steps that predictions are made for."""
    unsearched: Sequence[str] = field(default=())
    """What is not searched, and why."""

    def costs_of(self, candidate: Candidate) -> Costs:
        """The candidate's costs. Raises UsageError where they cannot be cut so."""
        costs = self.costs
        if self.layered is not None:
            assert candidate.split is not None, "costs by layer are cut by a split"
            costs = CutCosts(self.layered, candidate.split, candidate.joined, candidate.divided)
        if not self.task_ns and not self.message_ns:
            return costs
        return WithOverheads(costs, self.task_ns, self.message_ns)

    def shape_of(self, candidate: Candidate) -> Shape:
        """The shape of the candidate's step."""
        return Shape(
            self.shape.num_ranks,
            candidate.microbatches(self.shape.num_microbatches),
            candidate.chunks,
            candidate.placement,
            kinds_of(HINTS[candidate.hint]),
        )

    def even(self, num_stages: int) -> tuple[int, ...] | None:
        """The layers of so many stages if nobody moves any: as the costs have them, or evenly."""
        if self.layered is None:
            return None
        if self.split is not None and num_stages == len(self.split):
            return self.split
        if isinstance(self.layered, FlopCosts):
            return self.layered.split_over(num_stages)
        return even_cut(self.layered.num_layers, num_stages)

    @property
    def tells_sizes(self) -> bool:
        """Whether the costs say what microbatches keep."""
        seed = self.seeds[0] if self.seeds else 0
        return self.costs.step(self.shape, seed, 0).sizes is not None

    @property
    def splits_backward(self) -> bool:
        """Whether the costs know what weight gradients take by themselves."""
        shape = Shape(
            self.shape.num_ranks,
            self.shape.num_microbatches,
            self.shape.num_chunks,
            self.shape.placement,
            SPLIT_BACKWARD,
        )
        try:
            self.costs.step(shape, self.seeds[0] if self.seeds else 0, 0)
        except UsageError:
            return False
        return True

    def memory(self, asked: Hold, seeds: Sequence[int]) -> Hold:
        """The memory as a number: of bytes, or where the costs say nothing of memory, of
        microbatches. Raises UsageError for bytes that the costs do not tell."""
        if isinstance(asked, Bytes) and not self.tells_sizes:
            raise UsageError(
                f"a memory of {asked} needs to know what microbatches keep, and the costs do not "
                "say it; give the costs bytes, or the memory in microbatches, as in --memory "
                f"{self.shape.num_ranks}"
            )
        if not isinstance(asked, ShareOf1F1B):
            return asked
        peaks = [peak_of_1f1b(self._whole, self._whole_shape, seed, 0) for seed in seeds]
        known = [peak for peak in peaks if peak is not None]
        if len(known) == len(peaks):
            return Bytes(max(1, int(asked.factor * max(known))))
        return max(1, int(asked.factor * min(self.shape.num_ranks, self.shape.num_microbatches)))

    @property
    def _whole_shape(self) -> Shape:
        return Shape(self.shape.num_ranks, self.shape.num_microbatches)

    @property
    def _whole(self) -> Costs:
        """The costs of one stage a rank, as 1F1B has it."""
        even = self.even(self.shape.num_ranks)
        if self.layered is None or even is None or self.shape.num_chunks == 1:
            return self.costs
        return CutCosts(self.layered, even)

    @property
    def admissions(self) -> Sequence[Admit]:
        """The orders of entry that may make a difference: microbatches must weigh differently, and
        by more than the noise of single tasks explains."""
        if self.admitted is not None or self.is_uniform:
            return [Admit.GIVEN]
        between, noise = 0.0, 0.0
        for seed in self.seeds[:_WEIGHED] or range(_WEIGHED):
            of_step = self.costs.step(self.shape, seed, 0)
            if not of_step.is_known:
                return [Admit.GIVEN]
            times = of_step.times
            kinds = (times.forward, times.input_gradient, times.weight_gradient)
            whole = sum(np.array(rows, dtype=float) for rows in kinds)
            rows = np.asarray(whole / np.maximum(np.mean(whole, axis=1, keepdims=True), 1))
            weights = rows.mean(axis=0)
            between += float(weights.var())
            noise += float((rows - weights).var()) / len(rows)
        differ = between > max(_SIGNAL * noise, _EVEN)
        return [Admit.GIVEN, Admit.PYRAMID] if differ else [Admit.GIVEN]
