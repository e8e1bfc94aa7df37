"""Costs that are given by stage, as costs by layer.

What a stage takes is divided evenly over its layers. The first and the last stage may take longer
than their layers would elsewhere: that is the embedding and the head. A rank in the middle whose
layers take longer than usual counts as slow itself, or, if its user says so, as one with heavier
layers. `Cut anew` into its own stages, everything takes what it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median_low
from typing import Protocol

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.bounds import Sizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import Costs, Links, StepCosts, Uneven, check_sizes, check_takes_time
from rrfp.simulate.jitter import Floats
from rrfp.simulate.world import TaskTimes

# Costs by unit: a model's layers in their order, with what stands before the first of them and
# behind the last, so that they can be cut into other stages, or into other microbatches.
#
# A unit takes the same time on every rank, but for the rank's own speed. So layers that are moved
# from a slow rank get faster, and those that are moved to it slower.


_REMEMBERED = 64
"""Steps whose costs are kept, as a search meets the same ones again and again."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """What the units of one step of one pipeline cost: the embedding, each layer, the head.

    Arrays are [units, microbatches], with two units more than layers; embedding and head may be
    zero.
    """

    times_ns: dict[Kind, Floats]
    """Nanoseconds of F, B and W on a rank of speed 1."""
    kept: Floats | None
    """Bytes from F on; None where the costs say nothing of memory."""
    owed: Floats | None
    """Bytes of these from B until W; None: all that was kept."""
    rest: StepCosts
    """Links, agreement and the rest, for these microbatches; its times and sizes do not count."""


class Layered(Protocol):
    """Costs that tell a model's layers apart."""

    @property
    def num_layers(self) -> int: ...

    @property
    def fixed_ns(self) -> dict[Kind, Floats] | None:
        """What a task takes for each unit, [units], whatever the size of its microbatch; None where
        the costs do not tell."""
        ...

    def slowness(self, num_ranks: int) -> Sequence[float]:
        """How many times longer everything takes on each pipeline rank than usual."""
        ...

    def units(self, num_ranks: int, num_microbatches: int, seed: int, replica: int) -> UnitCosts:
        """One step's; raises UsageError where the costs are of another number of ranks or
        microbatches."""
        ...


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equally many layers for every stage, give or take one; later stages get no more."""
    ends = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


@dataclass(frozen=True)
class CutCosts:
    """A `Costs`: a model's layers cut into stages anew, and its microbatches joined or divided."""

    layered: Layered
    split: tuple[int, ...]
    """Layers by stage, in model order."""
    joined: int = 1
    """So many microbatches of the costs become one."""
    divided: int = 1
    """Each microbatch of the costs becomes so many."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_step", lru_cache(_REMEMBERED)(self._cut))

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        return self._step(shape, seed, replica)  # type: ignore[attr-defined,no-any-return]

    def _cut(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        if len(self.split) != shape.num_stages:
            raise UsageError(
                f"the layers are cut into {len(self.split)} stages and {shape.num_ranks} ranks of "
                f"{shape.num_chunks} chunks have {shape.num_stages}; change --pp or --chunks"
            )
        num_given = shape.num_microbatches * self.joined
        if num_given % self.divided:
            raise UsageError(
                f"{shape.num_microbatches} microbatches are not made of whole ones of the costs, "
                f"each divided into {self.divided}; choose a multiple of {self.divided}"
            )
        given = self.layered.units(shape.num_ranks, num_given // self.divided, seed, replica)
        slowness = self.layered.slowness(shape.num_ranks)
        by_stage = [slowness[shape.rank_of(stage)] for stage in range(shape.num_stages)]
        factors = np.array(by_stage)[:, None]
        times = TaskTimes(*(self._times_ns(given, kind, factors) for kind in Kind))
        check_takes_time(times, "the costs")
        sizes = None
        if given.kept is not None:
            kept = self._bytes(given.kept)
            owed = None if given.owed is None else self._bytes(given.owed)
            sizes = Sizes(_whole(kept), None if owed is None else _whole(np.minimum(owed, kept)))
            check_sizes(sizes, "the costs")
        rest, links = given.rest, given.rest.links
        if links.num_bytes:
            sent = self._resized(np.array([links.num_bytes], dtype=float), None)
            num_bytes = [int(each) for each in np.rint(sent[0]).tolist()]
            links = Links(links.latency_ns, links.ns_per_byte, num_bytes, links.factors)
        return StepCosts(
            times,
            links,
            rest.agreement_ns,
            rest.lateness_ns,
            rest.gradient_sync_ns,
            rest.is_known,
            sizes,
        )

    def _times_ns(self, given: UnitCosts, kind: Kind, factors: Floats) -> list[list[int]]:
        fixed_ns = self.layered.fixed_ns
        resized = self._resized(given.times_ns[kind], None if fixed_ns is None else fixed_ns[kind])
        return _whole(self._stages(resized) * factors)

    def _bytes(self, of_units: Floats) -> Floats:
        return np.rint(self._stages(self._resized(of_units, None)))

    def _resized(self, rows: Floats, fixed: Floats | None) -> Floats:
        """The rows of microbatches of another size; `fixed` does not grow with it."""
        if self.joined == self.divided == 1:
            return rows
        own = np.zeros((len(rows), 1)) if fixed is None else fixed[:, None]
        growing = np.repeat((rows - own) / self.divided, self.divided, axis=1)
        return np.asarray(growing.reshape(len(rows), -1, self.joined).sum(axis=2) + own)

    def _stages(self, rows: Floats) -> Floats:
        """The sums by stage of rows by unit."""
        ends = list(accumulate(self.split, initial=1))
        ends[0], ends[-1] = 0, len(rows)
        sums = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])
        return np.asarray(sums[ends[1:]] - sums[ends[:-1]])


def check_split(split: Sequence[int], num_layers: int, num_stages: int, name: str) -> None:
    """Raise UsageError for a split that does not give each stage its layers; only the first and the
    last one, which have more to do, may have none. `name` is what errors call it."""
    told = ",".join(map(str, split))
    if len(split) != num_stages:
        raise UsageError(
            f"{name} {told} is of {len(split)} stages and there are {num_stages}; give each its "
            "layers"
        )
    if sum(split) != num_layers:
        raise UsageError(
            f"{name} {told} has {sum(split)} layers in all and the model has {num_layers}; make "
            "them the same"
        )
    if any(layers < 1 for layers in split[1:-1]) or min(split) < 0:
        raise UsageError(
            f"{name} {told} leaves a stage in the middle without layers; give it one or more"
        )


def _whole(rows: Floats) -> list[list[int]]:
    return [[max(0, round(each)) for each in row] for row in rows.tolist()]


@dataclass(frozen=True)
class StageLayers:
    """A `Layered`: costs by stage of a model whose stages' layers are known."""

    costs: Costs
    shape: Shape
    """The shape of the costs; its number of microbatches and its kinds do not count."""
    split: tuple[int, ...]
    """Layers by stage."""
    towers: tuple[str | None, ...] = ()
    """What the layers of each stage are, where there are several kinds of them (vision, language):
    only those of one name are compared; empty: all are of one kind."""
    uneven: Uneven = Uneven.RANKS
    seeds: Sequence[int] = range(4)
    """The steps whose mean tells what is usual."""
    _usual: "_Usual" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_usual", self._find_usual())

    @property
    def num_layers(self) -> int:
        return sum(self.split)

    @property
    def fixed_ns(self) -> dict[Kind, Floats] | None:
        return None

    def slowness(self, num_ranks: int) -> Sequence[float]:
        if num_ranks != self.shape.num_ranks:
            raise UsageError(
                f"the costs are of {self.shape.num_ranks} pipeline ranks, not {num_ranks}; choose "
                f"--pp {self.shape.num_ranks}"
            )
        return self._usual.slowness

    def units(self, num_ranks: int, num_microbatches: int, seed: int, replica: int) -> UnitCosts:
        slowness = np.array(self.slowness(num_ranks))
        costs = self._step(num_microbatches, seed, replica)
        times, sizes = costs.times, costs.sizes
        shape = self.shape
        factors = np.array([slowness[shape.rank_of(each)] for each in range(shape.num_stages)])
        by_kind = zip(
            Kind, (times.forward, times.input_gradient, times.weight_gradient), strict=True
        )
        kept = None if sizes is None else self._units(_array(sizes.kept), self._usual.kept)
        owed = (
            None
            if sizes is None or sizes.owed is None
            else self._units(_array(sizes.owed), self._usual.kept)
        )
        return UnitCosts(
            {
                kind: self._units(_array(rows) / factors[:, None], self._usual.shares[kind])
                for kind, rows in by_kind
            },
            kept,
            owed,
            costs,
        )

    def _units(self, rows: Floats, shares: Floats) -> Floats:
        """The units of rows by stage; `shares` is the part of each stage that its layers take."""
        layers = np.array(self.split)
        each = rows * (shares / np.maximum(layers, 1))[:, None]
        rest = rows * (1 - shares)[:, None]
        return np.vstack([rest[:1], np.repeat(each, layers, axis=0), rest[-1:]])

    def _step(self, num_microbatches: int, seed: int, replica: int) -> StepCosts:
        shape = replace(self.shape, num_microbatches=num_microbatches)
        return self.costs.step(shape, seed, replica)

    def _find_usual(self) -> "_Usual":
        steps = [self._step(self.shape.num_microbatches, seed, 0) for seed in self.seeds]
        means = {
            kind: np.mean([_array(rows).mean(axis=1) for rows in of_steps], axis=0)
            for kind, of_steps in zip(
                Kind,
                zip(
                    *(
                        (each.times.forward, each.times.input_gradient, each.times.weight_gradient)
                        for each in steps
                    ),
                    strict=True,
                ),
                strict=True,
            )
        }
        whole = np.sum(list(means.values()), axis=0)
        slowness = self._slowness(whole)
        factors = np.array([slowness[self.shape.rank_of(s)] for s in range(self.shape.num_stages)])
        kept = np.ones(len(self.split))
        if all(each.sizes is not None for each in steps):
            sizes = [each.sizes.kept for each in steps if each.sizes is not None]
            kept = self._shares(np.mean([_array(rows).mean(axis=1) for rows in sizes], axis=0))
        shares = {kind: self._shares(mean / factors) for kind, mean in means.items()}
        return _Usual(tuple(slowness), shares, kept)

    def _rates(self, of_stages: Floats) -> Floats:
        return np.asarray(of_stages / np.maximum(np.array(self.split), 1))

    def _of_tower(self, stage: int) -> list[int]:
        """The other stages that a stage is compared with, those in the middle where there are
        some."""
        towers = self.towers or (None,) * len(self.split)
        like = [s for s, tower in enumerate(towers) if tower == towers[stage] and self.split[s]]
        return [s for s in like if 0 < s < len(self.split) - 1] or like

    def _usual_rate(self, of_stages: Floats, stage: int) -> float:
        rates = self._rates(of_stages)
        like = self._of_tower(stage)
        if not like:
            return 0.0
        is_middle = any(0 < each < len(self.split) - 1 for each in like)
        found = [float(rates[each]) for each in like]
        return median_low(found) if is_middle else min(found)

    def _slowness(self, whole: Floats) -> list[float]:
        """By rank: what all of its stages are slower, or faster, than is usual."""
        if self.uneven is Uneven.LAYERS:
            return [1.0] * self.shape.num_ranks
        rates, last = self._rates(whole), len(self.split) - 1
        found = []
        for rank in range(self.shape.num_ranks):
            factors = []
            for stage in self.shape.stages_of(rank):
                usual = self._usual_rate(whole, stage)
                if not usual or not self.split[stage]:
                    continue
                factor = float(rates[stage]) / usual
                # The time beyond the usual one is the embedding's or the head's there.
                if stage not in (0, last) or factor < 1:
                    factors.append(factor)
            common = min(factors, key=lambda each: abs(each - 1), default=1.0)
            is_common = all((each > 1) == (common > 1) for each in factors)
            found.append(common if is_common and common > 0 else 1.0)
        return found

    def _shares(self, of_stages: Floats) -> Floats:
        """The part of each stage that its layers take: all of it in the middle."""
        shares = np.ones(len(self.split))
        for stage in {0, len(self.split) - 1}:
            if of_stages[stage] > 0:
                of_layers = self._usual_rate(of_stages, stage) * self.split[stage]
                shares[stage] = min(1.0, of_layers / of_stages[stage])
        return shares


@dataclass(frozen=True, slots=True)
class _Usual:
    """What is usual in costs by stage."""

    slowness: tuple[float, ...]
    """By rank."""
    shares: dict[Kind, Floats]
    """The part of each stage's time that its layers take, by kind."""
    kept: Floats
    """The part of what each stage keeps that its layers keep."""


def _array(rows: Sequence[Sequence[int]]) -> Floats:
    return np.array(rows, dtype=float)
