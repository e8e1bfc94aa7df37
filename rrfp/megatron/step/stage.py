"""Runs the tasks F, B and W of one step on a rank's model chunks.

Megatron's own functions do the work (`rrfp.megatron.adapters.schedules`). This module adds what
tasks out of order need: separate data and random streams for every microbatch, separate weight
gradients, and gradients and losses summed in microbatch order.

A model's forward also changes state besides its output. Losses for the log, which Megatron sums
over microbatches, are summed in microbatch order here. A router's token counts for expert biases
are whole numbers, whose sum is exact in any order up to 2**24, and the largest attention logit is a
maximum, so neither needs special care. `rrfp.megatron.refusals` refuses models in which a
microbatch reads state of an earlier one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rrfp.megatron.adapters.global_state import TRACKERS
from rrfp.megatron.adapters.schedules import (
    free_output,
    is_first_since_update,
    outputs_to_send,
    run_backward,
    run_forward,
)
from rrfp.megatron.memory.activation_bytes import ActivationBytes, ActivationCounter, fixed_storages
from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradients import Reduction, function_per_chunk, gradient_sum
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.megatron.step.random_streams import RandomStreams
from rrfp.megatron.step.weight_gradients import DeferredWeightGradients, deferrable_weights
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task


class LoggedLosses:
    """Collects the losses for Megatron's log (expert balance, multi-token prediction, sparse
    attention) by task, and adds them in microbatch order."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, list[Any]]] = []

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Collect the losses of this microbatch's forward, or of its backward, which may recompute
        forwards. Megatron's trackers are empty in the block, and get their earlier losses back
        after it."""
        totals = [tracker.exchange(tracker.empty()) for tracker in TRACKERS]
        try:
            yield
        finally:
            losses = [
                tracker.exchange(total) for tracker, total in zip(TRACKERS, totals, strict=True)
            ]
        self._losses.append((microbatch, losses))

    def finish(self) -> None:
        """Add the step's losses to Megatron's trackers, in microbatch order."""
        for _, losses in sorted(self._losses, key=lambda task: task[0]):
            for tracker, added in zip(TRACKERS, losses, strict=True):
                tracker.add(added)
        self._losses.clear()


Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """The arguments of a call of Megatron's schedule that its tasks need."""

    forward_step_func: Callable[..., Any]
    data: StepData
    order: Sequence[int]
    """By microbatch: the number of its item in the data's own order."""
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool | None = False


