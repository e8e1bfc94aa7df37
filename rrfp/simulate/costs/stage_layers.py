"""Costs that are given by stage, as costs by layer.

What a stage takes is divided evenly over its layers. The first and the last stage may take longer
than their layers would elsewhere: that is the embedding and the head. A rank in the middle whose
layers take longer than usual counts as slow itself, or, if its user says so, as one with heavier
layers. `Cut anew` into its own stages, everything takes what it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.costs.uneven import Uneven
from rrfp.simulate.costs.units import UnitCosts
from rrfp.simulate.draws import Floats


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
