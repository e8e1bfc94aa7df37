"""Megatron's linear function, and the one that takes its place where the backward is split."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from rrfp.megatron.step.weight_products import Linear, LinearProduct, ThreadState

_anchors = {torch.device("cpu"): torch.empty(0, requires_grad=True)}
"""By device, a leaf that stands for all deferred weights in a graph (`_InputGradient`)."""


@dataclass(frozen=True, slots=True)
class DeferringLinear:
    """Replaces Megatron's function in one task."""

    native: Any
    defers: Callable[..., bool]
    """Whether a use of a weight leaves its gradient to W; gets what else the use is."""
    keep: Callable[[LinearProduct], None]
    """Gets the product of a use in its backward."""

    def apply(
        self,
        input_: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: Any,
        *newer: Any,
    ) -> torch.Tensor:
        newer_parameters = _newer_parameters(self.native)
        sets = (
            f"{name} {value}"
            for (name, plain), value in zip(newer_parameters.items(), newer, strict=True)
            if value is not plain and value not in (plain, input_.dtype)
        )
        if not self.defers(weight, sequence_parallel=sequence_parallel, sets=next(sets, None)):
            return self.native.apply(  # type: ignore[no-any-return]
                input_,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                wgrad_deferral_limit,
                tp_group,
                *newer,
            )
        linear = Linear(
            weight,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            tp_group,
            "output_dtype" in newer_parameters,
        )
        if input_.device not in _anchors:
            _anchors[input_.device] = input_.new_empty(0).requires_grad_()
        output: torch.Tensor = _InputGradient.apply(  # type: ignore[no-untyped-call]
            input_, _anchors[input_.device], bias, linear, self.keep
        )
        return output


@cache
def _newer_parameters(function: Any) -> dict[str, Any]:
    """The parameters of Megatron's function that came after 0.16, and their values in plain use."""
    known = inspect.signature(function.forward).parameters.values()
    return {
        parameter.name: _PLAIN.get(parameter.name, parameter.default)
        for parameter in [*known][_NUM_OLDEST:]
    }


_NUM_OLDEST = 10
"""The parameters that `_Deferring.apply` names, and the context."""

_PLAIN = {"gtp_remat_size": 1, "output_dtype": None}


class _InputGradient(torch.autograd.Function):
    """Megatron's linear function without the weight's gradient, operation by operation.

    The anchor stands for the weight. It keeps the backward even if no input requires a gradient,
    and autograd visits it in those backwards that add gradients to weights, but not in a
    `torch.autograd.grad` of something else.
    """

    @staticmethod
    @layers.custom_fwd  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        _anchor: torch.Tensor,
        bias: torch.Tensor | None,
        linear: Linear,
        keep: Callable[[LinearProduct], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.linear = linear
        ctx.keep = keep
        ctx.has_bias = bias is not None
        output = torch.matmul(linear.whole(input_), linear.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, output_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, None]:
        (input_,) = ctx.saved_tensors
        linear: Linear = ctx.linear
        if linear.casts_gradient:
            output_gradient = output_gradient.to(input_.dtype)
        # The product needs only their values. The input has a graph, and so has the gradient from
        # Megatron's cross entropy, which saves it; both graphs would stay alive until W.
        _, (anchor, _), *_ = ctx.next_functions
        if torch._C._will_engine_execute_node(anchor):
            product = LinearProduct(
                linear,
                input_.detach(),
                output_gradient.detach(),
                ThreadState.now(input_.device),
                torch._C._current_graph_task_id(),
            )
            ctx.keep(product)
        gradient = output_gradient.matmul(linear.weight)
        if linear.reduces_input_gradient:
            torch.distributed.all_reduce(gradient, group=linear.tp_group)
        if linear.sequence_parallel:
            total, gradient = gradient, torch.empty_like(input_)
            layers.dist_reduce_scatter_func(gradient, total, group=linear.tp_group)
        bias_gradient = None
        if ctx.has_bias:
            bias_gradient = output_gradient.contiguous().flatten(0, -2).sum(dim=0)
        return gradient, None, bias_gradient, None, None
