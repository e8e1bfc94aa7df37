"""Steps whose costs are known, played under any candidate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.choice.candidates import Candidate
from rrfp.simulate.step import simulate_step
from rrfp.simulate.world import World

MakeWorld = Callable[[Policy], World]
"""The world of one replica's step under a policy, with fresh state."""


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """Known steps of a run; each is a world for every replica."""

    steps: Sequence[Sequence[MakeWorld]]
    budgets: Sequence[int] = ()
    """The bounds in bytes by pipeline rank; empty where memory is not counted in bytes."""

    def __len__(self) -> int:
        return len(self.steps)

    def play(self, candidate: Candidate, step: int) -> int | None:
        """What a step takes under a candidate, in ns; None if it binds an order that keeps more
        than the budgets. A step that is too heavy for the budgets whatever its order has as much as
        it needs."""
        policy, shape = candidate.policy, candidate.shape
        worlds = []
        for make in self.steps[step]:
            world = make(policy)
            if self.budgets and world.sizes is not None:
                if not fits(policy, shape, world.sizes, self.budgets):
                    return None
                budgets = map(max, self.budgets, least_budgets(world.sizes, shape))
                world = replace(world, budgets=tuple(budgets))
            worlds.append(world)
        return simulate_step(shape, policy, worlds).makespan_ns


def least_budgets(sizes: Sizes, shape: Shape) -> list[int]:
    """By pipeline rank, the bytes that the heaviest microbatches take on its chunks."""
    return [sizes.of(shape.stages_of(rank)).least_budget for rank in range(shape.num_ranks)]


def fits(policy: Policy, shape: Shape, sizes: Sizes, budgets: Sequence[int]) -> bool:
    """Whether a step of these sizes stays within the budgets under a policy. Those that bind
    nothing keep to them by themselves; the order that binds decides what a rank keeps, and not how
    long its tasks take."""
    if policy.dispatch is not Dispatch.FIXED:
        return True
    order = policy.order
    assert order is not None
    return all(
        _peak_bytes(order.rows[rank], shape, sizes) <= budgets[rank]
        for rank in range(shape.num_ranks)
    )


def _peak_bytes(row: Sequence[Task], shape: Shape, sizes: Sizes) -> int:
    """The most that a rank keeps at once if it runs its tasks in this sequence."""
    held = most = 0
    for stage, kind, microbatch in row:
        size = sizes.kept[stage][microbatch]
        if kind is Kind.F:
            held += size
            most = max(most, held)
            continue
        owed = 0
        if shape.splits_backward:
            owed = size if sizes.owed is None else sizes.owed[stage][microbatch]
        held -= size - owed if kind is Kind.B else owed
    return most
