"""Costs that are given by stage, as costs by layer.

What a stage takes is divided evenly over its layers. The first and the last stage may take longer
than their layers would elsewhere: that is the embedding and the head. A rank in the middle whose
layers take longer than usual counts as slow itself, or, if its user says so, as one with heavier
layers. A model that is split into its original stages has its original costs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median_low
from typing import Any

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.model import (
    Costs,
    Links,
    StepCosts,
    Uneven,
    check_sizes,
    check_takes_time,
)
from rrfp.simulate.costs.toml_files import TableCosts, ranged, read_table
from rrfp.simulate.costs.unit_costs import Floats, Layered, UnitCosts
from rrfp.simulate.engine import TaskTimes

_REMEMBERED = 64
"""Steps whose costs are kept, as a search meets the same ones again and again."""


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: equally many, give or take one; the last stage
    gets no more than any other."""
    ends = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


@dataclass(frozen=True)
class CutCosts:
    """A `Costs`: a model's layers in another split, with its microbatches joined or divided."""

    layered: Layered
    split: tuple[int, ...]
    """Layers by stage, in model order."""
    joined: int = 1
    """The number of the costs' microbatches that are joined into one."""
    divided: int = 1
    """The number of microbatches into which each of the costs' microbatches is divided."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_step", lru_cache(_REMEMBERED)(self._cut))

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of a step in the new split (cached, for the latest 64 steps). Raises
        UsageError if the split does not fit the shape."""
        return self._step(shape, seed, replica)  # type: ignore[attr-defined,no-any-return]

    def _cut(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Compute the costs of a step: resize the microbatches, sum the units of each stage, and
        apply the slowness of its rank. Raises UsageError if the split has another number of stages,
        if the microbatches do not divide evenly, if no task takes any time, and for sizes out of
        range."""
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
        if given.activations is not None:
            kept = self._bytes(given.activations)
            owed = None if given.pending_w is None else self._bytes(given.pending_w)
            sizes = ActivationSizes(
                _whole(kept), None if owed is None else _whole(np.minimum(owed, kept))
            )
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
        """Return the times of a kind of task in ns by stage and microbatch, multiplied by the
        slowness `factors` of the stages."""
        fixed_ns = self.layered.fixed_ns
        resized = self._resized(given.times_ns[kind], None if fixed_ns is None else fixed_ns[kind])
        return _whole(self._stages(resized) * factors)

    def _bytes(self, of_units: Floats) -> Floats:
        """Return rows of bytes by stage from rows by unit, for the resized microbatches,
        rounded."""
        return np.rint(self._stages(self._resized(of_units, None)))

    def _resized(self, rows: Floats, fixed: Floats | None) -> Floats:
        """Return the rows by unit with microbatches joined and divided. `fixed`, by unit, is the
        part that a microbatch takes whatever its size; None: no such part."""
        if self.joined == self.divided == 1:
            return rows
        own = np.zeros((len(rows), 1)) if fixed is None else fixed[:, None]
        growing = np.repeat((rows - own) / self.divided, self.divided, axis=1)
        return np.asarray(growing.reshape(len(rows), -1, self.joined).sum(axis=2) + own)

    def _stages(self, rows: Floats) -> Floats:
        """Sum rows by unit to rows by stage. The embedding counts for the first stage, the head for
        the last."""
        ends = list(accumulate(self.split, initial=1))
        ends[0], ends[-1] = 0, len(rows)
        sums = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])
        return np.asarray(sums[ends[1:]] - sums[ends[:-1]])


def check_split(split: Sequence[int], num_layers: int, num_stages: int, name: str) -> None:
    """Raise UsageError unless a split has `num_stages` stages and `num_layers` layers in all. Only
    the first and the last stage, which have more to do, may have none. Errors call the split
    `name`."""
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
    """Round rows to whole numbers, none below 0, and return them as lists."""
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
    """The kind of each stage's layers (vision, language); only layers of one kind are compared.
    Empty: all are of one kind."""
    uneven: Uneven = Uneven.RANKS
    seeds: Sequence[int] = range(4)
    """The steps whose mean tells what is usual."""
    _usual: "_Usual" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_usual", self._find_usual())

    @property
    def num_layers(self) -> int:
        """The number of layers of all stages."""
        return sum(self.split)

    @property
    def fixed_ns(self) -> dict[Kind, Floats] | None:
        """Always None: costs by stage do not show which part does not depend on a microbatch's
        size."""
        return None

    def slowness(self, num_ranks: int) -> Sequence[float]:
        """Return the factor by which each rank is slower than usual (1: as usual, below 1: faster).
        Raises UsageError for another number of ranks than that of the costs."""
        if num_ranks != self.shape.num_ranks:
            raise UsageError(
                f"the costs are of {self.shape.num_ranks} pipeline ranks, not {num_ranks}; choose "
                f"--pp {self.shape.num_ranks}"
            )
        return self._usual.slowness

    def units(self, num_ranks: int, num_microbatches: int, seed: int, replica: int) -> UnitCosts:
        """Return the costs of a step by unit, without the ranks' slowness: each stage's layers take
        equal parts of it, and the rest of the first and last stage is the embedding's and the
        head's. Raises UsageError for another number of ranks."""
        slowness = np.array(self.slowness(num_ranks))
        costs = self._step(num_microbatches, seed, replica)
        times, sizes = costs.times, costs.sizes
        shape = self.shape
        factors = np.array([slowness[shape.rank_of(each)] for each in range(shape.num_stages)])
        by_kind = zip(
            Kind, (times.forward, times.input_gradient, times.weight_gradient), strict=True
        )
        kept = (
            None
            if sizes is None
            else self._units(_array(sizes.activations), self._usual.activations)
        )
        owed = (
            None
            if sizes is None or sizes.pending_w is None
            else self._units(_array(sizes.pending_w), self._usual.activations)
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
        """Convert rows by stage to rows by unit. `shares` is the part of each stage that its layers
        take; the rest of the first stage becomes the embedding, that of the last the head."""
        layers = np.array(self.split)
        each = rows * (shares / np.maximum(layers, 1))[:, None]
        rest = rows * (1 - shares)[:, None]
        return np.vstack([rest[:1], np.repeat(each, layers, axis=0), rest[-1:]])

    def _step(self, num_microbatches: int, seed: int, replica: int) -> StepCosts:
        """Return the given costs of a step with this many microbatches, still by stage."""
        shape = replace(self.shape, num_microbatches=num_microbatches)
        return self.costs.step(shape, seed, replica)

    def _find_usual(self) -> "_Usual":
        """Compute from the mean of the steps of `seeds` (replica 0) how slow each rank is, and
        which part of each stage's time and bytes its layers take. Without known sizes, layers take
        all bytes."""
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
            sizes = [each.sizes.activations for each in steps if each.sizes is not None]
            kept = self._shares(np.mean([_array(rows).mean(axis=1) for rows in sizes], axis=0))
        shares = {kind: self._shares(mean / factors) for kind, mean in means.items()}
        return _Usual(tuple(slowness), shares, kept)

    def _rates(self, of_stages: Floats) -> Floats:
        """Divide figures of stages by their numbers of layers (by 1 for a stage without layers)."""
        return np.asarray(of_stages / np.maximum(np.array(self.split), 1))

    def _of_tower(self, stage: int) -> list[int]:
        """Return the stages that a stage is compared with, perhaps itself included: those of the
        same tower that have layers, only those in the middle where there are some."""
        towers = self.towers or (None,) * len(self.split)
        like = [s for s, tower in enumerate(towers) if tower == towers[stage] and self.split[s]]
        return [s for s in like if 0 < s < len(self.split) - 1] or like

    def _usual_rate(self, of_stages: Floats, stage: int) -> float:
        """Return the usual figure per layer in a stage's tower: the median of the middle stages or,
        without any, the smallest of the others. 0 if there is nothing to compare with."""
        rates = self._rates(of_stages)
        like = self._of_tower(stage)
        if not like:
            return 0.0
        is_middle = any(0 < each < len(self.split) - 1 for each in like)
        found = [float(rates[each]) for each in like]
        return median_low(found) if is_middle else min(found)

    def _slowness(self, whole: Floats) -> list[float]:
        """Return for each rank the factor nearest to 1 by which its stages are slower, or faster,
        than usual; 1 if they differ in direction, and for all ranks if `uneven` is `layers`. Extra
        time of the first and last stage is the embedding's or the head's, and does not count."""
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
        """Return the part of each stage that its layers take, at most 1: all of it in the middle,
        and in the first and last stage what as many layers take elsewhere."""
        shares = np.ones(len(self.split))
        for stage in {0, len(self.split) - 1}:
            if of_stages[stage] > 0:
                of_layers = self._usual_rate(of_stages, stage) * self.split[stage]
                shares[stage] = min(1.0, of_layers / of_stages[stage])
        return shares


@dataclass(frozen=True, slots=True)
class _Usual:
    """The usual costs by stage: how slow each rank is, and which part of each stage its layers
    take."""

    slowness: tuple[float, ...]
    """By rank."""
    shares: dict[Kind, Floats]
    """The part of each stage's time that its layers take, by kind."""
    activations: Floats
    """The part of what each stage keeps that its layers keep."""


def _array(rows: Sequence[Sequence[int]]) -> Floats:
    """Convert rows to an array of floats."""
    return np.array(rows, dtype=float)


# A cut as a TOML document: `rrfp tune` writes one for each proposal, so that it can be simulated,
# or serve as the costs of a paced run.


CUT = "cut"
"""The key that only such a document has."""
_MOST_PIECES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The stages that costs by stage are given for: `[cut.given]`."""

    layers: str
    """By stage, in model order: 8,8,8,8."""
    pp: int = ranged(1)
    microbatches: int = ranged(1)
    chunks: int = ranged(1, default=1)
    placement: Placement = Placement.LOOP
    uneven: Uneven = Uneven.RANKS

    def layered(self, costs: Costs) -> Layered:
        """Split these costs by layer, as the table says. Raises UsageError for layers that do not
        fit the stages."""
        shape = Shape(self.pp, self.microbatches, self.chunks, self.placement)
        return layered_of(costs, shape, parse_split(self.layers, "layers"), self.uneven)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The split of the costs: `[cut]`."""

    costs: str
    """What `--costs` takes."""
    layers: str
    """By stage, in model order: 5,6,7,6."""
    given: Given | None = None
    """None: the costs are a model's, which tell layers apart themselves."""
    joined: int = ranged(1, _MOST_PIECES, default=1)
    divided: int = ranged(1, _MOST_PIECES, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    cut: Cut


def parse_cut(document: Mapping[str, Any], name: str, resolve: Callable[[str], Costs]) -> CutCosts:
    """Build the costs of a TOML document with a `[cut]`; `name` is what errors call it, and
    `resolve` reads the costs that it cuts. Costs that are not a model's need the table
    `[cut.given]` with the layers of their stages. Raises UsageError for a wrong document, for such
    costs without that table, and for a split that does not fit."""
    cut = cut_in(document, name)
    costs = resolve(cut.costs)
    if cut.given is not None:
        layered = cut.given.layered(costs)
    elif isinstance(costs, FlopCosts):
        layered = costs
    else:
        raise UsageError(
            f"{name} cuts {cut.costs}, which does not say how many layers its stages have; add "
            "[cut.given]"
        )
    split = parse_split(cut.layers, f"{name}, [cut]: layers")
    check_split(split, layered.num_layers, len(split), f"{name}, [cut]: layers")
    return CutCosts(layered, split, cut.joined, cut.divided)


def cut_in(document: Mapping[str, Any], name: str) -> Cut:
    """Read the `[cut]` of a TOML document; `name` is what errors call it. Raises UsageError for a
    wrong or missing one. The split itself is not checked."""
    return read_table(_Document, document, name).cut


def written_cut(cut: Cut) -> str:
    """Format a cut as TOML, which `parse_cut` reads: `joined` and `divided` if above 1, and
    `[cut.given]` if there is one. Nothing is written to disk."""
    lines = ["[cut]", f"costs = {_quoted(cut.costs)}", f'layers = "{cut.layers}"']
    lines += [
        f"{name} = {value}"
        for name, value in (("joined", cut.joined), ("divided", cut.divided))
        if value > 1
    ]
    given = cut.given
    if given is not None:
        lines += [
            "",
            "[cut.given]",
            f'layers = "{given.layers}"',
            f"pp = {given.pp}",
            f"microbatches = {given.microbatches}",
            f"chunks = {given.chunks}",
            f'placement = "{given.placement}"',
            f'uneven = "{given.uneven}"',
        ]
    return "\n".join(lines) + "\n"


def layered_of(
    costs: Costs, shape: Shape, split: Sequence[int], uneven: Uneven = Uneven.RANKS
) -> StageLayers:
    """Convert costs by stage to costs by layer: `split` says how many layers each stage of `shape`
    has. Raises UsageError for a split of another number of stages, and if a middle stage, or all
    stages, have no layers."""
    check_split(split, sum(split), shape.num_stages, "the split")
    if not any(split):
        raise UsageError("the stages have no layers at all; say how many each has")
    towers = costs.towers(shape) if isinstance(costs, TableCosts) else ()
    return StageLayers(costs, shape, tuple(split), towers, uneven)


def parse_split(text: str, name: str) -> tuple[int, ...]:
    """Parse the numbers of layers by stage, such as 7,8,8,7, of at most 4 digits each. Raises
    UsageError for anything else; `name` is what errors call it."""
    cells = text.split(",")
    if not all(cell.strip().isdecimal() and len(cell.strip()) < 5 for cell in cells):
        raise UsageError(f"{name} is '{text:.60}'; write the layers of each stage, such as 7,8,8,7")
    return tuple(int(cell) for cell in cells)


def _quoted(text: str) -> str:
    """Quote a text as a TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def check_divided(costs: Costs, name: str, tp: int) -> None:
    """Raise UsageError if a model, split anew or not, is divided among a number of tensor-parallel
    ranks other than `tp`; costs that are not a model's pass. `name` is what errors call them."""
    model = costs.layered if isinstance(costs, CutCosts) else costs
    if isinstance(model, FlopCosts) and model.tensor_parallel.size != tp:
        raise UsageError(
            f"the model in {name} is divided among {model.tensor_parallel.size} tensor-parallel "
            f"ranks and --tp is {tp}; give both the same number"
        )
