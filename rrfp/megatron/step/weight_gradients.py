"""Weight gradients as separate tasks: a backward computes input gradients, and these come later.

Inside a task, our own autograd function replaces the one of Megatron's parallel linear layers. Its
backward computes the gradients of the input and the bias, and stores the operands of the weight's
product. Autograd does not see the weight as an input, so the hooks of DistributedDataParallel do
not fire. Layers of Transformer Engine store their products themselves, in a queue per layer; we
empty it after each backward, to keep microbatches separate.

Parameters other than the weights of such layers (embeddings, norms, biases, routers) stay with the
backward.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch.utils.weak import WeakTensorKeyDictionary

from rrfp.megatron.memory.saved import tensors_in
from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradient_hooks import (
    Accumulator,
    described_hook,
    edges_to,
    paths_to_parameters,
    weight_hook,
)
from rrfp.megatron.step.gradients import Gradient, add_gradient, gradient_sum

_log = logging.getLogger(__name__)

_FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
"""The name in `layers` under which Megatron's linear layers look up their function."""

_NO_BACKWARD = -1
"""torch's number of the backward that runs, outside of one."""

_anchors = {torch.device("cpu"): torch.empty(0, requires_grad=True)}
"""By device, a leaf that stands for all deferred weights in a graph (`_InputGradient`)."""

_OTHERS: Any = WeakTensorKeyDictionary()
"""Weights that autograd has given another gradient than their layer's."""

_REPORTED: Any = WeakTensorKeyDictionary()
"""Weights that a warning has named."""


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
        return _is_tagged(parameter)
    # An output layer that shares the embedding's weight on the same stage has no weight itself.
    return (
        isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear))
        and parameter is module.weight
        and getattr(module, "grad_output_buffer", None) is None
    )


def _is_tagged(parameter: torch.nn.Parameter) -> bool:
    """Whether Transformer Engine's `backward_dw` computes its gradient."""
    return getattr(parameter, "skip_backward_post_hook", False)


def _tagged(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in module.parameters(recurse=False) if _is_tagged(each)]


