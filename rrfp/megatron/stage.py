"""One pipeline stage of a Megatron model for one step: what a forward and a backward do.

Megatron's own `forward_step` and `backward_step` do the work, so that loss scaling, gradient
scaling and deallocation are theirs; around them stands what running out of order needs: a view of
its own over the data for every microbatch, and gradients and losses in microbatch order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.utils import get_model_config, get_model_type, make_viewless_tensor

from rrfp.errors import UsageError
from rrfp.megatron.gradients import CanonicalGradients
from rrfp.schedule.tasks import Kind, Task

Tensors = tuple[torch.Tensor | None, ...]


class MicrobatchData:
    """An iterator's items by microbatch: each microbatch sees its own item, in any order."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._num_drawn = 0
        self._drawn: dict[int, Any] = {}

    def of(self, microbatch: int) -> Iterator[Any]:
        """What `forward_step_func` may pull for this microbatch: its item, once."""
        while self._num_drawn <= microbatch:
            try:
                self._drawn[self._num_drawn] = next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"the data iterator ended after {self._num_drawn} microbatches, before "
                    f"microbatch {microbatch} of this step; give it one item a microbatch"
                ) from None
            self._num_drawn += 1
        yield self._drawn.pop(microbatch)
        raise UsageError(
            f"forward_step_func asked for a second item for microbatch {microbatch}; "
            "put all that a microbatch needs into one item"
        )


@dataclass(frozen=True, slots=True)
class StepArguments:
    """What Megatron's training loop passes to its schedule, as far as a stage needs it."""

    forward_step_func: Callable[..., Any]
    data_iterator: Iterator[Any] | None
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class StageStep:
    """Runs the tasks of one step on this rank's model chunk (the runtime's `Compute`)."""

    def __init__(
        self,
        model: Any,
        arguments: StepArguments,
        *,
        is_first_stage: bool,
        is_last_stage: bool,
        cp_size: int,
        overlaps_reduction: bool,
    ) -> None:
        """`overlaps_reduction` lets Megatron start the reduction of the gradients inside the last
        backward, bucket by bucket as they come; every replica must choose the same."""
        self._model = model
        self._arguments = arguments
        self._is_first_stage = is_first_stage
        self._is_last_stage = is_last_stage
        self._cp_size = cp_size
        self._overlaps_reduction = overlaps_reduction
        self._config = get_model_config(model)
        iterator = arguments.data_iterator
        self._data = None if iterator is None else MicrobatchData(iterator)
        self._gradients = CanonicalGradients(model.parameters())
        # What a forward keeps for its backward: its input and output tensors.
        self._kept: dict[int, tuple[list[torch.Tensor | None], list[torch.Tensor]]] = {}
        self._reduced: dict[int, list[Any]] = {}
        self._num_forwards = 0
        self._num_backwards = 0
        device = next(model.parameters()).device
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        self._no_sync: AbstractContextManager[Any] | None = None
        if not arguments.forward_only:
            self._no_sync = (self._config.no_sync_func or nullcontext)()
            self._no_sync.__enter__()

    def run(self, task: Task, inputs: Tensors) -> Tensors:
        if task.kind is Kind.F:
            return self._forward(task.microbatch, inputs)
        return self._backward(task.microbatch, inputs)

    def forward_data(self) -> list[Any]:
        """What the loss function gave, in microbatch order (empty but on the last stage)."""
        return [item for _, items in sorted(self._reduced.items()) for item in items]

    def finish(self) -> None:
        """Start the gradient reduction where the last backward has not started it."""
        if self._no_sync is None:
            return
        self._lift_no_sync()
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        elif self._reduces_early():
            self._model.start_grad_sync()

    def _reduces_early(self) -> bool:
        """Whether Megatron's finalisation expects a reduction that was started before it."""
        ddp_config = getattr(self._model, "ddp_config", None)
        return ddp_config is not None and ddp_config.overlap_grad_reduce

    def _lift_no_sync(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        arguments, config = self._arguments, self._config
        input_tensors: list[torch.Tensor | None] = list(inputs) or [None]
        for tensor in input_tensors:
            if tensor is not None:
                tensor.requires_grad_()
        reduced = self._reduced[microbatch] = []
        outputs, num_tokens = forward_step(
            arguments.forward_step_func,
            None if self._data is None else self._data.of(microbatch),
            self._model,
            arguments.num_microbatches,
            input_tensors,
            reduced,
            config,
            self._cp_size,
            collect_non_loss_data=arguments.collect_non_loss_data,
            is_first_microbatch=check_first_val_step(
                arguments.first_val_step, arguments.forward_only, self._num_forwards == 0
            ),
            current_microbatch=microbatch,
            is_last_stage=self._is_last_stage,
        )
        self._num_forwards += 1
        self.num_tokens += num_tokens
        if self._is_last_stage:
            sent: Tensors = ()
        else:
            if config.deallocate_pipeline_outputs:
                # It empties the tensor in place, which the base of a view would not notice.
                outputs[0] = make_viewless_tensor(
                    outputs[0], requires_grad=outputs[0].requires_grad, keep_graph=True
                )
            sent = tuple(output.detach() for output in outputs)
        if not arguments.forward_only:
            self._kept[microbatch] = (input_tensors, outputs)
            if not self._is_last_stage:
                deallocate_output_tensor(outputs[0], config.deallocate_pipeline_outputs)
        return sent

    def _backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        input_tensors, outputs = self._kept.pop(microbatch)
        self._num_backwards += 1
        # By count, not by index: Megatron starts the reduction inside the last backward that runs,
        # on stages other than the first only when no function of its own does so (schedules.py).
        if (
            self._overlaps_reduction
            and self._num_backwards == self._arguments.num_microbatches
            and (self._config.grad_sync_func is None or self._is_first_stage)
            and self._gradients.completes(microbatch)
        ):
            self._lift_no_sync()
        with self._gradients.backward(microbatch):
            if gradients and gradients[0] is None:
                # The next stage did not use this output. Megatron would read None as the loss's.
                input_gradients = [None] * len(input_tensors)
            else:
                input_gradients = backward_step(
                    input_tensors,
                    outputs,
                    list(gradients) or [None],
                    get_model_type(self._model),
                    self._config,
                )
        return () if self._is_first_stage else tuple(input_gradients)
