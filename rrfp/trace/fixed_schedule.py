"""The counts of a dispatcher, for ranks that follow a fixed schedule without one."""

from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind


class FixedScheduleCounts:
    """Counts over the tasks of one rank's step, fed in the order in which they run."""

    def __init__(self, releases: Kind) -> None:
        """`releases` is the kind of task that frees an activation: W if the backward is split,
        otherwise B."""
        self._releases = releases
        self.num_run = 0
        self.depth = 0
        """D: chunk-forwards minus chunk-backwards run."""
        self.held = 0
        self.peak_held = 0
        """The most activations held so far, in slots of one chunk and one microbatch."""

    def ran(self, kind: Kind) -> tuple[int, int, int, int, int, int, int]:
        """Count a task; return the fields of its `TaskRecord` from `hint_position` on."""
        place = self.num_run
        self.num_run += 1
        self.depth += (kind is Kind.F) - (kind is Kind.B)
        self.held += (kind is Kind.F) - (kind is self._releases)
        self.peak_held = max(self.peak_held, self.held)
        # A fixed schedule considers one task and skips none.
        ready, skipped = 1, 0
        of_kind = int(kind is Kind.F), int(kind is Kind.B)
        return place, ready, skipped, self.depth, self.held, *of_kind

    def cause_of_transfer(self, num_tasks: int) -> Cause:
        """The cause of a wait for a transfer at this point of a step of `num_tasks` tasks."""
        if self.num_run == 0:
            return Cause.WARMUP
        return Cause.DRAIN if self.num_run == num_tasks else Cause.TRANSFER
