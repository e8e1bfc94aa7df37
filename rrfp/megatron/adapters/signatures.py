"""Functions of Megatron whose parameters have changed."""

import inspect
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

_backward_step = schedules.backward_step


def _takes_type() -> bool:
    parameters = inspect.signature(_backward_step).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        # A patch that passes on whatever it gets: the parameter left when this function came.
        return not hasattr(schedules, "backward_step_multimodule")
    return any(parameter.name == "model_type" for parameter in parameters)


_TAKES_TYPE = _takes_type()


def backward_step(
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    model: Any,
    config: Any,
) -> list[torch.Tensor | None]:
    """Megatron's: the gradients of the inputs, from those of the outputs (None for the loss). Up to
    0.16 it takes the model's type, and does nothing with it."""
    model_type = (get_model_type(model),) if _TAKES_TYPE else ()
    found: list[torch.Tensor | None] = _backward_step(
        inputs, outputs, gradients, *model_type, config
    )
    return found
