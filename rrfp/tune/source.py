"""The source that is tuned: costs, the pipeline that they are of, and the candidates for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from statistics import fmean
from typing import Any, Self

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.policy import Bytes, Hold, Policy, ShareOf1F1B
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import CutCosts, even_cut
from rrfp.simulate.costs.model import Costs, Layered, StepCosts
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import NO_JITTER, Jitter
from rrfp.simulate.memory_budgets import peak_of_1f1b

# Costs with the runtime's own time: what lies between two tasks, and what a message takes beyond
# its costs.


_REMEMBERED = 64


@dataclass(frozen=True)
class WithOverheads:
    """A `Costs`: other costs, with the runtime's time as a part of every task and message."""

    costs: Costs
    task_ns: int
    message_ns: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_step", lru_cache(_REMEMBERED)(self._step_with_overheads))

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        return self._step(shape, seed, replica)  # type: ignore[attr-defined,no-any-return]

    def _step_with_overheads(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        found = self.costs.step(shape, seed, replica)
        times, links, more = found.times, found.links, self.task_ns
        # A backward that is not split is one task.
        of_weights = more if shape.splits_backward else 0
        return replace(
            found,
            times=TaskTimes(
                [[each + more for each in row] for row in times.forward],
                [[each + more for each in row] for row in times.input_gradient],
                [[each + of_weights for each in row] for row in times.weight_gradient],
            ),
            links=replace(links, latency_ns=links.latency_ns + self.message_ns),
        )


# Splits of a model's layers over stages, by the work of each rank alone.


def loads(
    split: Sequence[int], work: Sequence[float], slowness: Sequence[float], shape: Shape
) -> list[float]:
    """The work of each pipeline rank; `work` is by unit, embedding and head included."""
    sums = list(accumulate(work, initial=0.0))
    ends = list(accumulate(split, initial=1))
    ends[0], ends[-1] = 0, len(work)
    found = [0.0] * shape.num_ranks
    for stage in range(shape.num_stages):
        rank = shape.rank_of(stage)
        found[rank] += slowness[rank] * (sums[ends[stage + 1]] - sums[ends[stage]])
    return found


def work_of(
    layered: Layered, num_ranks: int, num_microbatches: int, seeds: Sequence[int]
) -> list[float]:
    """The mean time of a microbatch for each unit, all kinds together, on a rank of speed 1."""
    totals: list[float] = []
    for seed in seeds:
        units = layered.units(num_ranks, num_microbatches, seed, 0)
        of_step = sum(rows.mean(axis=1) for rows in units.times_ns.values())
        found = [float(each) for each in of_step]
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return [each / len(seeds) for each in totals]


def moves(split: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every split with one layer moved from a stage to another."""
    last = len(split) - 1
    for giver, layers in enumerate(split):
        # Only the first and the last stage have something else to do.
        if layers <= (0 if giver in (0, last) else 1):
            continue
        for taker in range(len(split)):
            if taker != giver:
                moved = list(split)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


def balanced(
    begin: Sequence[int], work: Sequence[float], slowness: Sequence[float], shape: Shape
) -> tuple[int, ...]:
    """The split in which the most loaded rank has least to do, found from `begin` by moving one
    layer after the other; of equals, the one with the most even loads."""

    def badness(split: Sequence[int]) -> tuple[float, float]:
        found = loads(split, work, slowness, shape)
        return max(found), sum(each * each for each in found)

    best, least = tuple(begin), badness(begin)
    while True:
        better = min((badness(each), each) for each in (best, *moves(best)))
        if better[0] >= least:
            return best
        least, best = better


_WEIGHED = 4
"""Steps that tell whether microbatches weigh differently."""
_SIGNAL = 2.0
"""How many times the variance that noise explains the weights of microbatches must have."""
_EVEN = 1e-6
"""The variance of weights that is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space: everything that `rrfp tune` may choose about a run."""

    policy: Policy
    """It has no hold under an order that binds, and a limit only where the run had one."""
    chunks: int = 1
    placement: Placement = Placement.LOOP
    split: tuple[int, ...] | None = None
    """Layers by stage, in model order; None where the costs do not tell layers apart."""
    admit: Admit = Admit.GIVEN
    joined: int = 1
    """The number of given microbatches that become one."""
    divided: int = 1
    """The number of microbatches that each given one becomes."""

    def microbatches(self, given: int) -> int:
        """The number of microbatches that `given` ones become."""
        return given * self.divided // self.joined

    def with_policy(self, **changes: Any) -> Self:
        """This candidate with some knobs of its policy changed."""
        return replace(self, policy=replace(self.policy, **changes))

    @property
    def family(self) -> tuple[object, ...]:
        """The key that candidates share which differ in figures only."""
        policy = self.policy
        return (policy.hint.name, policy.dispatch, policy.w, self.chunks, self.placement)

    def with_split(self, split: tuple[int, ...]) -> Self:
        return replace(self, split=split)


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
            kinds_of(candidate.policy.hint),
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
    def knows_sizes(self) -> bool:
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
        if isinstance(asked, Bytes) and not self.knows_sizes:
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


# Whether the ranks' loads are uneven for good, which no order of tasks mends.


_EVEN_LOADS = 0.03
"""The most loaded rank may have so much more than the mean, as a share."""


def imbalance(
    source: Source, work: Sequence[float], best: Candidate, seeds: Sequence[int]
) -> str | None:
    """A sentence on the loads of the ranks as the costs have them, and what the best candidate's
    split makes of them; None where they are even. `work` is by unit, or empty."""
    found = _loads(source, seeds)
    excess = max(found) / fmean(found) - 1
    if excess <= _EVEN_LOADS:
        return None
    rank = found.index(max(found))
    sentence = (
        f"Pipeline rank {rank} has {excess:.0%} more to do than the mean of all; no order of tasks "
        "fixes that, only the split of the layers"
    )
    if source.layered is None:
        return f"{sentence}, which --layers N lets be searched."
    if not source.moves_layers or best.split is None:
        return f"{sentence}, which cannot be changed here."
    shape = Shape(source.shape.num_ranks, 1, best.chunks, best.placement)
    after = loads(best.split, work, source.layered.slowness(shape.num_ranks), shape)
    left = max(after) / fmean(after) - 1
    return f"{sentence}: that of the first proposal leaves {left:.0%}."


def _loads(source: Source, seeds: Sequence[int]) -> list[float]:
    """The mean time of each pipeline rank in a step."""
    shape = source.shape
    totals = [0.0] * shape.num_ranks
    for seed in seeds:
        times = source.costs.step(shape, seed, 0).times
        for rows in (times.forward, times.input_gradient, times.weight_gradient):
            for stage, row in enumerate(rows):
                totals[shape.rank_of(stage)] += sum(row)
    return totals
