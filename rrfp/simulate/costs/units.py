"""Costs by unit: a model's layers in their order, with what stands before the first of them and
behind the last, so that they can be cut into other stages, or into other microbatches.

A unit takes the same time on every rank, but for the rank's own speed. So layers that are moved
from a slow rank get faster, and those that are moved to it slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.model import Links, StepCosts, check_sizes, check_takes_time
from rrfp.simulate.draws import Floats
from rrfp.simulate.world import TaskTimes

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
