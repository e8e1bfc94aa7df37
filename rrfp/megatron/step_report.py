"""A step after it has run, as its schedule reports it; recorders of native schedules use it too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rrfp.planning.step_policy import StepPolicy
from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.runtime.protocols import StepSummary
from rrfp.schedule.balance import Hands


@dataclass(frozen=True, slots=True)
class StepReport:
    """How a step went on this rank. Megatron's own schedule reports only its figures."""

    summary: StepSummary
    policy: StepPolicy | None = None
    order: Sequence[int] | None = None
    """The order in which items entered, if it was planned."""
    assignment: Hands | None = None
    """The items of each replica, if the global batch was balanced."""
    planes: AcceptedPlanes | None = None
    """What carries the tensors of the recorded links from this rank."""
    is_evaluation: bool = False


class StepObserver(Protocol):
    """Is told of the steps of a schedule on this rank."""

    def begin(self, arguments: Mapping[str, Any]) -> int | None:
        """A call of the schedule begins with these of Megatron's arguments. Returns the number of
        the step for `end`."""

    def end(self, step: int | None, report: StepReport) -> None:
        """The call for which `begin` returned this has ended without an error."""