def _has_store(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def lost_hook(chunk: torch.nn.Module) -> tuple[str, Any] | None:
    """A weight whose product Transformer Engine keeps, by name, and a hook on it, which would not
    see its gradient."""
    names = {weight: name for name, weight in chunk.named_parameters()}
    for module in chunk.modules():
        for weight in _tagged(module) if _has_store(module) else ():
            hook = weight_hook(weight) if weight.requires_grad else None
            if hook is not None:
                return names[weight], hook
    return None


class DeferredWeightGradients:
    """The weight gradients of one model chunk in one step, by microbatch.

    Some weights stay with the backward, where Megatron's own function computes their gradients and
    autograd adds them: those with hooks, and those that autograd has given another gradient before.
    Under sequence parallelism all ranks of a group must run the same collectives, whatever hooks
    each has, so there every weight is deferred, and W runs the hooks.
    """

    def __init__(self, chunk: torch.nn.Module, order: GradOrder, num_microbatches: int) -> None:
        """`order` is that in which the gradients of the step's microbatches are summed."""
        self._names = {weight: name for name, weight in chunk.named_parameters()}
        self._queued: list[Any] = [
            module for module in reversed([*chunk.modules()]) if _has_store(module)
        ]
        in_queues = {weight for module in self._queued for weight in _tagged(module)}
        paths = paths_to_parameters(chunk)
        self._accumulators = {
            weight: Accumulator(weight, paths[weight], self._take)
            for weight in deferrable_weights(chunk)
            if weight not in in_queues
        }
        self._sums = {
            weight: gradient_sum(order, [weight], num_microbatches)
            for weight in in_queues | self._accumulators.keys()
        }
        self._microbatches: dict[int, _Microbatch] = {}
        self._running: _Microbatch | None = None
        self._unreported: list[str] = []

    @property
    def waiting_bytes(self) -> int:
        """The size of the weight gradients that wait for those of earlier microbatches."""
        return sum(each.waiting_bytes for each in self._sums.values())

    @contextmanager
    def task(self, microbatch: int, outputs: Sequence[torch.Tensor | None] = ()) -> Iterator[None]:
        """Wrap this microbatch's forward, and its backward from `outputs`, which may recompute
        forwards."""
        running = self._microbatches.setdefault(microbatch, _Microbatch(microbatch))
        running.outputs = outputs
        native = getattr(layers, _FUNCTION)
        setattr(layers, _FUNCTION, _Deferring(native, self, running))
        self._running = running
        try:
            with running.adding:
                for weight in running.undeferred:
                    self._add_in_backward(running, weight)
                yield
        finally:
            self._running = None
            setattr(layers, _FUNCTION, native)
            running.outputs = ()
        self._report()
        for module in self._queued:
            queue = module.wgrad_store.context
            if not queue.empty():
                items = [queue.get() for _ in range(queue.qsize())]
                running.products.append(_QueuedProducts(module, items))

    def operands(self, microbatch: int) -> Iterator[torch.Tensor]:
        """The tensors that this microbatch's products keep until W."""
        for product in self._microbatches[microbatch].products:
            yield from product.operands

    def run(self, microbatch: int) -> None:
        """Compute this microbatch's weight gradients and add them.

        Under sequence parallelism this gathers inputs again, in a collective.
        DistributedDataParallel is not notified of the gradients; the caller must start their
        reduction.
        """
        running = self._microbatches.pop(microbatch)
        by_weights: dict[tuple[torch.nn.Parameter, ...], list[_Product]] = {}
        for product in running.products:
            by_weights.setdefault(tuple(product.weights), []).append(product)
        left = self._sums.keys() - running.undeferred
        with torch.no_grad():
            for weights, products in by_weights.items():
                left -= {*weights}
                if any(product.adds_in_place for product in products) or any(
                    map(self._is_hooked, weights)
                ):
                    with ExitStack() as adding:
                        for weight in weights:
                            adding.enter_context(self._sums[weight].adding(microbatch))
                        self._add(products)
                elif len(weights) == 1:
                    self._sums[weights[0]].add(microbatch, _gradients(products))
                else:
                    found = list(_gradients(products))
                    for weight in weights:
                        own = [each for each in found if each[0] is weight]
                        self._sums[weight].add(microbatch, own)
            for weight in left:
                self._sums[weight].add(microbatch, ())
        # The contexts of a graph hold this list. If a layer of Transformer Engine has stored an
        # input with its graph, that is a cycle, which Python's collector cannot see.
        running.products.clear()

    # Called in the tasks.

    def defers(
        self, running: "_Microbatch", weight: Any, *, sequence_parallel: bool, sets: str | None
    ) -> bool:
        """Whether a use of a weight leaves its gradient to W. `sets` is a setting of the layer that
        only Megatron's own function follows."""
        accumulator = self._accumulators.get(weight)
        if accumulator is None:
            return False
        if sets is not None:
            self._note(weight, sets)
        elif sequence_parallel or not self._has_reason(accumulator):
            running.num_uses[weight] += torch.is_grad_enabled()
            return True
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            running.undeferred.add(weight)
        else:
            self._add_in_backward(running, weight)
        return False

    def keep(self, running: "_Microbatch", product: "_LinearProduct") -> None:
        """Keep a product of this backward for W."""
        (weight,) = product.weights
        accumulator = self._accumulators[weight]
        has_others = torch._C._will_engine_execute_node(accumulator.node)
        if weight in running.undeferred or (
            # The weight was given a hook after the forward.
            self._running is running
            and not has_others
            and not product.linear.sequence_parallel
            and running.num_uses[weight] == 1
            and accumulator.hook() is not None
        ):
            self._add_in_backward(running, weight)
            self._add([product])
            return
        if has_others:
            self._separate(running, accumulator)
        running.products.append(product)

    def _has_reason(self, accumulator: Accumulator) -> bool:
        """Whether this weight's gradient must be computed in the backward."""
        weight = accumulator.weight
        if weight in _OTHERS:
            return True
        hook = accumulator.hook() or accumulator.module_hook()
        if hook is None:
            return False
        self._note(weight, described_hook(hook))
        return True

    def _is_hooked(self, weight: torch.nn.Parameter) -> bool:
        accumulator = self._accumulators.get(weight)
        return accumulator is not None and accumulator.hook() is not None

    def _add_in_backward(self, running: "_Microbatch", weight: torch.nn.Parameter) -> None:
        """Let autograd add this weight's gradient in the backward that runs."""
        if weight not in running.added:
            running.undeferred.add(weight)
            running.added.add(weight)
            running.adding.enter_context(self._sums[weight].adding(running.number))

    def _take(self, accumulator: Accumulator, gradient: torch.Tensor | None) -> bool:
        """Keep for W what autograd is about to add to a deferred weight."""
        running, weight = self._running, accumulator.weight
        if running is None or weight in running.undeferred:
            return False
        running.adding.callback(accumulator.restore)
        is_separated = (weight, torch._C._current_graph_task_id()) in running.separated
        if gradient is None:
            return is_separated
        # If they are separated, this is the sum of those that came before the first product.
        self._arrive(running, weight, gradient, is_first=is_separated)
        return True

    def _arrive(
        self,
        running: "_Microbatch",
        weight: torch.nn.Parameter,
        gradient: torch.Tensor,
        *,
        is_first: bool = False,
    ) -> None:
        if weight not in _OTHERS:
            _OTHERS[weight] = True
            self._note(weight, "another gradient than its layer's")
        arrived = _Arrived(weight, gradient)
        running.products.insert(0 if is_first else len(running.products), arrived)

    def _separate(self, running: "_Microbatch", accumulator: Accumulator) -> None:
        """Take the other gradients of a weight one by one as they arrive after a product, because
        autograd would add each to what came before it."""
        weight, number = accumulator.weight, torch._C._current_graph_task_id()
        came_before = any(
            isinstance(product, _Arrived)
            and product.weights[0] is weight
            and product.backward == number
            for product in running.products
        )
        if came_before or (weight, number) in running.separated:
            return
        running.separated.add((weight, number))

        def take(places: list[int], gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
            for place in places:
                if gradients[place] is not None:
                    self._arrive(running, weight, gradients[place].to(weight.dtype))
            return tuple(
                None if place in places else gradient for place, gradient in enumerate(gradients)
            )

        for node, places in edges_to(accumulator.node, running.outputs):
            handle = node.register_hook(partial(take, places))
            running.adding.callback(handle.remove)

    def _add(self, products: Iterable["_Product"]) -> None:
        """Add gradients as autograd does, with the weights' hooks."""
        for group in _by_backward(products):
            for parameter, gradient in _gradients(group):
                if self._is_hooked(parameter):
                    torch.autograd.backward([parameter], [gradient])
                else:
                    add_gradient(parameter, gradient)
            if any(product.adds_in_place for product in group):
                # As in Megatron: the hooks get a placeholder.
                weight: Any
                for weight in filter(self._is_hooked, group[0].weights):
                    weight.grad_added_to_main_grad = True
                    torch.autograd.backward([weight], [torch.zeros_like(weight)])

    def _note(self, weight: torch.nn.Parameter, why: str) -> None:
        if weight not in _REPORTED:
            _REPORTED[weight] = True
            self._unreported.append(f"{self._names[weight]} has {why}")

    def _report(self) -> None:
        if self._unreported:
            first, *others = self._unreported
            more = f" (and {len(others)} more weights as well)" if others else ""
            _log.warning("rrfp: %s%s, so its gradient is not split off the backward", first, more)
            self._unreported.clear()


class _Microbatch:
    """What one microbatch leaves for W."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.products: list[_Product] = []
        """In the order in which they, or the gradients of autograd among them, arrive."""
        self.undeferred: set[torch.nn.Parameter] = set()
        """The weights whose gradients its backward adds."""
        self.num_uses: Counter[torch.nn.Parameter] = Counter()
        """Of deferred weights, in forwards that have a backward."""
        self.outputs: Sequence[torch.Tensor | None] = ()
        """What the backward that runs begins with."""
        self.adding = ExitStack()
        """Left when a task ends."""
        self.added: set[torch.nn.Parameter] = set()
        self.separated: set[tuple[torch.nn.Parameter, int]] = set()
        """Weights whose other gradients are taken one by one, in the backwards of these numbers."""


class _Product(Protocol):
    """Weight gradients that have yet to be computed."""

    @property
    def weights(self) -> Sequence[torch.nn.Parameter]: ...

    @property
    def backward(self) -> int:
        """The number of the backward that it belongs to: a reentrant one has its own."""

    @property
    def adds_in_place(self) -> bool:
        """Whether a fused kernel adds them to `main_grad`."""

    @property
    def operands(self) -> Iterable[torch.Tensor]:
        """The tensors that they are computed from."""

    def gradients(self) -> Iterator[Gradient]:
        """Compute them; yields those that are not added in place."""


def _by_backward(products: Iterable[_Product]) -> Iterable[list[_Product]]:
    """The products of each backward, in the order in which autograd adds them: as the last of a
    backward arrives."""
    found: dict[tuple[int, tuple[torch.nn.Parameter, ...]], list[_Product]] = {}
    for product in products:
        key = product.backward, tuple(product.weights)
        found[key] = [*found.pop(key, ()), product]
    return found.values()


def _gradients(products: Iterable[_Product]) -> Iterator[Gradient]:
    """One gradient per backward and parameter, computed on demand. Gradients of a parameter that is
    used several times in one are summed first, as in autograd."""
    for same in _by_backward(products):
        total: dict[torch.nn.Parameter, torch.Tensor] = {}
        in_place = any(product.adds_in_place for product in same)
        for product in same:
            for parameter, gradient in product.gradients():
                if in_place and isinstance(product, _Arrived) and _drops_others(parameter):
                    continue
                known = total.get(parameter)
                total[parameter] = gradient if known is None else known + gradient
        yield from total.items()


def _drops_others(weight: Any) -> bool:
    """Whether Megatron's DistributedDataParallel takes only what a fused kernel has added."""
    return hasattr(weight, "grad_added_to_main_grad") and not getattr(
        weight, "zero_out_wgrad", False
    )


@dataclass(frozen=True, slots=True)
class _ThreadState:
    """The state of a thread that operations depend on."""

    device: torch.device
    autocasts: bool
    autocast_dtype: torch.dtype | None
    default_dtype: torch.dtype
    stream: Any

    @classmethod
    def now(cls, device: torch.device) -> "_ThreadState":
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
        """Run what uses these tensors in this state."""
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
class _Linear:
    """One use of a linear layer: the arguments of Megatron's function."""

    weight: torch.nn.Parameter
    fuses_accumulation: bool
    reduces_input_gradient: bool
    sequence_parallel: bool
    tp_group: Any
    casts_gradient: bool
    """Whether the backward takes the output's gradient in the input's dtype (from 0.20 on)."""

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
    state: _ThreadState
    backward: int

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
        with self.state.restored(self.operands):
            product = self._compute()
        if product is not None:
            # As autograd does: under autocast the product has another dtype.
            yield weight, product.to(weight.dtype)

    def _compute(self) -> torch.Tensor | None:
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


class _Arrived:
    """A gradient that autograd has computed for a deferred weight."""

    adds_in_place = False

    def __init__(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self.weights = (weight,)
        # Others may hold the same tensor, or one of which several elements share memory.
        self._gradient = gradient.detach().clone(memory_format=torch.contiguous_format)
        self.backward: int = torch._C._current_graph_task_id()

    @property
    def operands(self) -> tuple[torch.Tensor]:
        return (self._gradient,)

    def gradients(self) -> Iterator[Gradient]:
        yield self.weights[0], self._gradient


@dataclass(frozen=True, slots=True)
class _QueuedProducts:
    """The products that one layer of Transformer Engine stored in one backward."""

    module: Any
    items: list[Any]
    backward = _NO_BACKWARD

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return _tagged(self.module)

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
    gradients: DeferredWeightGradients
    running: _Microbatch

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
        if not self.gradients.defers(
            self.running, weight, sequence_parallel=sequence_parallel, sets=next(sets, None)
        ):
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
            input_, _anchors[input_.device], bias, linear, self.gradients, self.running
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
        linear: _Linear,
        gradients: DeferredWeightGradients,
        running: _Microbatch,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.linear = linear
        ctx.gradients = gradients
        ctx.running = running
        ctx.has_bias = bias is not None
        output = torch.matmul(linear.whole(input_), linear.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, output_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, None, None]:
        (input_,) = ctx.saved_tensors
        linear: _Linear = ctx.linear
        if linear.casts_gradient:
            output_gradient = output_gradient.to(input_.dtype)
        # The product needs only their values. The input has a graph, and so has the gradient from
        # Megatron's cross entropy, which saves it; both graphs would stay alive until W.
        _, (anchor, _), *_ = ctx.next_functions
        if torch._C._will_engine_execute_node(anchor):
            product = _LinearProduct(
                linear,
                input_.detach(),
                output_gradient.detach(),
                _ThreadState.now(input_.device),
                torch._C._current_graph_task_id(),
            )
            ctx.gradients.keep(ctx.running, product)
        gradient = output_gradient.matmul(linear.weight)
        if linear.reduces_input_gradient:
            torch.distributed.all_reduce(gradient, group=linear.tp_group)
        if linear.sequence_parallel:
            total, gradient = gradient, torch.empty_like(input_)
            layers.dist_reduce_scatter_func(gradient, total, group=linear.tp_group)
        bias_gradient = None
        if ctx.has_bias:
            bias_gradient = output_gradient.contiguous().flatten(0, -2).sum(dim=0)
        return gradient, None, bias_gradient, None, None, None
