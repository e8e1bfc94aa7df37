"""A step of the drop-in as values: what was asked for, the plan before it, the report after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from rrfp.megatron.adapters.models import config_of, may_have_experts
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.megatron.step.random_streams import RandomStreams
from rrfp.megatron.step_groups import Place, place_in
from rrfp.megatron.step_policy import StepPolicy
from rrfp.runtime.planes.negotiation import AcceptedPlanes
from rrfp.runtime.protocols import StepSummary
from rrfp.schedule.balance import Hands


@dataclass(frozen=True, slots=True)
class StepCall:
    """What a training loop calls the drop-in with, as far as it says where and on what to run."""

    models: list[Any]
    """The chunks of this rank, in model order."""
    config: Any
    """Megatron's configuration of the models."""
    groups: Any
    """The process groups of the step."""
    place: Place
    has_experts: bool
    forward_only: bool

    @classmethod
    def of(cls, models: list[Any], groups: Any, *, forward_only: bool) -> Self:
        """The call for these chunks and process groups."""
        has_experts = may_have_experts(models[0])
        place = place_in(groups, has_experts=has_experts)
        return cls(models, config_of(models[0]), groups, place, has_experts, forward_only)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step is to run on this rank. It is made before the step and does not change."""

    step: int
    """The number of the step in records and on links."""
    call: StepCall
    policy: StepPolicy
    data: StepData
    streams: RandomStreams
    memory: StepMemory
    order: Sequence[int]
    """By microbatch: the number of its item in the data's own order."""
    admits_given: bool
    """Whether items enter in the data's own order."""
    plans_order: bool
    """Whether a search plans the order in which items enter."""
    measures_memory: bool
    """Whether the sizes of microbatches are predicted from what earlier ones kept."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """How a step went on this rank. Megatron's own schedule reports only its figures."""

    summary: StepSummary
    policy: StepPolicy | None = None
    order: Sequence[int] | None = None
    """The order in which items entered, if it was planned."""
    hands: Hands | None = None
    """The items that each replica was dealt, if they were dealt."""
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
