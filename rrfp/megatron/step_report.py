"""The report of a finished step, and the interface of its observers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.runtime.protocols import StepSummary
from rrfp.schedule.admission import Assignment
from rrfp.schedule.rehearsal import StepPolicy


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of a step on this rank. Megatron's own schedule reports only the summary."""

    summary: StepSummary
    policy: StepPolicy | None = None
    order: Sequence[int] | None = None
    """The order in which items entered, if it was planned."""
    assignment: Assignment | None = None
    """The items assigned to each replica, if the global batch was balanced."""
    planes: AcceptedPlanes | None = None
    """The data planes of the recorded links from this rank."""
    is_evaluation: bool = False


class StepObserver(Protocol):
    """Is called at the begin and the end of each step of a schedule on this rank."""

    def begin(self, arguments: Mapping[str, Any]) -> int | None:
        """Note that a schedule starts a step, with some of Megatron's arguments. Return a value for
        `end`: the step's number, or None if the observer skips it."""

    def end(self, step: int | None, report: StepReport) -> None:
        """Note that the step for which `begin` returned `step` has ended without an error."""
