"""The functions of Megatron's schedules that run one microbatch, and the work around a step.

Megatron's own functions do the work, including loss scaling, gradient scaling and deallocation.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import (
    check_first_val_step,
    clear_embedding_activation_buffer,
    deallocate_output_tensor,
    finish_embedding_wgrad_compute,
    forward_step,
)
from megatron.core.utils import get_model_type, make_viewless_tensor

_backward_step = schedules.backward_step


def _takes_type() -> bool:
    """True if Megatron's `backward_step` takes a `model_type` (up to 0.16). If a patch hides the
    parameters, another function of the later releases decides."""
    parameters = inspect.signature(_backward_step).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        # Megatron removed `model_type` when it added this function.
        return not hasattr(schedules, "backward_step_multimodule")
    return any(parameter.name == "model_type" for parameter in parameters)


_TAKES_TYPE = _takes_type()


def run_forward(
    forward_step_func: Callable[..., Any],
    data: Any,
    model: Any,
    num_microbatches: int,
    inputs: list[torch.Tensor | None],
    reduced: list[Any],
    config: Any,
    cp_size: int,
    *,
    microbatch: int,
    is_last_stage: bool,
    is_first_microbatch: bool = False,
    collect_non_loss_data: bool = False,
    vp_stage: int | None = None,
) -> tuple[list[Any], Any]:
    """Run the forward of a microbatch. Returns the outputs and the number of tokens that the loss
    counted; appends the loss function's results to `reduced`. `vp_stage` is the chunk's index if a
    rank has several chunks; Megatron checks it against the model's."""
    outputs, num_tokens = forward_step(
        forward_step_func,
        data,
        model,
        num_microbatches,
        inputs,
        reduced,
        config,
        cp_size,
        collect_non_loss_data=collect_non_loss_data,
        is_first_microbatch=is_first_microbatch,
        current_microbatch=microbatch,
        vp_stage=vp_stage,
        is_last_stage=is_last_stage,
    )
    return outputs, num_tokens


def is_first_since_update(
    first_val_step: bool | None, *, forward_only: bool, is_first_forward: bool
) -> bool:
    """True if a forward is the first one since the weights changed: the step's first forward. In an
    evaluation, it also has to be the first validation step, if the training loop says which step
    that is (`first_val_step`)."""
    return bool(check_first_val_step(first_val_step, forward_only, is_first_forward))


def outputs_to_send(outputs: list[torch.Tensor], config: Any) -> tuple[torch.Tensor, ...]:
    """Return a forward's outputs for the next stage, detached from the graph. If the configuration
    frees outputs, first replace `outputs[0]` by a tensor that is no view."""
    if config.deallocate_pipeline_outputs:
        # Megatron empties the tensor in place, which would not affect the base of a view.
        outputs[0] = make_viewless_tensor(
            outputs[0], requires_grad=outputs[0].requires_grad, keep_graph=True
        )
    return tuple(output.detach() for output in outputs)


def free_output(outputs: list[torch.Tensor], config: Any) -> None:
    """Free the output's data, which only the graph needs from now on, if the configuration sets
    `deallocate_pipeline_outputs`."""
    deallocate_output_tensor(outputs[0], config.deallocate_pipeline_outputs)


def run_backward(
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    model: Any,
    config: Any,
) -> list[torch.Tensor | None]:
    """Run the backward of a microbatch and return the gradients of its inputs. `gradients` are
    those of the outputs (None for the loss). Up to 0.16 Megatron takes the model's type and ignores
    it."""
    model_type = (get_model_type(model),) if _TAKES_TYPE else ()
    found: list[torch.Tensor | None] = _backward_step(
        inputs, outputs, gradients, *model_type, config
    )
    return found


def start_embedding_gradients(
    config: Any, models: Sequence[Any], groups: Any, *, has_last_stage: bool
) -> Callable[[], None]:
    """Clear the last stage's buffer of embedding activations, which `defer_embedding_wgrad_compute`
    fills during a training step. Return a function that computes the deferred gradients; call it
    after the last task. Without that setting, both do nothing."""
    embedding = clear_embedding_activation_buffer(config, models, has_last_stage)
    return partial(finish_embedding_wgrad_compute, config, embedding, has_last_stage, groups.tp)
