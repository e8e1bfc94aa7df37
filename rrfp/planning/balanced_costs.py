"""Costs of a global batch that is dealt to the replicas by what its items are known to take."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rrfp.errors import UsageError
from rrfp.schedule.admission import Assignment, ListedAssignments, Times, balance_batch
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Costs, StepCosts
from rrfp.simulate.engine import TaskTimes

_MOST_REMEMBERED = 2
"""Steps of which every replica asks for its own."""


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A step of all replicas."""

    given: Sequence[StepCosts]
    joined: StepCosts
    hands: Assignment


@dataclass(frozen=True, slots=True)
class DealtCosts:
    """A `Costs`: every replica has the items that it is dealt of all replicas' own draws."""

    given: Costs
    num_replicas: int
    listed: ListedAssignments | None = None
    """The dealings of a file; None: by what the items take, ascending in each hand."""
    first_seed: int = 0
    """That of step 0, to find a step in a file."""
    _dealt: dict[tuple[Shape, int], _Dealt] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Raises UsageError if the costs do not fit the shape, if they are not known before the
        step, and if a file deals to others."""
        dealt = self._of(shape, seed)
        own = dealt.given[replica]
        return replace(
            dealt.joined.permuted(dealt.hands[replica]),
            agreement_ns=own.agreement_ns,
            lateness_ns=own.lateness_ns,
            gradient_sync_ns=own.gradient_sync_ns,
        )

    def hands(self, shape: Shape, seed: int) -> Assignment:
        """The numbers of the items that each replica gets in the step of this seed."""
        return self._of(shape, seed).hands

    def _of(self, shape: Shape, seed: int) -> _Dealt:
        key = shape, seed
        if key not in self._dealt:
            if len(self._dealt) == _MOST_REMEMBERED:
                del self._dealt[next(iter(self._dealt))]
            self._dealt[key] = self._deal(shape, seed)
        return self._dealt[key]

    def _deal(self, shape: Shape, seed: int) -> _Dealt:
        given = [self.given.step(shape, seed, replica) for replica in range(self.num_replicas)]
        joined = _joined(given)
        if self.listed is not None:
            step, num = seed - self.first_seed, shape.num_microbatches
            return _Dealt(given, joined, self.listed.of_step(step, self.num_replicas, num))
        if not joined.is_known:
            raise UsageError(
                "--admit-across replicas deals by what is known before the step, and these costs "
                "are drawn task by task; leave it out or choose other costs"
            )
        hands = balance_batch(times_by_rank(joined.times, shape), self.num_replicas)
        return _Dealt(given, joined, hands)


def as_given(costs: Costs) -> Costs:
    """What every replica has before anything is dealt."""
    return costs.given if isinstance(costs, DealtCosts) else costs


def times_by_rank(times: TaskTimes, shape: Shape) -> list[Times]:
    """What each microbatch takes on each pipeline rank, in ns."""
    by_rank: list[list[Sequence[int]]] = [[] for _ in range(shape.num_ranks)]
    for rows in (times.forward, times.input_gradient, times.weight_gradient):
        for stage, row in enumerate(rows):
            by_rank[shape.rank_of(stage)].append(row)
    sums = [list(map(sum, zip(*rows, strict=True))) for rows in by_rank]
    return list(zip(*sums, strict=True))


def _joined(given: Sequence[StepCosts]) -> StepCosts:
    """The microbatches of all replicas in one step of the first one."""
    first = given[0]
    sizes = [each.sizes for each in given if each.sizes is not None]
    return replace(
        first,
        times=TaskTimes(
            _rows([each.times.forward for each in given]),
            _rows([each.times.input_gradient for each in given]),
            _rows([each.times.weight_gradient for each in given]),
        ),
        links=replace(
            first.links, num_bytes=list(chain.from_iterable(each.links.num_bytes for each in given))
        ),
        is_known=all(each.is_known for each in given),
        sizes=ActivationSizes(
            _rows([each.activations for each in sizes]),
            _rows([each.pending_w for each in sizes if each.pending_w is not None]) or None,
        )
        if len(sizes) == len(given)
        else None,
    )


def _rows(tables: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The rows of several tables, one after the other."""
    return [list(chain.from_iterable(rows)) for rows in zip(*tables, strict=True)]
