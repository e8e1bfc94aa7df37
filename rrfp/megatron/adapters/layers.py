"""Megatron's linear layers with deferred weight gradients, and its softmaxes with masks.

During a task, rrfp's autograd function replaces the one that the linear layers look up. Its
backward computes the gradients of the input and the bias, and passes the operands of the weight
gradient to a callback. Every computation is Megatron's own, operation by operation.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

_FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
"""The name in `layers` under which Megatron's linear layers look up their function."""


def masked_softmaxes(model: torch.nn.Module) -> list[Any]:
    """The model's softmax layers (Megatron's FusedScaleMaskSoftmax), which apply a mask with their
    `mask_func`."""
    return [module for module in model.modules() if isinstance(module, FusedScaleMaskSoftmax)]


def is_parallel_linear(module: torch.nn.Module) -> bool:
    """True if a module is one of Megatron's own parallel linear layers."""
    return isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear))


@contextmanager
def deferring_linear(defers: Callable[..., bool], keep: "Keep") -> Iterator[None]:
    """Make linear layers that run in this block leave out their weight gradients if `defers`
    returns True for a use. Their backwards, also after the block, then pass a LinearProduct to
    `keep`. Patches Megatron's module `layers`."""
    native = getattr(layers, _FUNCTION)
    setattr(layers, _FUNCTION, _DeferringLinear(native, defers, keep))
    try:
        yield
    finally:
        setattr(layers, _FUNCTION, native)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Thread-local torch settings that affect an operation's result: autocast, dtype, stream."""

    device: torch.device
    autocasts: bool
    autocast_dtype: torch.dtype | None
    default_dtype: torch.dtype
    stream: Any

    @classmethod
    def now(cls, device: torch.device) -> "ThreadState":
        """Read the settings of the current thread."""
        autocasts = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(
            device.type
        )
        return cls(
            device,
            autocasts,
            torch.get_autocast_dtype(device.type) if autocasts else None,
            torch.get_default_dtype(),
            torch.cuda.current_stream(device) if device.type == "cuda" else None,
        )

    @contextmanager
    def restored(self, operands: Iterable[torch.Tensor]) -> Iterator[None]:
        """Apply this state's autocast and default dtype for the block. The current stream stays,
        but first waits for the state's stream, on which the operands were made."""
        now = self.now(self.device)
        if now == self:
            yield
            return
        if now.stream != self.stream:
            now.stream.wait_stream(self.stream)
            for operand in operands:
                operand.record_stream(now.stream)
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.autocast(
                self.device.type, dtype=self.autocast_dtype, enabled=self.autocasts
            ):
                yield
        finally:
            torch.set_default_dtype(now.default_dtype)


@dataclass(frozen=True, slots=True)
class Linear:
    """One use of a linear layer: the arguments of Megatron's function."""

    weight: torch.nn.Parameter
    fuses_accumulation: bool
    reduces_input_gradient: bool
    sequence_parallel: bool
    tp_group: Any
    casts_gradient: bool
    """True if the backward casts the output's gradient to the input's dtype (from 0.20 on)."""

    def whole(self, input_: torch.Tensor) -> torch.Tensor:
        """The full input: under sequence parallelism, gathered over the group into Megatron's
        global buffer, where it is valid until the next call."""
        if not self.sequence_parallel:
            return input_
        shape = [input_.size(0) * self.tp_group.size(), *input_.shape[1:]]
        gathered = layers.get_global_memory_buffer().get_tensor(shape, input_.dtype, "mpu")
        layers.dist_all_gather_func(gathered, input_, group=self.tp_group)
        return gathered  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """The weight gradient of one use of a linear layer, not computed yet."""

    linear: Linear
    input_: torch.Tensor
    output_gradient: torch.Tensor
    state: ThreadState
    backward: int

    @property
    def weights(self) -> tuple[torch.nn.Parameter]:
        """The layer's weight, as a tuple."""
        return (self.linear.weight,)

    @property
    def adds_in_place(self) -> bool:
        """True if a fused kernel adds the gradient to `main_grad`."""
        return self.linear.fuses_accumulation

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The input and the gradient of the output."""
        return self.input_, self.output_gradient

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Compute the gradient under the settings of its backward, and yield it with the weight.
        Yields nothing if a fused kernel adds it to `main_grad`."""
        weight: Any = self.linear.weight
        with self.state.restored(self.operands):
            product = self._compute()
        if product is not None:
            # As autograd does: under autocast the product has another dtype.
            yield weight, product.to(weight.dtype)

    def _compute(self) -> torch.Tensor | None:
        """Compute the gradient; None if a fused kernel has added it to `main_grad`."""
        weight: Any = self.linear.weight
        output_gradient, input_ = prepare_input_tensors_for_wgrad_compute(
            self.output_gradient, self.linear.whole(self.input_)
        )
        if not self.adds_in_place:
            product: torch.Tensor = output_gradient.t().matmul(input_)
            return product
        if weight.main_grad.dtype == torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
                input_, output_gradient, weight.main_grad
            )
        else:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(
                input_, output_gradient, weight.main_grad
            )
        return None


Keep = Callable[[LinearProduct], None]

_anchors = {torch.device("cpu"): torch.empty(0, requires_grad=True)}
"""By device: a leaf that represents all deferred weights in a graph (see `_InputGradient`)."""


@dataclass(frozen=True, slots=True)
class _DeferringLinear:
    """Replaces Megatron's autograd function during one task."""

    native: Any
    defers: Callable[..., bool]
    """Returns True if a use of a weight leaves its gradient to W."""
    keep: Keep
    """Called with the product of a use in its backward."""

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
        """Compute the layer's output, as Megatron's function does. If `defers` returns True for
        this use of the weight, its backward leaves the weight's gradient out and passes a
        LinearProduct to `keep`; otherwise Megatron's own function runs."""
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
    """The parameters that Megatron's function gained after 0.16, with their neutral values."""
    known = inspect.signature(function.forward).parameters.values()
    return {
        parameter.name: _PLAIN.get(parameter.name, parameter.default)
        for parameter in [*known][_NUM_OLDEST:]
    }


_NUM_OLDEST = 10
"""The number of parameters of Megatron's function in 0.16, including the context."""

_PLAIN = {"gtp_remat_size": 1, "output_dtype": None}


class _InputGradient(torch.autograd.Function):
    """Megatron's linear function without the weight's gradient, operation by operation.

    The anchor represents the weight. With it, a backward exists even if no input requires a
    gradient. Autograd visits it in backwards that add gradients to weights, but not in a
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
        keep: Keep,
    ) -> torch.Tensor:
        """Return the linear layer's output. The input is saved for the backward."""
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
        """Return the gradients of the input and the bias, the input's reduced over the
        tensor-parallel group as in Megatron. Pass the operands of the weight's gradient to `keep`,
        unless this backward adds none to weights."""
        (input_,) = ctx.saved_tensors
        linear: Linear = ctx.linear
        if linear.casts_gradient:
            output_gradient = output_gradient.to(input_.dtype)
        # Detached: the input has a graph, and so has the gradient from Megatron's cross entropy,
        # which saves it. Both graphs would otherwise stay alive until W.
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
