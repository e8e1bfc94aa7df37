"""Canonical accumulation: gradients are summed in microbatch order, whatever order they came in.

Floating-point addition is not associative, so the order of the sum is part of the result. While
backwards come in microbatch order nothing is copied; one that comes early is accumulated apart,
at the cost of one stage-sized gradient copy, until its predecessors are in.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class CanonicalGradients:
    """Orders the gradient accumulation of one step of one model chunk.

    Works on `main_grad` where Megatron's DistributedDataParallel keeps one (its hook empties
    `.grad` into it), on `.grad` elsewhere.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._next_microbatch = 0
        self._early: dict[int, list[torch.Tensor | None]] = {}

    def completes(self, microbatch: int) -> bool:
        """Whether this microbatch's backward, run now, leaves none apart."""
        return microbatch == self._next_microbatch and not self._early

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Run one microbatch's backward inside; its gradients are added in canonical order."""
        if microbatch == self._next_microbatch:
            yield
            self._next_microbatch += 1
            while self._next_microbatch in self._early:
                self._add(self._early.pop(self._next_microbatch))
                self._next_microbatch += 1
        else:
            sums = [self._set_apart(parameter) for parameter in self._parameters]
            try:
                yield
            finally:
                apart = [
                    self._put_back(parameter, total)
                    for parameter, total in zip(self._parameters, sums, strict=True)
                ]
            self._early[microbatch] = apart

    @staticmethod
    def _set_apart(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        total: torch.Tensor | None
        if hasattr(parameter, "main_grad"):
            total = parameter.main_grad
            # -0.0 is the neutral element of addition; +0.0 would turn a -0.0 gradient into +0.0.
            parameter.main_grad = torch.full_like(parameter.main_grad, -0.0)
        else:
            total, parameter.grad = parameter.grad, None
        return total

    @staticmethod
    def _put_back(parameter: torch.nn.Parameter, total: torch.Tensor | None) -> torch.Tensor | None:
        apart: torch.Tensor | None
        if hasattr(parameter, "main_grad"):
            apart, parameter.main_grad = parameter.main_grad, total
        else:
            apart, parameter.grad = parameter.grad, total
        return apart

    def _add(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.add_(gradient)
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
