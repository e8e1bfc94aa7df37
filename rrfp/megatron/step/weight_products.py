"""What a backward without weight gradients leaves for W: the operands of products, and more.

Those of Megatron's own layers are in `rrfp.megatron.adapters.layers`. Layers of Transformer
Engine compute theirs themselves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rrfp.megatron.memory.saved_tensors import tensors_in
from rrfp.megatron.step.gradients import Gradient

NO_BACKWARD = -1
"""torch's number of the backward that runs, outside of one."""


def is_tagged(parameter: torch.nn.Parameter) -> bool:
    """Whether Transformer Engine's `backward_dw` computes its gradient."""
    return getattr(parameter, "skip_backward_post_hook", False)


def tagged(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in module.parameters(recurse=False) if is_tagged(each)]


class Product(Protocol):
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


def by_backward(products: Iterable[Product]) -> Iterable[list[Product]]:
    """The products of each backward, in the order in which autograd adds them: as the last of a
    backward arrives."""
    found: dict[tuple[int, tuple[torch.nn.Parameter, ...]], list[Product]] = {}
    for product in products:
        key = product.backward, tuple(product.weights)
        found[key] = [*found.pop(key, ()), product]
    return found.values()


def gradients_of(products: Iterable[Product]) -> Iterator[Gradient]:
    """One gradient per backward and parameter, computed on demand. Gradients of a parameter that is
    used several times in one are summed first, as in autograd."""
    for same in by_backward(products):
        total: dict[torch.nn.Parameter, torch.Tensor] = {}
        in_place = any(product.adds_in_place for product in same)
        for product in same:
            for parameter, gradient in product.gradients():
                if in_place and isinstance(product, Arrived) and _drops_others(parameter):
                    continue
                known = total.get(parameter)
                total[parameter] = gradient if known is None else known + gradient
        yield from total.items()


def _drops_others(weight: Any) -> bool:
    """Whether Megatron's DistributedDataParallel takes only what a fused kernel has added."""
    return hasattr(weight, "grad_added_to_main_grad") and not getattr(
        weight, "zero_out_wgrad", False
    )


class Arrived:
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
class QueuedProducts:
    """The products that one layer of Transformer Engine stored in one backward."""

    module: Any
    items: list[Any]
    backward = NO_BACKWARD

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return tagged(self.module)

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
