"""Weight gradients as separate tasks W, after a backward B that computes input gradients only.

During a task, rrfp's autograd function replaces that of Megatron's parallel linear layers. Its
backward computes the gradients of the input and the bias, and stores the operands of the weight
gradient's matrix product. Autograd does not see the weight as an input, so the hooks of
DistributedDataParallel do not fire. Transformer Engine's layers store their products themselves, in
a queue per layer, which is emptied after each backward to keep microbatches separate.

The gradients of other parameters (embeddings, norms, biases, routers) are computed in B.
"""

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.modules import module as globally
from torch.utils.weak import WeakTensorKeyDictionary

from rrfp.megatron.adapters.layers import (
    LinearProduct,
    deferring_linear,
    is_parallel_linear,
)
from rrfp.megatron.memory.activation_bytes import tensors_in
from rrfp.megatron.provenance import describe_callable
from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradients import Gradient, add_gradient, gradient_sum

# Hooks on weights. W computes a weight's gradient outside of autograd, which therefore runs none of
# its hooks. The hook that Megatron's DistributedDataParallel puts on every weight does not count,
# because the code that adds the gradients does its work.

_DISTRIBUTED = "megatron.core.distributed.distributed_data_parallel"

Path = tuple[torch.nn.Module, ...]
"""The modules from the outermost to the owner of a parameter."""


def paths_to_parameters(root: torch.nn.Module) -> dict[torch.nn.Parameter, list[Path]]:
    """The paths from `root` to each parameter, one for each module that owns it."""
    paths: dict[torch.nn.Module, Path] = {}
    found: dict[torch.nn.Parameter, list[Path]] = {}
    todo: list[Path] = [(root,)]
    while todo:
        path = todo.pop()
        owner = path[-1]
        if owner in paths:
            continue
        paths[owner] = path
        for parameter in owner.parameters(recurse=False):
            found.setdefault(parameter, []).append(path)
        todo += [(*path, child) for child in owner.children()]
    return found


def weight_hook(weight: torch.nn.Parameter) -> Any | None:
    """A hook on a weight or on the node that accumulates its gradient, or None. Megatron's own
    hooks and rrfp's do not count."""
    return _foreign_hook(weight, *_hooks_of(torch.autograd.graph.get_gradient_edge(weight).node))


def _foreign_hook(weight: Any, before: dict[int, Any], after: dict[int, Any]) -> Any | None:
    """A hook on the weight, or before or after its gradient's node, that is neither Megatron's nor
    rrfp's, or None."""
    for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
        if hooks:
            return next(iter(hooks.values()))
    for hook in before.values():
        if not isinstance(hook, _Interception):
            return hook
    for hook in after.values():
        if not _is_megatrons(hook):
            return hook
    return None


