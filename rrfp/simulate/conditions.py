"""The conditions of a replica's step, which are the same for every policy that is compared."""

from dataclasses import dataclass

from rrfp.schedule.admission import Admission
from rrfp.schedule.shape import Shape
from rrfp.simulate.admission import admitted
from rrfp.simulate.bounds import Floor, floor
from rrfp.simulate.costs.model import Costs, Links, StepCosts, check_takes_time
from rrfp.simulate.jitter import Jitter
from rrfp.simulate.world import Stretch, TaskTimes


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
    of_step = admitted(costs.step(shape, seed, replica), admit, step)
    times = jitter.times(of_step.times, shape, seed, replica)
    check_takes_time(times, f"jitter {jitter.spec}")
    links = jitter.links(of_step.links)
    return Conditions(shape, of_step, times, links, jitter, seed, replica)
