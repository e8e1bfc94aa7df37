"""A rank's part of one step on a Megatron model: what F, B and W do on each of its chunks.

Megatron's own functions do the work (`rrfp.megatron.adapters.schedules`). This adds what running
out of order needs: separate data and random streams for every microbatch, separate weight
gradients, and gradients and losses in microbatch order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rrfp.errors import UsageError
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
from rrfp.megatron.step.gradients import Reduction, each, gradient_sum
from rrfp.megatron.step.microbatch_data import StepData
from rrfp.megatron.step.random_streams import RandomStreams
from rrfp.megatron.step.weight_gradients import DeferredWeightGradients, deferrable_weights
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

# State that a model's forward leaves behind besides its output, when tasks run out of order.
#
# - Losses for the log (experts' balance, multi-token prediction, sparse attention), which Megatron
# sums over microbatches, are summed in microbatch order here, the same to the bit. - The token
# counts of a router for its experts' biases are whole numbers, whose sum is exact in any order (up
# to 2**24), and the largest attention logit is a maximum. Neither needs anything. - Models in which
# a later microbatch reads state of an earlier one are refused.


class LoggedLosses:
    """The losses for the log from one step's tasks on this rank."""

    def __init__(self) -> None:
        self._apart: list[tuple[int, list[Any]]] = []

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Wrap this microbatch's forward, and its backward, which may recompute forwards."""
        totals = [tracker.exchange(tracker.empty()) for tracker in TRACKERS]
        try:
            yield
        finally:
            apart = [
                tracker.exchange(total) for tracker, total in zip(TRACKERS, totals, strict=True)
            ]
        self._apart.append((microbatch, apart))

    def finish(self) -> None:
        """Add the step's losses to Megatron's trackers, in microbatch order."""
        for _, apart in sorted(self._apart, key=lambda left: left[0]):
            for tracker, losses in zip(TRACKERS, apart, strict=True):
                tracker.add(losses)
        self._apart.clear()


def refuse_stateful(chunks: Iterable[torch.nn.Module], config: Any) -> None:
    """Raise UsageError, before the first task, for a model in which a microbatch's forward reads
    state from another's, because the result would depend on the order of tasks."""
    # A plain ModelParallelConfig has neither attribute.
    has_fp8 = bool(getattr(config, "fp8", None))
    recipe = getattr(config, "fp8_recipe", None) if has_fp8 else None
    if recipe in ("delayed", "custom"):
        raise UsageError(
            f"fp8_recipe {str.__str__(recipe)} cannot run readiness-first: it scales a "
            "microbatch by what earlier ones held; choose tensorwise, blockwise or mxfp8"
        )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if has_fp8 and getattr(config, name, False):
            raise UsageError(
                f"{name} cannot run readiness-first: under every recipe Transformer Engine scales "
                "the attention's scores by what earlier microbatches held; switch it off"
            )
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for attribute, (what, next_step) in _STATEFUL.items():
                if module.training and getattr(module, attribute, None) is not None:
                    raise UsageError(
                        f"{name} cannot run readiness-first: {what} follow the order of the "
                        f"microbatches; {next_step}"
                    )