def _hooks_of(node: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run before and after an autograd node: torch's own dicts, which can be
    changed. Only a handle gives access to them, so a hook is registered and removed."""
    found = []
    for register in (node.register_prehook, node.register_hook):
        probe = register(_nothing)
        found.append(probe.hooks_dict_ref())
        probe.remove()
    before, after = found
    return before, after


def module_hook(path: Path) -> Any | None:
    """A hook that runs in the backward of one of these modules, or of all modules, and may read
    gradients; None without one. For torch's DistributedDataParallel, whose hooks are not visible,
    the module itself."""
    for hooks in (globally._global_backward_hooks, globally._global_backward_pre_hooks):
        if hooks:
            return next(iter(hooks.values()))
    for module in path:
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                return next(iter(hooks.values()))
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return module  # its hooks are not visible in Python
    return None


class Accumulator:
    """Intercepts the gradients that autograd adds to a weight, at its AccumulateGrad node."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        paths: Iterable[Path],
        take: Callable[["Accumulator", torch.Tensor | None], bool],
    ) -> None:
        """`take` is a method that is called with each gradient before autograd adds it. If it
        returns True, autograd adds nothing and runs none of the later hooks."""
        self.weight = weight
        self.node: Any = torch.autograd.graph.get_gradient_edge(weight).node
        self._paths = list(paths)
        self._take = weakref.WeakMethod(take)
        self._before, self._after = _hooks_of(self.node)
        weakref.finalize(self, self.node.register_prehook(_Interception(self)).remove)
        self._disabled: dict[int, Any] = {}

    def hook(self) -> Any | None:
        """A hook on the weight that is neither Megatron's nor rrfp's, or None."""
        return _foreign_hook(self.weight, self._before, self._after)

    def module_hook(self) -> Any | None:
        """A backward hook that runs for a module around the weight, or None."""
        hooks = map(module_hook, self._paths)
        return next((hook for hook in hooks if hook is not None), None)

    def restore(self) -> None:
        """Enable the later hooks of the node that `before_adding` disabled."""
        self._after.update(self._disabled)
        self._disabled = {}

    def before_adding(self, gradients: tuple[torch.Tensor | None]) -> tuple[None] | None:
        """Offer a gradient to `take`, as the node's pre-hook. If it is taken, disable the node's
        later hooks until `restore`, and return (None,), so that autograd adds nothing. Otherwise
        return None."""
        (gradient,) = gradients
        take = self._take()
        if take is None or not take(self, gradient):
            return None
        self._disabled.update(self._after)
        self._after.clear()
        return (None,)


class _Interception:
    """The hook of an Accumulator on its node. The node may outlive the Accumulator and must not
    keep it alive."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = weakref.ref(accumulator)

    def __call__(self, gradients: tuple[torch.Tensor | None]) -> tuple[None] | None:
        accumulator = self._accumulator()
        return None if accumulator is None else accumulator.before_adding(gradients)


def outputs_of_backward(outermost: Iterable[Any]) -> Iterable[Any]:
    """The root tensors of the innermost `torch.autograd.backward` on this thread's call stack:
    those of a recomputed part of the model, or else `outermost`."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            tensors = frame.f_locals["tensors"]
            return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        frame = frame.f_back
    return outermost


def edges_to(node: Any, outputs: Iterable[torch.Tensor | None]) -> Iterator[tuple[Any, list[int]]]:
    """Yield the nodes in the graph of `outputs` that pass gradients to `node`, each with the
    indices of its edges to `node`."""
    todo = [output.grad_fn for output in outputs if output is not None]
    seen = set()
    while todo:
        before: Any = todo.pop()
        if before is None or before in seen:
            continue
        seen.add(before)
        following = [after for after, _ in before.next_functions]
        places = [place for place, after in enumerate(following) if after is node]
        if places:
            yield before, places
        todo += following


def describe_hook(hook: Any) -> str:
    """Format a hook, or a module that stands for its hooks, for a message."""
    if isinstance(hook, torch.nn.Module):
        return f"hooks of {type(hook).__module__}.{type(hook).__qualname__}"
    return f"the hook {describe_callable(hook)}"


def _is_megatrons(hook: Any) -> bool:
    """True if a hook is defined in the module of Megatron's DistributedDataParallel."""
    return bool(getattr(hook, "__module__", None) == _DISTRIBUTED)


def _nothing(*_: Any) -> None:
    """Do nothing: a hook that gives access to a node's hooks."""


# Products: weight gradients that a split backward leaves for W.


NO_BACKWARD = -1
"""torch's number of the running backward if none is running."""


def is_delayed(parameter: torch.nn.Parameter) -> bool:
    """True if Transformer Engine's `backward_dw` computes this parameter's gradient, according to
    its attribute `skip_backward_post_hook`."""
    return getattr(parameter, "skip_backward_post_hook", False)


def delayed_weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's own parameters whose gradients `backward_dw` computes."""
    return [each for each in module.parameters(recurse=False) if is_delayed(each)]


