"""A step of the drop-in before it runs: what was asked for, and how it is to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rrfp.megatron.adapters.models import config_of, may_have_experts
from rrfp.megatron.memory.bound import StepMemory
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.megatron.step.random_streams import RandomStreams
from rrfp.megatron.step_groups import Place, place_in, step_groups
from rrfp.planning.step_policy import StepPolicy


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
    def of(
        cls, models: list[Any], p2p_communicator: Any, pg_collection: Any, *, forward_only: bool
    ) -> Self:
        """Make the call of these chunks, in the groups of Megatron's two arguments. Raises
        UsageError for groups that do not say where the step runs."""
        config, has_experts = config_of(models[0]), may_have_experts(models[0])
        groups = step_groups(p2p_communicator, pg_collection)
        place = place_in(groups, has_experts=has_experts)
        return cls(models, config, groups, place, has_experts, forward_only)


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
