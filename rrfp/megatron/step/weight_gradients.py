"""Weight gradients as separate tasks: a backward computes input gradients, and these come later.

Inside a task, our own autograd function replaces the one of Megatron's parallel linear layers. Its
backward computes the gradients of the input and the bias, and stores the operands of the weight's
product. Autograd does not see the weight as an input, so the hooks of DistributedDataParallel do
not fire. Layers of Transformer Engine store their products themselves, in a queue per layer; we
empty it after each backward, to keep microbatches separate.

Parameters other than the weights of such layers (embeddings, norms, biases, routers) stay with the
backward.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from rrfp.megatron.memory.saved import tensors_in
from rrfp.megatron.step.gradients import Gradient, GradientSum, add_gradient

_FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
"""The name in `layers` under which Megatron's linear layers look up their function."""


def deferrable_weights(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a model chunk whose gradients can come after the backward, in model order.

    Excludes weights shared with an embedding, frozen ones, those whose gradients Megatron itself
    defers (`defer_embedding_wgrad_compute`), and those of Megatron-FSDP.
    """
    owners: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in chunk.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return [
        parameter
        for parameter, modules in owners.items()
        if parameter.requires_grad
        and not hasattr(parameter, "__fsdp_param__")
        and all(_defers(module, parameter) for module in modules)
    ]


def _defers(module: torch.nn.Module, parameter: torch.nn.Parameter) -> bool:
    if _has_store(module):
        # Transformer Engine tags weights whose gradients its `backward_dw` computes.
        return getattr(parameter, "skip_backward_post_hook", False)
    # An output layer that shares the embedding's weight on the same stage has no weight itself.
    return (
        isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear))
        and parameter is module.weight
        and getattr(module, "grad_output_buffer", None) is None
    )


def _has_store(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


class DeferredWeightGradients:
    """The weight gradients of one model chunk in one step, by microbatch."""

    def __init__(self, chunk: torch.nn.Module, gradients: GradientSum) -> None:
        """`gradients` sums the gradients of `deferrable_weights(chunk)`."""
        self._gradients = gradients
        self._weights = frozenset(deferrable_weights(chunk))
        self._queued: list[Any] = [
            module for module in reversed([*chunk.modules()]) if _has_store(module)
        ]
        self._products: dict[int, list[_Product]] = {}

    @property
    def waiting_bytes(self) -> int:
        """The size of the weight gradients that wait for those of earlier microbatches."""
        return self._gradients.waiting_bytes

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Wrap this microbatch's forward, and its backward, which may recompute forwards."""
        products = self._products.setdefault(microbatch, [])
        native = getattr(layers, _FUNCTION)
        setattr(layers, _FUNCTION, _Deferring(native, self._weights, products))
        try:
            yield
        finally:
            setattr(layers, _FUNCTION, native)
        for module in self._queued:
            queue = module.wgrad_store.context
            if not queue.empty():
                items = [queue.get() for _ in range(queue.qsize())]
                products.append(_QueuedProducts(module, items))

    def operands(self, microbatch: int) -> Iterator[torch.Tensor]:
        """The tensors that this microbatch's products keep until W."""
        for product in self._products[microbatch]:
            yield from product.operands

    def run(self, microbatch: int) -> None:
        """Compute this microbatch's weight gradients and add them.

        Under sequence parallelism this gathers inputs again, in a collective.
        DistributedDataParallel is not notified of the gradients; the caller must start their
        reduction.
        """
        products = self._products.pop(microbatch)
        with torch.no_grad():
            gradients = _gradients(products)
            if any(product.adds_in_place for product in products):
                with self._gradients.adding(microbatch):
                    for parameter, gradient in gradients:
                        add_gradient(parameter, gradient)
            else:
                self._gradients.add(microbatch, gradients)
        # The contexts of a graph hold this list. If a layer of Transformer Engine has stored an
        # input with its graph, that is a cycle, which Python's collector cannot see.
        products.clear()


class _Product(Protocol):
    """Weight gradients that have yet to be computed."""

    @property
    def weights(self) -> Sequence[torch.nn.Parameter]: ...

    @property
    def adds_in_place(self) -> bool:
        """Whether a fused kernel adds them to `main_grad`."""

    @property
    def operands(self) -> Iterable[torch.Tensor]:
        """The tensors that they are computed from."""

    def gradients(self) -> Iterator[Gradient]:
        """Compute them; yields those that are not added in place."""


def _gradients(products: Iterable[_Product]) -> Iterator[Gradient]:
    """One gradient per parameter, computed on demand. Gradients of a parameter that is used several
    times are summed first, as in autograd."""
    by_weights: dict[tuple[torch.nn.Parameter, ...], list[_Product]] = {}
    for product in products:
        by_weights.setdefault(tuple(product.weights), []).append(product)
    for same in by_weights.values():
        total: dict[torch.nn.Parameter, torch.Tensor] = {}
        for product in same:
            for parameter, gradient in product.gradients():
                known = total.get(parameter)
                total[parameter] = gradient if known is None else known + gradient
        yield from total.items()


@dataclass(frozen=True, slots=True)
class _Linear:
    """One use of a linear layer: the arguments of Megatron's function."""

    weight: torch.nn.Parameter
    fuses_accumulation: bool
    reduces_input_gradient: bool
    sequence_parallel: bool
    tp_group: Any

    def whole(self, input_: torch.Tensor) -> torch.Tensor:
        """The input of all ranks that share the sequence, valid until the next call."""
        if not self.sequence_parallel:
            return input_
        shape = [input_.size(0) * self.tp_group.size(), *input_.shape[1:]]
        gathered = layers.get_global_memory_buffer().get_tensor(shape, input_.dtype, "mpu")
        layers.dist_all_gather_func(gathered, input_, group=self.tp_group)
        return gathered  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _LinearProduct:
    """The weight gradient of one use of a linear layer."""

    linear: _Linear
    input_: torch.Tensor
    output_gradient: torch.Tensor

    @property
    def weights(self) -> tuple[torch.nn.Parameter]:
        return (self.linear.weight,)

    @property
    def adds_in_place(self) -> bool:
        return self.linear.fuses_accumulation

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_, self.output_gradient

    def gradients(self) -> Iterator[Gradient]:
        weight: Any = self.linear.weight
        output_gradient, input_ = prepare_input_tensors_for_wgrad_compute(
            self.output_gradient, self.linear.whole(self.input_)
        )
        if not self.adds_in_place:
            yield weight, output_gradient.t().matmul(input_)
        elif weight.main_grad.dtype == torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
                input_, output_gradient, weight.main_grad
            )
        else:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(
                input_, output_gradient, weight.main_grad
            )


