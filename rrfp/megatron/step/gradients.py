"""Sums the gradients of a step's microbatches, and starts their data-parallel reduction.

Floating-point addition is not associative, so the result of a sum depends on its order. A sum in
canonical order is bitwise equal for every order of tasks. Gradients that come in microbatch order
are added without a copy. A gradient that comes early waits until its predecessors are added.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from rrfp.megatron.settings import GradOrder

Gradient = tuple[torch.nn.Parameter, torch.Tensor]


class GradientSum(Protocol):
    """Sums the gradients of some parameters of a model chunk over one step's microbatches.

    The sum is in `main_grad` if Megatron's DistributedDataParallel has one (its hook adds `.grad`
    to it), otherwise in `.grad`. Each microbatch is added once, by `adding` or by `add`.
    """

    @property
    def waiting_bytes(self) -> int:
        """The bytes of gradients that wait for those of earlier microbatches."""

    def completes(self, microbatch: int) -> bool:
        """True if adding this microbatch now completes the sum, so that hooks inside its backward
        see the final sum."""

    def adding(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap the backward that adds this microbatch's gradients to the parameters, and count the
        microbatch."""

    def add(self, microbatch: int, gradients: Iterable[Gradient]) -> None:
        """Add this microbatch's gradients. The iterable may compute each one on demand."""


def gradient_sum(
    order: GradOrder, parameters: Iterable[torch.nn.Parameter], num_microbatches: int
) -> GradientSum:
    """Create the sum of these parameters' gradients in the chosen order."""
    if order is GradOrder.CANONICAL:
        return CanonicalGradients(parameters, num_microbatches)
    return ArrivalGradients(num_microbatches)


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add a gradient to a parameter's `main_grad` if it has one, else to `.grad`, exactly as
    autograd and Megatron's DistributedDataParallel do. The first `.grad` is the given tensor
    itself, not a copy."""
    if hasattr(parameter, "main_grad"):
        parameter.main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class ArrivalGradients:
    """Sums gradients in order of arrival."""

    waiting_bytes = 0

    def __init__(self, num_microbatches: int) -> None:
        self._num_missing = num_microbatches

    def completes(self, _microbatch: int) -> bool:
        """True if only one microbatch is missing, whichever it is."""
        return self._num_missing == 1

    @contextmanager
    def adding(self, _microbatch: int) -> Iterator[None]:
        """Wrap a backward that adds a microbatch's gradients, which need not wait, and count it
        unless it fails."""
        yield
        self._num_missing -= 1

    def add(self, _microbatch: int, gradients: Iterable[Gradient]) -> None:
        """Add a microbatch's gradients now, and count it."""
        for parameter, gradient in gradients:
            add_gradient(parameter, gradient)
        self._num_missing -= 1


class CanonicalGradients:
    """Sums gradients in microbatch order. An early backward costs a copy of all gradients until its
    predecessors are added; gradients passed to `add` wait without a copy."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], num_microbatches: int) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._num_microbatches = num_microbatches
        self._next_microbatch = 0
        self._early: dict[int, list[Gradient]] = {}
        self.waiting_bytes = 0

    def completes(self, microbatch: int) -> bool:
        """True if this is the last microbatch and all others have been added."""
        return microbatch == self._next_microbatch == self._num_microbatches - 1

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Wrap the backward that adds this microbatch's gradients. If it is the next microbatch,
        its gradients are added directly, and then those that wait for it. Otherwise the backward
        adds to empty sums, whose content waits."""
        if microbatch == self._next_microbatch:
            yield
            self._add_waiting()
            return
        totals = [_start_empty_sum(parameter) for parameter in self._parameters]
        try:
            yield
        finally:
            added = [
                (parameter, _restore_sum(parameter, total))
                for parameter, total in zip(self._parameters, totals, strict=True)
            ]
        self._store(microbatch, [(each, found) for each, found in added if found is not None])

    def add(self, microbatch: int, gradients: Iterable[Gradient]) -> None:
        """Add this microbatch's gradients now if it is the next one, and then those that wait for
        it. Otherwise compute all of them now and let them wait, without a copy."""
        if microbatch == self._next_microbatch:
            for parameter, gradient in gradients:
                add_gradient(parameter, gradient)
            self._add_waiting()
        else:
            self._store(microbatch, list(gradients))

    def _store(self, microbatch: int, gradients: list[Gradient]) -> None:
        """Let the gradients of an early microbatch wait, and count their bytes."""
        self._early[microbatch] = gradients
        self.waiting_bytes += _bytes_of(gradients)

    def _add_waiting(self) -> None:
        """Count the next microbatch as added. Then add and release the waiting gradients of those
        that follow it, up to the first that has not arrived."""
        self._next_microbatch += 1
        while self._next_microbatch in self._early:
            gradients = self._early.pop(self._next_microbatch)
            self.waiting_bytes -= _bytes_of(gradients)
            for parameter, gradient in gradients:
                add_gradient(parameter, gradient)
            self._next_microbatch += 1