class Product(Protocol):
    """Weight gradients that are not computed yet."""

    @property
    def weights(self) -> Sequence[torch.nn.Parameter]:
        """The parameters whose gradients these are."""

    @property
    def backward(self) -> int:
        """The number of its backward. A reentrant backward has its own number."""

    @property
    def adds_in_place(self) -> bool:
        """True if a fused kernel adds the gradients to `main_grad`."""

    @property
    def operands(self) -> Iterable[torch.Tensor]:
        """The tensors from which the gradients are computed."""

    def gradients(self) -> Iterator[Gradient]:
        """Compute the gradients and yield those that are not added in place."""


def by_backward(products: Iterable[Product]) -> Iterable[list[Product]]:
    """Group products by backward and weights, in the order in which autograd adds the groups: by
    the last product of each."""
    found: dict[tuple[int, tuple[torch.nn.Parameter, ...]], list[Product]] = {}
    for product in products:
        key = product.backward, tuple(product.weights)
        found[key] = [*found.pop(key, ()), product]
    return found.values()


def gradients_of(products: Iterable[Product]) -> Iterator[Gradient]:
    """Yield one gradient per backward and parameter, computed on demand. As in autograd, gradients
    of a parameter that a backward uses several times are summed first. If a fused kernel adds some
    in place, autograd's own gradient is left out where Megatron's DistributedDataParallel would
    ignore it."""
    for same in by_backward(products):
        total: dict[torch.nn.Parameter, torch.Tensor] = {}
        in_place = any(product.adds_in_place for product in same)
        for product in same:
            for parameter, gradient in product.gradients():
                if in_place and isinstance(product, Arrived) and _ignores_autograd(parameter):
                    continue
                known = total.get(parameter)
                total[parameter] = gradient if known is None else known + gradient
        yield from total.items()


def _ignores_autograd(weight: Any) -> bool:
    """True if Megatron's DistributedDataParallel uses only the gradient of a fused kernel: the
    weight has `grad_added_to_main_grad` and not `zero_out_wgrad`."""
    return hasattr(weight, "grad_added_to_main_grad") and not getattr(
        weight, "zero_out_wgrad", False
    )