@dataclass(frozen=True, slots=True)
class _QueuedProducts:
    """The products that one layer of Transformer Engine stored in one backward."""

    module: Any
    items: list[Any]

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [
            parameter
            for parameter in self.module.parameters(recurse=False)
            if getattr(parameter, "skip_backward_post_hook", False)
        ]

    @property
    def adds_in_place(self) -> bool:
        return getattr(self.module, "fuse_wgrad_accumulation", False)

    @property
    def operands(self) -> Iterator[torch.Tensor]:
        return tensors_in(self.items)

    def gradients(self) -> Iterator[Gradient]:
        # The layer leaves a gradient in `.grad` and calls the hooks of DistributedDataParallel; we
        # sum gradients and report their completion ourselves.
        module, queue = self.module, self.module.wgrad_store.context
        hooks, module.wgrad_accumulation_and_reduce_hooks = (
            module.wgrad_accumulation_and_reduce_hooks,
            [],
        )
        # With `main_grad`, a fused backward leaves only a placeholder in `.grad`.
        kept = [None if hasattr(weight, "main_grad") else weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        for item in self.items:
            queue.put(item)
        try:
            while not queue.empty():
                module.backward_dw()
                for weight in self.weights:
                    if weight.grad is not None:
                        yield weight, weight.grad
                        weight.grad = None
        finally:
            module.wgrad_accumulation_and_reduce_hooks = hooks
            for weight, gradient in zip(self.weights, kept, strict=True):
                weight.grad = gradient


@dataclass(frozen=True, slots=True)
class _Deferring:
    """Replaces Megatron's function in one task."""

    native: Any
    weights: frozenset[torch.nn.Parameter]
    products: list[_Product]

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
        # From 0.19 on: over how many ranks the weight is sharded, which is 1 (`refusals`).
        if weight not in self.weights:
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
        linear = _Linear(
            weight, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group
        )
        # Without an input that requires a gradient, autograd would skip the backward.
        anchor = None if input_.requires_grad else input_.new_empty(0).requires_grad_()
        output: torch.Tensor = _InputGradient.apply(  # type: ignore[no-untyped-call]
            input_, anchor, bias, linear, self.products
        )
        return output


class _InputGradient(torch.autograd.Function):
    """Megatron's linear function without the weight's gradient, operation by operation."""

    @staticmethod
    @layers.custom_fwd  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        _anchor: torch.Tensor | None,
        bias: torch.Tensor | None,
        linear: _Linear,
        products: list[_Product],
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.linear = linear
        ctx.products = products
        ctx.has_bias = bias is not None
        output = torch.matmul(linear.whole(input_), linear.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, output_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, None]:
        (input_,) = ctx.saved_tensors
        linear: _Linear = ctx.linear
        # The product needs only their values. The input has a graph, and so has the gradient from
        # Megatron's cross entropy, which saves it; both graphs would stay alive until W.
        ctx.products.append(_LinearProduct(linear, input_.detach(), output_gradient.detach()))
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
