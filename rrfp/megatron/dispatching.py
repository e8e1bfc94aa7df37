"""How the drop-in dispatches tasks, as its user says it. Imports no torch."""

from dataclasses import dataclass

from rrfp.schedule.dispatcher import Dispatch

DEFAULT_LIMIT = 32


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How tasks are dispatched; the defaults are the paper's."""

    hint: str = "bf"
    """A hint's name or the path of an order file."""
    dispatch: Dispatch = Dispatch.READY
    limit: int | None = None
    """D at which forwards are withheld. None: `DEFAULT_LIMIT` under `ready` dispatch,
    unchecked in `fixed`."""
    connect_s: float = 60.0
    """How long the ranks may take to meet at their first step."""
    stall_s: float = 600.0
    """How long a rank may wait with nothing arriving before it gives up."""

    @property
    def effective_limit(self) -> int | None:
        """The limit that withholds forwards, if any does."""
        if self.dispatch is Dispatch.FIXED:
            return None
        return DEFAULT_LIMIT if self.limit is None else self.limit

    def num_credits(self, num_microbatches: int, *, forward_only: bool) -> int:
        """Messages that a link must hold so that a full one never binds a decision."""
        limit = None if forward_only else self.effective_limit
        return num_microbatches if limit is None else min(limit, num_microbatches) + 1