_STATEFUL = {
    "running_mean": ("its running statistics", "switch track_running_stats off"),
    "global_tokens_per_expert": (
        "the running counts of its global_aux_loss",
        "choose aux_loss or seq_aux_loss",
    ),
    "qb_beta_accum": (
        "the running averages of its quantile balancing",
        "choose aux_loss or seq_aux_loss",
    ),
    "router_replay": ("the routes that it records", "switch moe_enable_routing_replay off"),
}
"""By attribute of a module: what depends on the order of tasks, and what to do about it."""


Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """The arguments of Megatron's training loop to its schedule that tasks need."""

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
    """Runs the tasks of one step on this rank's model chunks (the runtime's `Compute`)."""

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
        """`shape` and `rank` say which stages the chunks are. `follows_hooks` says that replicas
        run their backwards in the same order (`Reduction`). `measures_memory` counts what the
        microbatches of a training step keep (`kept_bytes`)."""
        self._shape = shape
        self._arguments = arguments
        self._streams = streams
        self._tracked = LoggedLosses()
        is_training = not arguments.forward_only
        self._kept: list[ActivationCounter] = []
        if measures_memory and is_training:
            fixed = fixed_storages(models, streams.device)
            self._kept = [ActivationCounter(model, fixed, streams.device) for model in models]
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
                self._kept[chunk] if self._kept else None,
            )
            for chunk, model in enumerate(models)
        ]
        self.waiting_gradient_bytes = 0
        """What gradients that wait now for those of earlier microbatches take."""
        self.peak_waiting_gradient_bytes = 0
        self.num_tokens = torch.zeros([], dtype=torch.int, device=streams.device)
        """Tokens that the loss function counted; 0 except on the last stage."""
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
        index = self._shape.chunk_of(task.stage)
        chunk, microbatch = self._chunks[index], task.microbatch
        if task.kind is Kind.F:
            number = self._arguments.order[microbatch]
            with (
                self._tracked.task(microbatch),
                self._streams.task(task.stage, microbatch) as streams,
                self._arguments.data.of(index, number, chunk.model, streams) as data,
            ):
                outputs, num_tokens = chunk.forward(microbatch, inputs, data)
            self.num_tokens += num_tokens
            return outputs
        assert self._reduction is not None
        if task.kind is Kind.B:
            ends = chunk.is_completed_by_backward(microbatch)
            with (
                self._reduction.around_last_backward(index) if ends else nullcontext(),
                self._tracked.task(microbatch),
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
        """What this rank's microbatches keep now, as measured; 0 if memory is not measured."""
        return sum(kept.held_bytes for kept in self._kept)

    def kept_bytes(self) -> list[list[ActivationBytes]]:
        """By chunk and microbatch, after `finish`; empty if memory was not measured."""
        return [kept.found() for kept in self._kept]

    def opaque_nodes(self) -> set[str]:
        """The kinds of autograd nodes met that do not show what they keep, so that `kept_bytes` may
        be too small."""
        return set().union(*(kept.hidden for kept in self._kept))

    def forward_data(self) -> list[Any]:
        """What the loss function returned, in microbatch order (empty except on the last stage)."""
        by_microbatch = sorted(self._chunks[-1].reduced.items())
        return [item for _, items in by_microbatch for item in items]

    def abandon(self) -> None:
        """Leave the contexts that the step has entered, after a task has failed."""
        if self._reduction is not None:
            self._reduction.abandon()

    def finish(self) -> None:
        """Start the remaining gradient reductions, and put the losses for the log where Megatron
        looks for them."""
        self._tracked.finish()
        self._streams.finish_step()
        if self._reduction is not None:
            self._reduction.finish()


class ChunkStep:
    """One model chunk in one step."""

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
        kept: ActivationCounter | None = None,
    ) -> None:
        """`kept` counts what the microbatches keep."""
        self.model = model
        self._config = config
        self._arguments = arguments
        # Megatron passes it if a rank has several chunks, and checks it against the model's.
        self._vp_stage = chunk if shape.num_chunks > 1 else None
        stage = shape.stage_of(rank, chunk)
        self._is_first_stage = stage == 0
        self._is_last_stage = stage == shape.num_stages - 1
        self._cp_size = cp_size
        deferred = deferrable_weights(model) if shape.splits_backward else []
        left_out = set(deferred)
        at_once = [weight for weight in model.parameters() if weight not in left_out]
        num = shape.num_microbatches
        self._gradients = gradient_sum(grad_order, at_once, num)
        self._deferred = (
            DeferredWeightGradients(model, grad_order, num) if shape.splits_backward else None
        )
        # What a forward keeps for its backward: input and output tensors.
        self._kept: dict[int, tuple[list[torch.Tensor | None], list[torch.Tensor]]] = {}
        self._counted = kept
        self._num_left = dict.fromkeys(shape.kinds, shape.num_microbatches)
        self.reduced: dict[int, list[Any]] = {}
        """By microbatch: what the loss function returned (empty except on the last stage)."""

    def forward(self, microbatch: int, inputs: Tensors, data: Any) -> tuple[Tensors, torch.Tensor]:
        """Returns the outputs for the next stage, and the number of tokens that the loss counted.
        The forward step draws from `data`."""
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
            self._kept[microbatch] = (input_tensors, outputs)
            if not self._is_last_stage:
                free_output(outputs, config)
            if self._counted is not None:
                self._counted.count_forward(microbatch, input_tensors, outputs, sent)
        return sent, num_tokens

    def is_completed_by_backward(self, microbatch: int) -> bool:
        """Whether this backward, if run now, is the last to change the chunk's gradients."""
        return self._deferred is None and self._gradients.completes(microbatch)

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Returns the gradients for the stage before, and adds those of the parameters, except the
        ones that W computes."""
        self._num_left[Kind.B] -= 1
        input_tensors, outputs = self._kept.pop(microbatch)
        with self._deferring(microbatch, outputs), self._gradients.adding(microbatch):
            if gradients and gradients[0] is None:
                # The next stage did not use this output. Megatron would take None for the loss's.
                input_gradients: list[torch.Tensor | None] = [None] * len(input_tensors)
            else:
                input_gradients = run_backward(
                    input_tensors, outputs, list(gradients) or [None], self.model, self._config
                )
        if self._counted is not None:
            if self._deferred is None:
                self._counted.freed(microbatch)
            else:
                self._counted.count_backward(microbatch, self._deferred.operands(microbatch))
        return () if self._is_first_stage else tuple(input_gradients)

    def weight_gradient(self, microbatch: int) -> None:
        """Add the gradients that the microbatch's B left out."""
        assert self._deferred is not None
        self._num_left[Kind.W] -= 1
        self._deferred.run(microbatch)
        if self._counted is not None:
            self._counted.freed(microbatch)

    @property
    def has_all_gradients(self) -> bool:
        return not any(self._num_left.values())

    @property
    def waiting_bytes(self) -> int:
        """The size of the gradients that wait for those of earlier microbatches."""
        deferred = 0 if self._deferred is None else self._deferred.waiting_bytes
        return self._gradients.waiting_bytes + deferred

    def _measuring(self) -> AbstractContextManager[None]:
        return nullcontext() if self._counted is None else self._counted.forward()

    def _deferring(
        self, microbatch: int, outputs: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        if self._deferred is None:
            return nullcontext()
        return self._deferred.task(microbatch, outputs)


def _gather_parameters(models: Sequence[Any], config: Any) -> None:
    """Start gathering the parameters that the distributed optimizer has sharded, in the same order
    on every replica. Megatron starts it shortly before each chunk's first forward, but here that
    time is not known in advance."""
    functions = each(config.param_sync_func, len(models))
    # As in Megatron: with one chunk the first forward starts it.
    if functions is not None and len(models) > 1:
        for function, model in zip(functions, models, strict=True):
            function(model.parameters())
