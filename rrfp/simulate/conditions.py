"""The conditions of a replica's step, which are the same for every policy that is compared."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.admission import Admission, Admit, admission_order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import Costs, Links, StepCosts, check_takes_time
from rrfp.simulate.engine import StepConditions, Stretch, TaskTimes
from rrfp.simulate.jitter import Jitter, uniforms
from rrfp.simulate.time_bounds import Floor, floor

# The admission order of a simulated step, by what its microbatches are known to cost.


def admitted(costs: StepCosts, admission: Admission, step: int, replica: int = 0) -> StepCosts:
    """Return the costs of the same step, with its microbatches in admission order. Under `given`
    they are returned as they are.

    Raises UsageError as `order_by_costs` does.
    """
    if admission is Admit.GIVEN:
        return costs
    return costs.permuted(order_by_costs(costs, admission, step, replica))


def order_by_costs(
    costs: StepCosts, admission: Admission, step: int, replica: int = 0
) -> Sequence[int]:
    """Return the order in which a replica admits the microbatches of step `step` (from 0): the
    listed one, 0, 1, 2, ... for `given`, else the pyramid by their total times. For `plan` that is
    where planning starts.

    Raises UsageError if they would be sorted by costs that are not known before the step, or if the
    listed order has another number of microbatches.
    """
    if admission in (Admit.PYRAMID, Admit.PLAN) and not costs.is_known:
        does = "sorts" if admission is Admit.PYRAMID else "plans"
        raise UsageError(
            f"--admit {admission} {does} by what is known before the step, and these costs are "
            "drawn task by task; choose --admit given or other costs"
        )
    num_microbatches = len(costs.times.forward[0])
    return admission_order(
        admission, step, num_microbatches, lambda: weights_ns(costs.times), replica
    )


def weights_ns(times: TaskTimes) -> list[int]:
    """Return the time of each microbatch in ns, summed over all stages and kinds."""
    rows = (*times.forward, *times.input_gradient, *times.weight_gradient)
    return [sum(of_microbatch) for of_microbatch in zip(*rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The costs and the jitter of one step of one replica."""

    shape: Shape
    costs: StepCosts
    """Before jitter, its microbatches in admission order."""
    times: TaskTimes
    """With jitter, except for delays and stops, which `stretch` adds."""
    links: Links
    """With jitter."""
    jitter: Jitter
    seed: int
    replica: int

    def stretch(self) -> Stretch | None:
        """Return the delays and stops of the step, with fresh state, as they depend on what the
        ranks run; None if the jitter has none."""
        return self.jitter.stretch(self.shape, self.seed, self.replica)

    def floor(self) -> Floor:
        """Return the lower bound on the step's time, with jitter but without delays and stops."""
        return floor(self.shape, self.times, None if self.links.is_free else self.links)


def conditions(
    costs: Costs,
    jitter: Jitter,
    admit: Admission,
    shape: Shape,
    seed: int,
    replica: int,
    step: int,
) -> Conditions:
    """Compute the costs and the jitter of one step of a replica. The seed stands for the step's
    data and jitter; `step` is its number, from 0, by which the admission order is chosen.

    Raises UsageError if the costs, the admission order or the jitter do not fit the shape, or if no
    task takes any time.
    """
    of_step = admitted(costs.step(shape, seed, replica), admit, step, replica)
    times = jitter.times(of_step.times, shape, seed, replica)
    check_takes_time(times, f"jitter {jitter.spec}")
    links = jitter.links(of_step.links)
    return Conditions(shape, of_step, times, links, jitter, seed, replica)


def world_of(
    met: Conditions, policy: Policy, num_members: int = 1, *, blocking: bool
) -> StepConditions:
    """Build the simulator's inputs for a replica's step under a policy, with fresh state. With
    several members, messages are as late as the costs say, and rounds of agreement take time unless
    an order binds. Ranks expect the tasks' times only if the costs are known before the step."""
    costs, links = met.costs, met.links
    binds = policy.dispatch is Dispatch.FIXED
    return StepConditions(
        met.times,
        transfer=None if links.is_free else links,
        stretch=met.stretch(),
        blocking=blocking,
        num_members=num_members,
        lateness=_Skew(met.shape, costs.lateness_ns, met.seed, met.replica)
        if num_members > 1 and costs.lateness_ns
        else None,
        num_bytes=links.num_bytes,
        sizes=costs.sizes,
        expected=costs.times if costs.is_known else None,
        # A binding order leaves nothing to agree on.
        agreement_ns=0 if binds else costs.agreement_ns,
    )


class _Skew:
    """A `Lateness`: uniform from 0 to a maximum, drawn for each message and member."""

    def __init__(self, shape: Shape, most_ns: int, seed: int, replica: int) -> None:
        self._num_microbatches = shape.num_microbatches
        self._most_ns = most_ns
        self._key = (seed, replica, "lateness")
        self._drawn: dict[tuple[int, int, Kind], list[int]] = {}

    def __call__(self, member: int, task: Task) -> int:
        key = (member, task.stage, task.kind)
        if key not in self._drawn:
            shares = uniforms(self._num_microbatches, *self._key, *key)
            self._drawn[key] = [int(share * self._most_ns) for share in shares.tolist()]
        return self._drawn[key][task.microbatch]