class Arrived:
    """A gradient that autograd itself has computed for a deferred weight."""

    adds_in_place = False

    def __init__(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self.weights = (weight,)
        # A copy: other code may hold the tensor, and its elements may share memory.
        self._gradient = gradient.detach().clone(memory_format=torch.contiguous_format)
        self.backward: int = torch._C._current_graph_task_id()

    @property
    def operands(self) -> tuple[torch.Tensor]:
        """The stored copy of the gradient."""
        return (self._gradient,)

    def gradients(self) -> Iterator[Gradient]:
        """Yield the weight with the stored copy of its gradient."""
        yield self.weights[0], self._gradient


@dataclass(frozen=True, slots=True)
class QueuedProducts:
    """The products that one layer of Transformer Engine stored during one backward."""

    module: Any
    items: list[Any]
    backward = NO_BACKWARD

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """The layer's own parameters whose gradients `backward_dw` computes."""
        return delayed_weights(self.module)

    @property
    def adds_in_place(self) -> bool:
        """True if the layer's fused kernel adds its gradients to `main_grad`."""
        return getattr(self.module, "fuse_wgrad_accumulation", False)

    @property
    def operands(self) -> Iterator[torch.Tensor]:
        """The tensors in the stored products."""
        return tensors_in(self.items)

    def gradients(self) -> Iterator[Gradient]:
        """Compute the products' gradients with the layer's `backward_dw`, and yield those that it
        leaves in `.grad`. Puts the products back into the layer's queue, and disables its hooks for
        DistributedDataParallel meanwhile. Earlier gradients in `.grad` are restored, or dropped for
        weights with `main_grad`."""
        # The layer leaves a gradient in `.grad` and calls the hooks of DistributedDataParallel.
        # These are disabled, because rrfp sums gradients and starts reductions itself.
        module, queue = self.module, self.module.wgrad_store.context
        hooks, module.wgrad_accumulation_and_reduce_hooks = (
            module.wgrad_accumulation_and_reduce_hooks,
            [],
        )
        # With `main_grad`, a fused backward leaves only a placeholder in `.grad`.
        previous = [
            None if hasattr(weight, "main_grad") else weight.grad for weight in self.weights
        ]
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
            for weight, gradient in zip(self.weights, previous, strict=True):
                weight.grad = gradient


# Deferring the weight gradients of a model chunk.


_log = logging.getLogger(__name__)

_WITH_OTHER_GRADIENTS: Any = WeakTensorKeyDictionary()
"""Weights that got a gradient from autograd besides their layer's."""

_REPORTED: Any = WeakTensorKeyDictionary()
"""Weights already named in a warning."""


def deferrable_weights(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a model chunk whose gradients W can compute, in model order.

    Excludes weights shared with an embedding, frozen weights, weights whose gradients Megatron
    defers itself (`defer_embedding_wgrad_compute`), and those of Megatron-FSDP.
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
        and all(_can_defer(module, parameter) for module in modules)
    ]


def _can_defer(module: torch.nn.Module, parameter: torch.nn.Parameter) -> bool:
    """True if W can compute the gradient of this parameter of the module: Transformer Engine delays
    it, or it is the weight of one of Megatron's linear layers and Megatron does not defer it
    itself."""
    if _has_store(module):
        return is_delayed(parameter)
    # An output layer that shares the embedding's weight on the same stage has no weight itself.
    return (
        is_parallel_linear(module)
        and parameter is module.weight
        and getattr(module, "grad_output_buffer", None) is None
    )


def _has_store(module: Any) -> bool:
    """True if a module is a layer of Transformer Engine that stores products for `backward_dw`."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def unreachable_hook(chunk: torch.nn.Module) -> tuple[str, Any] | None:
    """The name of a weight of this chunk whose product Transformer Engine stores, and a hook on the
    weight, which would not see the gradient; None if there is no such hook."""
    names = {weight: name for name, weight in chunk.named_parameters()}
    for module in chunk.modules():
        for weight in delayed_weights(module) if _has_store(module) else ():
            hook = weight_hook(weight) if weight.requires_grad else None
            if hook is not None:
                return names[weight], hook
    return None


class DeferredWeightGradients:
    """The deferred weight gradients of one model chunk in one step, by microbatch.

    Some weights are not deferred: those with hooks, and those that got another gradient from
    autograd before. Megatron's own function computes their gradients in B, and autograd adds them.
    Under sequence parallelism all ranks of a group must run the same collectives, whichever hooks
    each has. There every weight is deferred, and W runs the hooks.
    """

    def __init__(self, chunk: torch.nn.Module, order: GradOrder, num_microbatches: int) -> None:
        """`order` is the order in which the gradients of microbatches are summed."""
        self._names = {weight: name for name, weight in chunk.named_parameters()}
        self._queued: list[Any] = [
            module for module in reversed([*chunk.modules()]) if _has_store(module)
        ]
        in_queues = {weight for module in self._queued for weight in delayed_weights(module)}
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
        """The bytes of weight gradients that wait for those of earlier microbatches."""
        return sum(each.waiting_bytes for each in self._sums.values())

    @contextmanager
    def task(self, microbatch: int, outputs: Sequence[torch.Tensor | None] = ()) -> Iterator[None]:
        """Wrap this microbatch's forward, or its backward from `outputs`, which may recompute
        forwards, so that weight gradients are deferred. After the block, take the products from the
        queues of Transformer Engine's layers, and log one warning that names weights newly found
        not to be deferrable."""
        running = self._microbatches.setdefault(microbatch, _Microbatch(microbatch))
        running.outputs = outputs
        self._running = running
        try:
            with (
                deferring_linear(partial(self._defers, running), partial(self._store, running)),
                running.adding,
            ):
                for weight in running.undeferred:
                    self._add_in_backward(running, weight)
                yield
        finally:
            self._running = None
            running.outputs = ()
        self._report()
        for module in self._queued:
            queue = module.wgrad_store.context
            if not queue.empty():
                items = [queue.get() for _ in range(queue.qsize())]
                running.products.append(QueuedProducts(module, items))

    def operands(self, microbatch: int) -> Iterator[torch.Tensor]:
        """Yield the tensors that this microbatch's products keep until W."""
        for product in self._microbatches[microbatch].products:
            yield from product.operands

    def run(self, microbatch: int) -> None:
        """Compute this microbatch's weight gradients, add them, and forget its products.

        Hooks on a weight run now. Under sequence parallelism this gathers inputs again, in a
        collective. DistributedDataParallel is not notified of the gradients; the caller must start
        their reduction.
        """
        running = self._microbatches.pop(microbatch)
        by_weights: dict[tuple[torch.nn.Parameter, ...], list[Product]] = {}
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
                    self._sums[weights[0]].add(microbatch, gradients_of(products))
                else:
                    found = list(gradients_of(products))
                    for weight in weights:
                        own = [each for each in found if each[0] is weight]
                        self._sums[weight].add(microbatch, own)
            for weight in left:
                self._sums[weight].add(microbatch, ())
        # The contexts of a graph refer to this list. If a layer of Transformer Engine has stored an
        # input with its graph, that is a cycle that Python's garbage collector cannot see.
        running.products.clear()

    def _defers(
        self, running: "_Microbatch", weight: Any, *, sequence_parallel: bool, sets: str | None
    ) -> bool:
        """True if a use of a weight leaves its gradient to W; the use is then counted. Otherwise
        autograd adds the microbatch's gradients of this weight, unless an earlier use was deferred.
        `sets` names a setting of the layer that only Megatron's own function supports, if any; it
        prevents deferring, with a warning."""
        accumulator = self._accumulators.get(weight)
        if accumulator is None:
            return False
        if sets is not None:
            self._queue_warning(weight, sets)
            if weight in running.num_uses:
                return False  # autograd's gradient is stored for W
        elif weight not in running.undeferred and (
            # All uses of a weight in one microbatch are treated alike.
            weight in running.num_uses or sequence_parallel or self._is_deferrable(accumulator)
        ):
            running.num_uses[weight] += torch.is_grad_enabled()
            return True
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            running.undeferred.add(weight)
        else:
            self._add_in_backward(running, weight)
        return False

    def _store(self, running: "_Microbatch", product: LinearProduct) -> None:
        """Store a product of the running backward for W. If a hook was registered on the weight
        after the forward, add the gradient now instead, if possible. If the weight also gets other
        gradients, store them one by one."""
        (weight,) = product.weights
        accumulator = self._accumulators[weight]
        has_others = torch._C._will_engine_execute_node(accumulator.node)
        if (
            # A hook was registered on the weight after the forward.
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

    def _is_deferrable(self, accumulator: Accumulator) -> bool:
        """True if W may compute this weight's gradient. Otherwise queues a warning: the weight got
        another gradient than its layer's, or a hook would miss the gradient."""
        weight = accumulator.weight
        if weight in _WITH_OTHER_GRADIENTS:
            self._queue_warning(weight, "another gradient than its layer's")
            return False
        hook = accumulator.hook() or accumulator.module_hook()
        if hook is None:
            return True
        self._queue_warning(weight, describe_hook(hook))
        return False

    def _is_hooked(self, weight: torch.nn.Parameter) -> bool:
        """True if a deferred weight has a hook that is not Megatron's. False for weights that
        Transformer Engine delays."""
        accumulator = self._accumulators.get(weight)
        return accumulator is not None and accumulator.hook() is not None

    def _add_in_backward(self, running: "_Microbatch", weight: torch.nn.Parameter) -> None:
        """Let autograd add this weight's gradient in the running task; for the rest of the
        microbatch the weight counts as not deferred, so that W leaves it out. Does nothing if the
        microbatch has already done so."""
        if weight not in running.added:
            running.undeferred.add(weight)
            running.added.add(weight)
            running.adding.enter_context(self._sums[weight].adding(running.number))

    def _take(self, accumulator: Accumulator, gradient: torch.Tensor | None) -> bool:
        """Store for W the gradient that autograd is about to add to a deferred weight. Return True
        if autograd must not add it; False outside of tasks and for weights that are not deferred.
        Without a gradient, store nothing and return whether gradients are separated."""
        running, weight = self._running, accumulator.weight
        if running is None or weight in running.undeferred:
            return False
        running.adding.callback(accumulator.restore)
        is_separated = (weight, torch._C._current_graph_task_id()) in running.separated
        if gradient is None:
            return is_separated
        # If gradients are separated, this is the sum of those before the first product.
        self._store_arrived(running, weight, gradient, is_first=is_separated)
        return True

    def _store_arrived(
        self,
        running: "_Microbatch",
        weight: torch.nn.Parameter,
        gradient: torch.Tensor,
        *,
        is_first: bool = False,
    ) -> None:
        """Store a copy of a gradient from autograd among the products for W, last or with
        `is_first` first. In later steps the weight is not deferred, because it gets other gradients
        than its layer's."""
        _WITH_OTHER_GRADIENTS[weight] = True
        arrived = Arrived(weight, gradient)
        running.products.insert(0 if is_first else len(running.products), arrived)

    def _separate(self, running: "_Microbatch", accumulator: Accumulator) -> None:
        """Store a weight's other gradients one by one as they arrive after a product, because
        autograd would add each to the earlier ones. Hooks do so until the task ends. Do nothing if
        this backward has done so, or if others came before."""
        weight, number = accumulator.weight, torch._C._current_graph_task_id()
        came_before = any(
            isinstance(product, Arrived)
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
                    self._store_arrived(running, weight, gradients[place].to(weight.dtype))
            return tuple(
                None if place in places else gradient for place, gradient in enumerate(gradients)
            )

        for node, places in edges_to(accumulator.node, outputs_of_backward(running.outputs)):
            handle = node.register_hook(partial(take, places))
            running.adding.callback(handle.remove)

    def _add(self, products: Iterable[Product]) -> None:
        """Compute the gradients of these products and add them now, as autograd does. A weight's
        hooks run; for gradients that a fused kernel adds in place, they get zeros, as in
        Megatron."""
        for group in by_backward(products):
            for parameter, gradient in gradients_of(group):
                if self._is_hooked(parameter):
                    torch.autograd.backward([parameter], [gradient])
                else:
                    add_gradient(parameter, gradient)
            if any(product.adds_in_place for product in group):
                # As in Megatron, the hooks get a placeholder.
                weight: Any
                for weight in filter(self._is_hooked, group[0].weights):
                    weight.grad_added_to_main_grad = True
                    torch.autograd.backward([weight], [torch.zeros_like(weight)])

    def _queue_warning(self, weight: torch.nn.Parameter, reason: str) -> None:
        """Queue a warning about a weight, at most once per weight in this process."""
        if weight not in _REPORTED:
            _REPORTED[weight] = True
            self._unreported.append(f"{self._names[weight]} has {reason}")

    def _report(self) -> None:
        """Log the queued warnings as one: it names the first weight and counts the others."""
        if self._unreported:
            first, *others = self._unreported
            more = f" (and {len(others)} more weights as well)" if others else ""
            _log.warning("rrfp: %s%s, so its gradient is not split off the backward", first, more)
            self._unreported.clear()


class _Microbatch:
    """The weight gradients that one microbatch leaves to W."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.products: list[Product] = []
        """Products and autograd's own gradients, in the order of their arrival."""
        self.undeferred: set[torch.nn.Parameter] = set()
        """The weights whose gradients its backward adds."""
        self.num_uses: Counter[torch.nn.Parameter] = Counter()
        """Uses of deferred weights in forwards that have a backward."""
        self.outputs: Sequence[torch.Tensor | None] = ()
        """The root tensors of the running backward."""
        self.adding = ExitStack()
        """Contexts that are exited at the end of a task."""
        self.added: set[torch.nn.Parameter] = set()
        self.separated: set[tuple[torch.nn.Parameter, int]] = set()
        """(weight, number of a backward) whose other gradients are stored one by one."""
