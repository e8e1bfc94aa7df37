"""The conditions of a replica's step, which are the same for every policy that is compared."""

from dataclasses import dataclass

from rrfp.schedule.admission import Admission
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.admission import admitted
from rrfp.simulate.bounds import Floor, floor
from rrfp.simulate.costs.model import Costs, Links, StepCosts, check_takes_time
from rrfp.simulate.draws import uniforms
from rrfp.simulate.jitter import Jitter
from rrfp.simulate.world import Stretch, TaskTimes, World


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
        """The delays and stops, with fresh state: they depend on what the ranks run."""
        return self.jitter.stretch(self.shape, self.seed, self.replica)

    def floor(self) -> Floor:
        """The lower bound on the step's time."""
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
    """The conditions of a replica under a seed, which stands for one step's data and jitter.

    `step` is the number of that step, from 0. Raises UsageError if the costs, the admission order
    or the jitter do not fit the shape.
    """
    of_step = admitted(costs.step(shape, seed, replica), admit, step, replica)
    times = jitter.times(of_step.times, shape, seed, replica)
    check_takes_time(times, f"jitter {jitter.spec}")
    links = jitter.links(of_step.links)
    return Conditions(shape, of_step, times, links, jitter, seed, replica)


def world_of(met: Conditions, policy: Policy, num_members: int = 1, *, blocking: bool) -> World:
    """The world of a replica's step, with fresh state, under a policy."""
    costs, links = met.costs, met.links
    binds = policy.dispatch is Dispatch.FIXED
    return World(
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
