"""A schedule of torch.distributed.pipelining, run unchanged on Megatron's model chunks.

torch decides the order, moves the tensors and calls the backward. We supply the stages' work, which
is Megatron's `forward_step`, the pace, and the records. If a schedule splits the backward, weight
gradients are deferred as under our own hints, through the hook that torch's stages have for this.
torch's own split, by traversing the autograd graph, would compute every weight gradient twice and
give Megatron's layers a second whole backward in W. Gradients are accumulated as they come, in
Megatron's fp32 buffers, and reduced at the end of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from rrfp.errors import UsageError
from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradients import gradient_sum
from rrfp.megatron.step.weight_gradients import DeferredWeightGradients
from rrfp.race.delayed_sends import DelayedSends
from rrfp.race.peers import PEERS
from rrfp.runtime.pace import Pace, StepPace
from rrfp.runtime.protocols import Clock, monotonic
from rrfp.runtime.worker import StepSummary
from rrfp.schedule.causes import Cause
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.fixed_schedule import FixedScheduleCounts
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, WaitRecord
from rrfp.train.data.batches import Batch
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout


class TorchSchedule:
    """Runs one rank's steps with a named peer; keeps the figures of the last step."""

    def __init__(
        self,
        name: str,
        model: ModelChunks,
        layout: Layout,
        record: Callable[[Record], None],
        pace: Pace | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`model` must have the chunks that `PEERS[name]` needs (`check_peer`)."""
        self._name = name
        self._model = model
        self._layout = layout
        self._record = record
        self._pace = pace
        self._clock = clock
        self._delayed_sends = DelayedSends()
        self._built: _Built | None = None
        self.last_step: StepSummary | None = None
        """The figures of the last step on this rank."""

    def run(self, step: int, batches: Sequence[Batch]) -> list[Any]:
        """Run one step; every rank of the pipeline calls this. Returns what the loss function
        returned, in microbatch order (empty except on the last stage). Gradients are added to the
        parameters' `main_grad`.

        The first step, and one with another number or shape of microbatches, also connects the
        ranks. Raises UsageError if the microbatches differ in shape.
        """
        built = self._build(batches)
        config = self._model.config
        tally = _Tally(
            step,
            built.shape,
            None if self._pace is None else self._pace.start_step(step, built.shape),
            self._record,
            self._clock,
        )
        start_ns = self._clock()
        for stage in built.stages:
            stage.begin(batches, tally, self._delayed_sends)
        indices = torch.arange(len(batches))
        with _transfers(tally, self._delayed_sends):
            built.schedule.step(microbatch=indices, target=indices, return_outputs=False)
        if config.finalize_model_grads_func is not None:
            with tally.wait(Cause.GRADIENT_SYNC):
                config.finalize_model_grads_func(self._model.chunks)
        end_ns = self._clock()
        self._record(PhaseRecord(start_ns, end_ns, step, Phase.SCHEDULE))
        self.last_step = StepSummary(start_ns, end_ns, tally.busy_ns, tally.peak_held)
        return built.stages[-1].losses()

    def close(self) -> None:
        """Wait until all messages have left. Later steps still work."""
        self._delayed_sends.close()

    def _build(self, batches: Sequence[Batch]) -> "_Built":
        """The schedule for microbatches like these, reused from the last step if it fits."""
        shapes = {tuple(batch["tokens"].shape) for batch in batches}
        if len(shapes) > 1:
            raise UsageError(
                f"torch's {self._name} exchanges messages of one shape, and this step's "
                f"microbatches have {len(shapes)}; give all of them one length"
            )
        (shape,) = shapes
        if self._built is None or not self._built.fits(len(batches), shape):
            self._built = _Built(self._name, self._model, self._layout, len(batches), shape)
        return self._built


class _Built:
    """torch's schedule for a number and shape of microbatches, with this rank's stages."""

    def __init__(
        self,
        name: str,
        model: ModelChunks,
        layout: Layout,
        num_microbatches: int,
        batch_shape: tuple[int, ...],
    ) -> None:
        """`batch_shape` is (micro_batch_size, length)."""
        peer = PEERS[name]
        self.shape = peer.shape(layout.pp, num_microbatches)
        self._batch_shape = batch_shape
        message = _empty_message(model.config, batch_shape)
        self.stages = [
            _Stage(chunk, model, stage, self.shape, message)
            for chunk, stage in zip(model.chunks, layout.stages, strict=True)
        ]
        kind = getattr(pipelining, peer.schedule)
        # The last stage returns a final loss, divided by the number of microbatches as Megatron
        # does, so that torch has nothing to divide or compute.
        self.schedule = kind(
            self.stages if issubclass(kind, schedules.PipelineScheduleMulti) else self.stages[0],
            num_microbatches,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )

    def fits(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> bool:
        return (self.shape.num_microbatches, self._batch_shape) == (num_microbatches, batch_shape)


def _empty_message(config: Any, batch_shape: tuple[int, ...]) -> torch.Tensor:
    """The message of Megatron's stages for a microbatch: (length, micro_batch_size, hidden)."""
    micro_batch_size, length = batch_shape
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    return torch.empty(
        (length, micro_batch_size, config.hidden_size),
        dtype=config.pipeline_dtype,
        requires_grad=True,
    )


class _Stage(pipelining.PipelineStage):
    """A stage for torch's schedules, with paced and recorded tasks."""

    def __init__(
        self, chunk: Any, model: ModelChunks, stage: int, shape: Shape, message: torch.Tensor
    ) -> None:
        is_last = stage == shape.num_stages - 1
        self._module = _ChunkModule(chunk, model, is_last=is_last)
        super().__init__(
            self._module,
            stage,
            shape.num_stages,
            message.device,
            input_args=() if stage == 0 else message,
            output_args=torch.empty((), requires_grad=True) if is_last else message,
            group=parallel_state.get_pipeline_model_parallel_group(),
            dw_builder=self._weight_gradient if shape.splits_backward else None,
        )
        self._shape = shape
        self._deferred: DeferredWeightGradients | None = None
        self._deferring_microbatch = -1
        self._tally: _Tally
        self._delayed_sends: DelayedSends

    def begin(self, batches: Sequence[Batch], tally: "_Tally", delayed_sends: DelayedSends) -> None:
        """Prepare for a step."""
        self._module.begin(batches)
        if self.dw_builder is not None:
            sums = gradient_sum(GradOrder.ARRIVAL, (), len(batches))
            self._deferred = DeferredWeightGradients(self._module, sums)
        self._tally = tally
        self._delayed_sends = delayed_sends

    def losses(self) -> list[Any]:
        """What the loss function returned in this step, in microbatch order."""
        return [reduced for _, reduced in sorted(self._module.reduced.items())]

    # Called by torch's schedules for a task, and for its message to another rank.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        task = Task(self.stage_index, Kind.F, fwd_chunk_id)
        with self._tally.task(task), self._deferring(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        task = Task(self.stage_index, Kind.B, bwd_chunk_id)
        with self._tally.task(task), self._deferring(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._tally.task(Task(self.stage_index, Kind.W, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        return self._hold_back(sends, Task(self.stage_index, Kind.F, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_bwd_send_ops(bwd_chunk_id)
        return self._hold_back(sends, Task(self.stage_index, Kind.B, bwd_chunk_id))

    @contextmanager
    def _deferring(self, microbatch: int) -> Iterator[None]:
        """Wrap a task; defers its weight gradients if the schedule splits them off."""
        self._deferring_microbatch = microbatch
        with nullcontext() if self._deferred is None else self._deferred.task(microbatch):
            yield

    def _weight_gradient(self) -> Callable[[], None]:
        """A function that computes the weight gradients deferred by the current backward."""
        assert self._deferred is not None
        return partial(self._deferred.run, self._deferring_microbatch)

    def _hold_back(self, sends: list[dist.P2POp], sender: Task) -> list[dist.P2POp]:
        receiver = self._shape.receiver(sender)
        if sends and receiver is not None:
            self._delayed_sends.hold_back(sends, self._tally.message_ns(receiver))
        return sends


class _ChunkModule(torch.nn.Module):
    """A model chunk as torch's stages call it: with the activation and the microbatch's number."""

    def __init__(self, chunk: Any, model: ModelChunks, *, is_last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._model = model
        self._is_last = is_last
        self._batches: Sequence[Batch] = ()
        self.reduced: dict[int, Any] = {}
        """By microbatch: what the loss function returned (empty except on the last stage)."""

    def begin(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.reduced = {}

    def forward(self, *inputs: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        """The activation for the next stage, or the loss that the backward starts from."""
        index, config = int(microbatch), self._model.config
        input_tensors: list[torch.Tensor | None] = list(inputs) or [None]
        reduced: list[Any] = []
        (output,), _ = forward_step(
            self._model.forward_step,
            iter([self._batches[index]]),
            self.chunk,
            len(self._batches),
            input_tensors,
            reduced,
            config,
            parallel_state.get_context_parallel_world_size(),
            current_microbatch=index,
            is_last_stage=self._is_last,
        )
        if self._is_last:
            (self.reduced[index],) = reduced
            if config.grad_scale_func is not None:
                # Scaling makes it a vector of one, which some of torch's releases refuse.
                output = config.grad_scale_func(output).reshape(())
        assert isinstance(output, torch.Tensor)
        return output


class _Tally:
    """Paces and records the tasks and waits of one step."""

    def __init__(
        self,
        step: int,
        shape: Shape,
        pace: StepPace | None,
        record: Callable[[Record], None],
        clock: Clock,
    ) -> None:
        self._step = step
        self._shape = shape
        self._pace = pace
        self._record = record
        self._clock = clock
        self._counts = FixedScheduleCounts(releases=shape.kinds[-1])
        self.busy_ns = 0
        """Time in F, B and W so far."""

    @property
    def peak_held(self) -> float:
        """The most activations held so far, in microbatches of the whole rank."""
        return self._counts.peak_held / self._shape.num_chunks

    def message_ns(self, receiver: Task) -> int:
        """The modelled time of the message for a task."""
        return 0 if self._pace is None else self._pace.message_ns(receiver)

    @contextmanager
    def task(self, task: Task) -> Iterator[None]:
        """Wrap the work of a task."""
        start_ns = self._clock()
        with nullcontext() if self._pace is None else self._pace.task(task):
            yield
        end_ns = self._clock()
        self.busy_ns += end_ns - start_ns
        stage, kind, microbatch = task
        task_fields = kind, stage, self._shape.chunk_of(stage), microbatch
        self._record(
            TaskRecord(start_ns, end_ns, self._step, *task_fields, *self._counts.ran(kind))
        )

    @contextmanager
    def wait(self, cause: Cause) -> Iterator[None]:
        """Wrap a wait."""
        start_ns = self._clock()
        yield
        self._record(WaitRecord(start_ns, self._clock(), self._step, cause))

    def transfer(self) -> AbstractContextManager[None]:
        """Wrap a wait for transfers."""
        return self.wait(self._counts.cause_of_transfer(self._shape.num_tasks_of_a_rank))


@contextmanager
def _transfers(tally: _Tally, delayed_sends: DelayedSends) -> Iterator[None]:
    """Replace the two functions by which torch's schedules start transfers and wait for them:
    delays sends that are held back, and records waits."""
    start, finish = schedules._batch_p2p, schedules._wait_batch_p2p

    def recorded(work: list[Any]) -> None:
        if work:
            with tally.transfer():
                finish(work)

    functions: Any = schedules
    with ExitStack() as restored:
        restored.callback(setattr, schedules, "_batch_p2p", start)
        restored.callback(setattr, schedules, "_wait_batch_p2p", finish)
        functions._batch_p2p = delayed_sends.batch(start)
        functions._wait_batch_p2p = recorded
        yield