def _bytes_of(gradients: list[Gradient]) -> int:
    """The bytes of the storages of these gradients, each storage counted once."""
    storages = [gradient.untyped_storage() for _, gradient in gradients]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _start_empty_sum(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Replace the parameter's sum (`main_grad`, else `.grad`) by an empty one and return the
    previous sum.

    Only the storage of `main_grad` changes, because fused kernels refer to the tensor from the
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


def _restore_sum(parameter: torch.nn.Parameter, total: torch.Tensor | None) -> torch.Tensor | None:
    """Restore a previous sum and return the gradient added since `_start_empty_sum`; None if
    `.grad` got none."""
    added: torch.Tensor | None
    if hasattr(parameter, "main_grad"):
        added = parameter.main_grad.data
        parameter.main_grad.data = total
    else:
        added, parameter.grad = parameter.grad, total
    return added


class Reduction:
    """Starts the data-parallel gradient reductions of one training step on this rank.

    All replicas must start their reductions in the same order, although each orders its tasks
    itself. This order is from the largest chunk down, as backwards end. A chunk's reduction starts
    once its gradients are complete and the larger chunks' reductions have started. If replicas run
    their backwards in the same order, Megatron's hooks may start it inside a chunk's last backward,
    bucket by bucket. Until then Megatron's `no_sync_func` holds reductions back.
    """

    def __init__(
        self,
        models: Sequence[Any],
        config: Any,
        *,
        is_first_rank: bool,
        follows_hooks: bool,
        starts_early: bool,
    ) -> None:
        """`follows_hooks` states that replicas run their backwards in the same order, so that
        Megatron's hooks may start reductions. Without `starts_early` all reductions wait for
        `finish`. Both must be equal on all replicas."""
        self._models = models
        no_sync = config.no_sync_func or nullcontext
        self._no_sync: Sequence[Callable[[], AbstractContextManager[Any]]] = (
            no_sync if isinstance(no_sync, list) else [no_sync]
        )
        self._grad_sync = function_per_chunk(config.grad_sync_func, len(models))
        # As in Megatron's schedules.py, a user's function takes precedence over the hooks, except
        # on the first rank of a pipeline with one chunk per rank, whose backward ends last.
        has_hooks = self._grad_sync is None or (is_first_rank and len(models) == 1)
        self._follows_hooks = follows_hooks and starts_early and has_hooks
        if has_hooks and hasattr(models[0], "ddp_config"):
            # If the hooks may not start reductions, `_start` starts the buckets as they would.
            self._grad_sync = None
        self._starts_early = starts_early
        self._is_finalized = config.finalize_model_grads_func is not None
        self._complete: set[int] = set()
        self._started: set[int] = set()
        self._next = len(models) - 1
        self._held = ExitStack()
        self._hold()

    def around_last_backward(self, chunk: int) -> AbstractContextManager[None]:
        """Wrap the backward that completes a chunk's gradients. If Megatron's hooks may start
        reductions, they start the chunk's in this block, and it counts as started; otherwise the
        block does nothing."""
        if not self._follows_hooks:
            return nullcontext()
        self._started.add(chunk)
        return self._released()

    def complete(self, chunk: int) -> None:
        """Mark a chunk's gradients as complete. Unless all reductions wait for `finish`, start
        those that are due."""
        self._complete.add(chunk)
        if self._starts_early:
            self._start_due()

    def finish(self) -> None:
        """Start all reductions that have not started, and leave `no_sync_func`, after the step's
        last task."""
        self._start_due()
        self._held.close()

    def abandon(self) -> None:
        """Leave `no_sync_func` without starting any reduction."""
        self._held.close()

    def _start_due(self) -> None:
        """Start the reductions of complete chunks from the largest chunk down, up to the first
        incomplete one. Skip those that Megatron's hooks have started."""
        while self._next in self._complete:
            if self._next not in self._started:
                self._start(self._next)
            self._next -= 1

    def _start(self, chunk: int) -> None:
        """Start a chunk's reduction by the user's `grad_sync_func`, if that applies. Otherwise
        start its buckets if Megatron's DistributedDataParallel overlaps reductions, except those
        left to Megatron. Without overlap, do nothing."""
        model = self._models[chunk]
        if self._grad_sync is not None:
            with self._released():
                self._grad_sync[chunk](model.parameters())
        elif _reduces_early(model):
            # As in Megatron's hooks. The model's `start_grad_sync` would ignore the flag.
            for buckets in model.bucket_groups + model.expert_parallel_bucket_groups:
                if not (buckets.is_first_batch and self._is_left_to_megatron(model)):
                    buckets.start_grad_sync(force_all_reduce=model.force_all_reduce)

    def _is_left_to_megatron(self, model: Any) -> bool:
        """True if buckets whose hooks have not counted gradients yet must be left to Megatron's
        `finish_grad_sync`. With several optimizer instances, a started reduction leaves no handle,
        and Megatron would start it again. If the call finalizes nothing, the loop may add the
        gradients of further calls before it reduces."""
        return model.ddp_config.num_distributed_optimizer_instances > 1 or not self._is_finalized

    def _hold(self) -> None:
        """Enter Megatron's `no_sync_func`, of every chunk if there are several."""
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Leave Megatron's `no_sync_func` for the block."""
        self._held.close()
        try:
            yield
        finally:
            self._hold()


def function_per_chunk(function: Any, num_chunks: int) -> list[Any] | None:
    """The function for each chunk; None stays None. Megatron accepts one function for all chunks,
    or a list."""
    if function is None or isinstance(function, list):
        return function
    return [function] * num_chunks


def _reduces_early(model: Any) -> bool:
    """True if Megatron's gradient finalization expects reductions to have started: the chunk's
    DistributedDataParallel has `overlap_grad_reduce`."""
    ddp_config = getattr(model, "ddp_config", None)
    return ddp_config is not None and ddp_config.overlap_grad_reduce
