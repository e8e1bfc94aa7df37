"""The input of the search: costs with their pipeline, and the candidates for it."""

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
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.costs.unit_costs import Layered
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import NO_JITTER, Jitter
from rrfp.simulate.memory_budgets import peak_of_1f1b

_REMEMBERED = 64


@dataclass(frozen=True)
class WithOverheads:
    """A `Costs` that adds the runtime's overhead to every task and message of other costs."""

    costs: Costs
    task_ns: int
    message_ns: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_step", lru_cache(_REMEMBERED)(self._step_with_overheads))

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return a step's costs with the overheads; the last 64 steps are cached."""
        return self._step(shape, seed, replica)  # type: ignore[attr-defined,no-any-return]

    def _step_with_overheads(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Add `task_ns` to every task and `message_ns` to every message of a step. An unsplit
        backward is one task and gets the overhead once."""
        found = self.costs.step(shape, seed, replica)
        times, links, more = found.times, found.links, self.task_ns
        # An unsplit backward is one task and gets the overhead once.
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


# Splits of a model's layers over stages, compared by the ranks' work.


def loads(
    split: Sequence[int], work: Sequence[float], slowness: Sequence[float], shape: Shape
) -> list[float]:
    """Return the work of each pipeline rank under a split of the layers, times the rank's slowness.
    `work` has the embedding, which counts for the first stage, each layer, and the head, for the
    last."""
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
    """Return the mean time of a microbatch, all kinds of task together, for each unit (embedding,
    layers, head) on a rank of speed 1, in ns."""
    totals: list[float] = []
    for seed in seeds:
        units = layered.units(num_ranks, num_microbatches, seed, 0)
        of_step = sum(rows.mean(axis=1) for rows in units.times_ns.values())
        found = [float(each) for each in of_step]
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return [each / len(seeds) for each in totals]


def moves(split: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all splits with one layer moved from one stage to another. Only the first and the last
    stage may be left without layers."""
    last = len(split) - 1
    for giver, layers in enumerate(split):
        # Only the first and the last stage, with embedding and head, may have no layer.
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
    """Return a split reached from `begin` by moving single layers as long as that lowers the load
    of the most loaded rank or, at an equal one, makes the loads more even: a local optimum."""

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
"""Steps used to test whether the microbatches' costs differ."""
_SIGNAL = 2.0
"""Least ratio of the variance between microbatches to the variance that noise explains."""
_EVEN = 1e-6
"""Variances up to this count as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search space: all settings that `rrfp tune` chooses."""

    policy: Policy
    """The policy; without hold if the order is fixed, and with a limit only if the run had one."""
    chunks: int = 1
    placement: Placement = Placement.LOOP
    split: tuple[int, ...] | None = None
    """Layers by stage, in model order; None without costs by layer."""
    admit: Admit = Admit.GIVEN
    joined: int = 1
    """Number of given microbatches that are joined into one."""
    divided: int = 1
    """Number of microbatches into which each given one is divided."""

    def microbatches(self, given: int) -> int:
        """Number of microbatches after joining or dividing `given` ones."""
        return given * self.divided // self.joined

    def with_policy(self, **changes: Any) -> Self:
        """This candidate with some knobs of its policy changed."""
        return replace(self, policy=replace(self.policy, **changes))

    @property
    def family(self) -> tuple[object, ...]:
        """Key of the hint, dispatch, treatment of W, chunks and placement. Candidates of one family
        differ in the rest: bounds, patience, split, admission, or size of microbatches."""
        policy = self.policy
        return (policy.hint.name, policy.dispatch, policy.w, self.chunks, self.placement)

    def with_split(self, split: tuple[int, ...]) -> Self:
        """Return this candidate with another split of layers."""
        return replace(self, split=split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Costs to tune on, with their pipeline and the choices that the search may make."""

    costs: Costs
    shape: Shape
    """Shape of the costs or the run; its kinds of task do not matter."""
    layered: Layered | None = None
    """The same costs by layer; None if unknown."""
    split: tuple[int, ...] | None = None
    """Layers by stage in the costs."""
    moves_layers: bool = True
    """True if stages may have different numbers of layers."""
    layouts: Sequence[tuple[int, Placement]] = ()
    """The allowed combinations of chunks and placement."""
    sizes: Sequence[tuple[int, int]] = ((1, 1),)
    """The allowed sizes of microbatches as (joined, divided): microbatches joined into one, or
    parts of one."""
    micro_batch_size: int | None = None
    """Sequences in a microbatch; None if unknown."""
    is_text: bool = True
    """True for a pure language model, as Megatron-LM's scripts train it."""
    is_uniform: bool = False
    """True if all microbatches have one size, so that their times differ by noise only."""
    admitted: str | None = None
    """The run's own `--admit`, which cannot change: its microbatches are recorded in that order."""
    jitter: Jitter = NO_JITTER
    num_members: int = 1
    num_replicas: int = 1
    task_ns: int = 0
    """Runtime overhead between two tasks."""
    message_ns: int = 0
    """Runtime overhead per message."""
    tail_ns: int = 0
    """Time of a step after its last task."""
    seeds: Sequence[int] = ()
    """Seeds of the steps to search on; if empty, any seed is valid."""
    fresh_seeds: Sequence[int] = ()
    """Seeds of the held-out steps."""
    numbers: Sequence[int] = ()
    """Number in the run of each step, by seed."""
    own: Candidate | None = None
    """The run's own settings; None if unknown or without a run."""
    measured_s: float | None = None
    """Mean measured time of the held-out steps."""
    unsearched: Sequence[str] = field(default=())
    """Notes on settings that are not searched, with reasons."""

    def costs_of(self, candidate: Candidate) -> Costs:
        """Return the candidate's costs, cut by its split, with the runtime's overheads. Raises
        UsageError if they cannot be divided by its split."""
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
        """Return the default split over `num_stages` stages: that of the costs, or an even one;
        None without costs by layer."""
        if self.layered is None:
            return None
        if self.split is not None and num_stages == len(self.split):
            return self.split
        if isinstance(self.layered, FlopCosts):
            return self.layered.split_over(num_stages)
        return even_cut(self.layered.num_layers, num_stages)

    @property
    def knows_sizes(self) -> bool:
        """Return whether the costs contain the microbatches' activation bytes."""
        seed = self.seeds[0] if self.seeds else 0
        return self.costs.step(self.shape, seed, 0).sizes is not None

    @property
    def splits_backward(self) -> bool:
        """Return whether the costs contain separate times of weight gradients."""
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
        """Return a memory bound as a number. A share of 1F1B's peak over the seeds becomes bytes
        or, if the costs have no sizes, microbatches, at least 1; other bounds are returned
        unchanged. Raises UsageError for a bound in bytes if the costs have no sizes."""
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
        """The shape with one stage per rank, as for 1F1B."""
        return Shape(self.shape.num_ranks, self.shape.num_microbatches)

    @property
    def _whole(self) -> Costs:
        """The costs cut to one stage per rank, as for 1F1B; unchanged if they have one chunk or no
        layers."""
        even = self.even(self.shape.num_ranks)
        if self.layered is None or even is None or self.shape.num_chunks == 1:
            return self.costs
        return CutCosts(self.layered, even)

    @property
    def admissions(self) -> Sequence[Admit]:
        """The admission orders to try: the given one, and the pyramid if the microbatches' known
        costs in up to 4 steps differ by more than the noise of single tasks. A run that had its own
        `--admit`, or microbatches of one size, leaves only the given one."""
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


_EVEN_LOADS = 0.03
"""Loads count as even up to this excess of the most loaded rank over the mean, as a fraction."""


def imbalance(
    source: Source, work: Sequence[float], best: Candidate, seeds: Sequence[int]
) -> str | None:
    """Describe uneven loads of the ranks, which no order of tasks can fix, and their imbalance
    after the best candidate's split, if layers can be moved; None if no rank has over 3% more than
    the mean. `work` is that of `work_of`, or empty."""
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
    """Total work of each pipeline rank over the steps of these seeds."""
    shape = source.shape
    totals = [0.0] * shape.num_ranks
    for seed in seeds:
        times = source.costs.step(shape, seed, 0).times
        for rows in (times.forward, times.input_gradient, times.weight_gradient):
            for stage, row in enumerate(rows):
                totals[shape.rank_of(stage)] += sum(row)
    return totals
