"""Which steps of a long run are replayed, where replaying all of them would take too long."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.errors import RrfpError
from rrfp.trace.steps import spread_evenly


@dataclass(frozen=True, slots=True)
class StepSample:
    """How much of a run is replayed."""

    num_tasks: int
    """As many steps as have so many tasks together, at least one."""
    most_tasks_of_a_step: int
    """Larger steps are not replayed at all."""

    def choose(self, steps: Sequence[int], num_tasks_of_a_step: float) -> list[int]:
        """Some of a run's steps, spread evenly over them.

        Raises RrfpError when a step has too many tasks.
        """
        if num_tasks_of_a_step > self.most_tasks_of_a_step:
            raise RrfpError(
                f"a step has {num_tasks_of_a_step:,.0f} tasks, more than the "
                f"{self.most_tasks_of_a_step:,} that are replayed here; 'rrfp analyze whatif' "
                "replays them all"
            )
        return spread_evenly(steps, max(1, int(self.num_tasks / max(num_tasks_of_a_step, 1))))
