"""How much of a run's bubble its schedule leaves by itself, and how much jitter adds.

The *structural* part is the bubble that the same tasks would leave under the same policy if each
took the mean time of its stage and kind in the step; the rest is *excess*.

Only the tasks' own times are averaged. Messages and the delays before tasks stay as they were, and
count as structural: many of them happen once, like a rank's late entry into the step, and a mean
would lay them upon every message of a link.

Excess may be negative, and usually is on ranks that share cores: there a task takes long because
others run beside it, and little where they wait. The recorded times then fit the recorded idling,
and the means do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.replay.bubble_parts import BubbleParts
from rrfp.replay.measured_step import MeasuredStep
from rrfp.replay.recorded import RecordedRun
from rrfp.replay.replayed import replay


@dataclass(frozen=True, slots=True)
class Structural:
    """The parts of the bubble, over the steps of a run."""

    ranks: tuple[BubbleParts, ...]
    """By pipeline rank, over its replicas."""

    @property
    def whole(self) -> BubbleParts:
        """Of all ranks together."""
        count = len(self.ranks)
        return BubbleParts(
            sum(rank.structural for rank in self.ranks) / count,
            sum(rank.excess for rank in self.ranks) / count,
        )


def structural(run: RecordedRun, steps: Sequence[MeasuredStep]) -> Structural:
    """Divide the bubble of these steps of a run into its two parts."""
    window_ns = sum(step.window_ns for step in steps)
    smooth_ns = sum(replay(run, step.without_jitter()).makespan_ns for step in steps)
    busy_ns = [0.0] * run.shape.num_ranks
    for step in steps:
        for replica in step.replicas:
            for rank, time_ns in enumerate(replica.busy_ns(run.shape)):
                busy_ns[rank] += time_ns / len(step.replicas)
    return Structural(
        tuple(
            BubbleParts((smooth_ns - busy) / window_ns, (window_ns - smooth_ns) / window_ns)
            for busy in busy_ns
        )
    )