class RankStep:
    """Runs the tasks of one step on this rank's model chunks; implements the runtime's
    `Compute`."""

    def __init__(
        self,
        models: Sequence[Any],
        config: Any,
        arguments: StepArguments,
        shape: Shape,
        rank: int,
        streams: RandomStreams,
        *,
        grad_order: GradOrder,
        cp_size: int,
        follows_hooks: bool,
        measures_memory: bool = False,
    ) -> None:
        """`shape` and `rank` determine the stages of the chunks. For `follows_hooks`, see
        `Reduction`. `measures_memory` counts activation bytes in a training step."""
        self._shape = shape
        self._arguments = arguments
        self._streams = streams
        self._logged_losses = LoggedLosses()
        is_training = not arguments.forward_only
        self._counters: list[ActivationCounter] = []
        if measures_memory and is_training:
            fixed = fixed_storages(models, streams.device)
            self._counters = [ActivationCounter(model, fixed, streams.device) for model in models]
        self._chunks = [
            ChunkStep(
                model,
                config,
                arguments,
                chunk,
                shape,
                rank,
                grad_order,
                cp_size,
                self._counters[chunk] if self._counters else None,
            )
            for chunk, model in enumerate(models)
        ]
        self.waiting_gradient_bytes = 0
        """Bytes of gradients that now wait for those of earlier microbatches."""
        self.peak_waiting_gradient_bytes = 0
        self.num_tokens = torch.zeros([], dtype=torch.int, device=streams.device)
        """The number of tokens that the loss function counted; 0 except on the last stage."""
        self._streams.start_step(advances=is_training)
        self._reduction = None
        if is_training:
            _gather_parameters(models, config)
            self._reduction = Reduction(
                models,
                config,
                is_first_rank=rank == 0,
                follows_hooks=follows_hooks,
                # Deferred embedding gradients are computed after the last task.
                starts_early=not config.defer_embedding_wgrad_compute,
            )

    def run(self, task: Task, inputs: Tensors) -> Tensors:
        """Run a task F, B or W on its inputs (activations, in B gradients) and return what it
        sends: outputs, in B gradients of the inputs, in W nothing. Also counts tokens and the bytes
        of waiting gradients, and marks a chunk's gradients as complete after its last task."""
        index = self._shape.chunk_of(task.stage)
        chunk, microbatch = self._chunks[index], task.microbatch
        if task.kind is Kind.F:
            number = self._arguments.order[microbatch]
            with (
                self._logged_losses.task(microbatch),
                self._streams.task(task.stage, microbatch) as streams,
                self._arguments.data.of(index, number, chunk.model, streams) as data,
            ):
                outputs, num_tokens = chunk.forward(microbatch, inputs, data)
            self.num_tokens += num_tokens
            return outputs
        assert self._reduction is not None
        if task.kind is Kind.B:
            is_last = chunk.is_completed_by_backward(microbatch)
            with (
                self._reduction.around_last_backward(index) if is_last else nullcontext(),
                self._logged_losses.task(microbatch),
            ):
                outputs = chunk.backward(microbatch, inputs)
        else:
            chunk.weight_gradient(microbatch)
            outputs = ()
        waiting = sum(chunk.waiting_bytes for chunk in self._chunks)
        self.waiting_gradient_bytes = waiting
        self.peak_waiting_gradient_bytes = max(self.peak_waiting_gradient_bytes, waiting)
        if chunk.has_all_gradients:
            self._reduction.complete(index)
        return outputs

    @property
    def held_bytes(self) -> int:
        """The measured activation bytes of this rank now; 0 if memory is not measured."""
        return sum(counter.held_bytes for counter in self._counters)

    def activation_bytes(self) -> list[list[ActivationBytes]]:
        """The measured bytes by chunk and microbatch. Call it after `finish`; empty if memory was
        not measured."""
        return [counter.results() for counter in self._counters]

    def forward_data(self) -> list[Any]:
        """The loss function's results in microbatch order; empty except on the last stage."""
        by_microbatch = sorted(self._chunks[-1].reduced.items())
        return [item for _, items in by_microbatch for item in items]

    def abandon(self) -> None:
        """Stop holding Megatron's gradient reductions back, without starting any. Call it after a
        task has failed; an evaluation holds none back."""
        if self._reduction is not None:
            self._reduction.abandon()

    def finish(self) -> None:
        """Start the remaining gradient reductions, advance random states, and add the losses for
        the log to Megatron's trackers. Call it after the last task."""
        self._logged_losses.finish()
        self._streams.finish_step()
        if self._reduction is not None:
            self._reduction.finish()


