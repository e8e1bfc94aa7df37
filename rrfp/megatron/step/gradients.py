"""Sums the gradients of a step's microbatches, whatever order they come in.

Floating-point addition is not associative, so the result of a sum depends on its order. A sum in
canonical order is the same to the bit for every order of tasks. As long as gradients come in
microbatch order nothing is copied; one that comes early is held back until its predecessors are in.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from rrfp.megatron.settings import GradOrder

Gradient = tuple[torch.nn.Parameter, torch.Tensor]


class GradientSum(Protocol):
    """The sum over one step's microbatches of the gradients of some parameters of a model chunk.

    It is in `main_grad` if Megatron's DistributedDataParallel keeps one (its hook empties `.grad`
    into it), otherwise in `.grad`. Each microbatch is added once, by `adding` or by `add`.
    """

    @property
    def waiting_bytes(self) -> int:
        """The size of the gradients that wait for those of earlier microbatches."""

    def completes(self, microbatch: int) -> bool:
        """Whether this microbatch, added now, is the last to change the sum, so that hooks inside
        its backward see the final one."""

    def adding(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap the backward that adds this microbatch's gradients to the parameters."""

    def add(self, microbatch: int, gradients: Iterable[Gradient]) -> None:
        """Add this microbatch's gradients; the iterable may compute each one on demand."""


def gradient_sum(
    order: GradOrder, parameters: Iterable[torch.nn.Parameter], num_microbatches: int
) -> GradientSum:
    """The sum of these parameters' gradients, in the chosen order."""
    if order is GradOrder.CANONICAL:
        return CanonicalGradients(parameters, num_microbatches)
    return ArrivalGradients(num_microbatches)


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add exactly as autograd and the hook of Megatron's DistributedDataParallel do."""
    if hasattr(parameter, "main_grad"):
        parameter.main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class ArrivalGradients:
    """The sum in order of arrival."""

    waiting_bytes = 0

    def __init__(self, num_microbatches: int) -> None:
        self._num_missing = num_microbatches

    def completes(self, _microbatch: int) -> bool:
        return self._num_missing == 1

    @contextmanager
    def adding(self, _microbatch: int) -> Iterator[None]:
        yield
        self._num_missing -= 1

    def add(self, _microbatch: int, gradients: Iterable[Gradient]) -> None:
        for parameter, gradient in gradients:
            add_gradient(parameter, gradient)
        self._num_missing -= 1


class CanonicalGradients:
    """The sum in microbatch order. A backward that comes early costs a copy of all gradients until
    its predecessors are in; gradients passed to `add` are kept without a copy."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], num_microbatches: int) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._num_microbatches = num_microbatches
        self._next_microbatch = 0
        self._early: dict[int, list[Gradient]] = {}
        self.waiting_bytes = 0

    def completes(self, microbatch: int) -> bool:
        return microbatch == self._next_microbatch == self._num_microbatches - 1

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        if microbatch == self._next_microbatch:
            yield
            self._go_on()
            return
        totals = [_set_apart(parameter) for parameter in self._parameters]
        try:
            yield
        finally:
            apart = [
                _put_back(parameter, total)
                for parameter, total in zip(self._parameters, totals, strict=True)
            ]
        gradients = [
            (parameter, gradient)
            for parameter, gradient in zip(self._parameters, apart, strict=True)
            if gradient is not None
        ]
        self._keep(microbatch, gradients)

    def add(self, microbatch: int, gradients: Iterable[Gradient]) -> None:
        if microbatch == self._next_microbatch:
            for parameter, gradient in gradients:
                add_gradient(parameter, gradient)
            self._go_on()
        else:
            self._keep(microbatch, list(gradients))

    def _keep(self, microbatch: int, gradients: list[Gradient]) -> None:
        self._early[microbatch] = gradients
        self.waiting_bytes += _bytes_of(gradients)

    def _go_on(self) -> None:
        self._next_microbatch += 1
        while self._next_microbatch in self._early:
            gradients = self._early.pop(self._next_microbatch)
            self.waiting_bytes -= _bytes_of(gradients)
            for parameter, gradient in gradients:
                add_gradient(parameter, gradient)
            self._next_microbatch += 1


def _bytes_of(gradients: list[Gradient]) -> int:
    storages = [gradient.untyped_storage() for _, gradient in gradients]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _set_apart(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Replace the sum so far by an empty one, and return it.

    Of `main_grad` only the storage changes, because fused kernels hold on to the tensor from the
    forward on.
    """
    total: torch.Tensor | None
    if hasattr(parameter, "main_grad"):
        total = parameter.main_grad.data
        # -0.0 is the neutral element of addition; +0.0 would turn a -0.0 gradient into +0.0.
        parameter.main_grad.data = torch.full_like(total, -0.0)
    else:
        total, parameter.grad = parameter.grad, None
    return total


def _put_back(parameter: torch.nn.Parameter, total: torch.Tensor | None) -> torch.Tensor | None:
    """Restore the sum, and return what was added meanwhile."""
    apart: torch.Tensor | None
    if hasattr(parameter, "main_grad"):
        apart = parameter.main_grad.data
        parameter.main_grad.data = total
    else:
        apart, parameter.grad = parameter.grad, total
    return apart