class ChunkStep:
    """Runs the tasks of one model chunk in one step."""

    def __init__(
        self,
        model: Any,
        config: Any,
        arguments: StepArguments,
        chunk: int,
        shape: Shape,
        rank: int,
        grad_order: GradOrder,
        cp_size: int,
        counter: ActivationCounter | None = None,
    ) -> None:
        """`counter` counts activation bytes, if given."""
        self.model = model
        self._config = config
        self._arguments = arguments
        # Megatron passes it only if a rank has several chunks, and checks it against the model's.
        self._vp_stage = chunk if shape.num_chunks > 1 else None
        stage = shape.stage_of(rank, chunk)
        self._is_first_stage = stage == 0
        self._is_last_stage = stage == shape.num_stages - 1
        self._cp_size = cp_size
        deferred = deferrable_weights(model) if shape.splits_backward else []
        weights = set(deferred)
        others = [parameter for parameter in model.parameters() if parameter not in weights]
        num = shape.num_microbatches
        self._gradients = gradient_sum(grad_order, others, num)
        self._deferred = (
            DeferredWeightGradients(model, grad_order, num) if shape.splits_backward else None
        )
        self._activations: dict[int, tuple[list[torch.Tensor | None], list[torch.Tensor]]] = {}
        """Input and output tensors of the microbatches between F and B."""
        self._counter = counter
        self._num_left = dict.fromkeys(shape.kinds, shape.num_microbatches)
        self.reduced: dict[int, list[Any]] = {}
        """The loss function's results by microbatch; empty except on the last stage."""

    def forward(self, microbatch: int, inputs: Tensors, data: Any) -> tuple[Tensors, torch.Tensor]:
        """Run a forward. Return the outputs for the next stage (none on the last) and the number of
        tokens that the loss counted. `forward_step_func` draws from `data`. In training, keeps
        inputs and outputs until B, and frees the output's data if Megatron would."""
        arguments, config = self._arguments, self._config
        input_tensors: list[torch.Tensor | None] = list(inputs) or [None]
        for tensor in input_tensors:
            if tensor is not None:
                tensor.requires_grad_()
        is_first = self._num_left[Kind.F] == arguments.num_microbatches
        self._num_left[Kind.F] -= 1
        reduced = self.reduced[microbatch] = []
        with self._deferring(microbatch), self._measuring():
            outputs, num_tokens = run_forward(
                arguments.forward_step_func,
                data,
                self.model,
                arguments.num_microbatches,
                input_tensors,
                reduced,
                config,
                self._cp_size,
                microbatch=microbatch,
                is_last_stage=self._is_last_stage,
                is_first_microbatch=is_first_since_update(
                    arguments.first_val_step,
                    forward_only=arguments.forward_only,
                    is_first_forward=is_first,
                ),
                collect_non_loss_data=arguments.collect_non_loss_data,
                vp_stage=self._vp_stage,
            )
        sent: Tensors = () if self._is_last_stage else outputs_to_send(outputs, config)
        if not arguments.forward_only:
            self._activations[microbatch] = (input_tensors, outputs)
            if not self._is_last_stage:
                free_output(outputs, config)
            if self._counter is not None:
                self._counter.count_forward(microbatch, input_tensors, outputs, sent)
        return sent, num_tokens

    def is_completed_by_backward(self, microbatch: int) -> bool:
        """True if running this backward now completes the chunk's gradients; always False if the
        backward is split."""
        return self._deferred is None and self._gradients.completes(microbatch)

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Run a backward and return the gradients for the previous stage (none on the first). Adds
        the gradients of parameters, except those that W computes. If the next stage did not use the
        output, return None for each input."""
        self._num_left[Kind.B] -= 1
        input_tensors, outputs = self._activations.pop(microbatch)
        with self._deferring(microbatch, outputs), self._gradients.adding(microbatch):
            if gradients and gradients[0] is None:
                # The next stage did not use this output. Megatron would treat None as a loss.
                input_gradients: list[torch.Tensor | None] = [None] * len(input_tensors)
            else:
                input_gradients = run_backward(
                    input_tensors, outputs, list(gradients) or [None], self.model, self._config
                )
        if self._counter is not None:
            if self._deferred is None:
                self._counter.remove(microbatch)
            else:
                self._counter.count_backward(microbatch, self._deferred.operands(microbatch))
        return () if self._is_first_stage else tuple(input_gradients)

    def weight_gradient(self, microbatch: int) -> None:
        """Run W: compute and add the weight gradients that the microbatch's B left out."""
        assert self._deferred is not None
        self._num_left[Kind.W] -= 1
        self._deferred.run(microbatch)
        if self._counter is not None:
            self._counter.remove(microbatch)

    @property
    def has_all_gradients(self) -> bool:
        """True if all tasks of the chunk, of every kind, have run."""
        return not any(self._num_left.values())

    @property
    def waiting_bytes(self) -> int:
        """The bytes of gradients that wait for those of earlier microbatches."""
        deferred = 0 if self._deferred is None else self._deferred.waiting_bytes
        return self._gradients.waiting_bytes + deferred

    def _measuring(self) -> AbstractContextManager[None]:
        """Wrap a forward to measure its memory, if memory is measured."""
        return nullcontext() if self._counter is None else self._counter.forward()

    def _deferring(
        self, microbatch: int, outputs: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Wrap a forward, or a backward from `outputs`, to defer its weight gradients, if the
        backward is split."""
        if self._deferred is None:
            return nullcontext()
        return self._deferred.task(microbatch, outputs)


def _gather_parameters(models: Sequence[Any], config: Any) -> None:
    """Start to gather the parameters sharded by the distributed optimizer, in the same order on
    every replica. Megatron starts it shortly before each chunk's first forward, but here that time
    is not known in advance. Do nothing with one chunk, where the first forward starts it."""
    functions = function_per_chunk(config.param_sync_func, len(models))
    if functions is not None and len(models) > 1:
        for function, model in zip(functions, models, strict=True):
            function(model.parameters())
