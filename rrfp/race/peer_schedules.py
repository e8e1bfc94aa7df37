"""Pipeline schedules of other projects on Megatron's model chunks; torch.distributed.pipelining.

If a schedule splits the backward, weight gradients are deferred as under rrfp's own hints, through
a hook of torch's stages. torch's own split traverses the autograd graph; it would compute every
weight gradient twice and run a second whole backward of Megatron's layers in W. If such a schedule
runs a backward whole, as DualPipeV does beside a forward, its W follows its B immediately and its
message leaves after both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from rrfp.errors import UsageError
from rrfp.megatron.adapters.groups import pipeline_group
from rrfp.megatron.adapters.parallel_state import context_parallel_size
from rrfp.megatron.adapters.schedules import run_forward
from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.weight_gradients import DeferredWeightGradients
from rrfp.megatron.step_report import StepReport
from rrfp.race.systems import PEERS
from rrfp.runtime.pace import Pace, StepPace, sleep_until
from rrfp.runtime.protocols import Clock, StepSummary, monotonic
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import (
    FixedScheduleCounts,
    Phase,
    PhaseRecord,
    Record,
    TaskRecord,
    WaitRecord,
)
from rrfp.train.data.batches import Batch
from rrfp.train.launch.process_groups import Layout
from rrfp.train.models.model import ModelChunks

# A peer's schedule runs unchanged: it decides the order, moves the tensors and calls the backward.
# rrfp supplies the stages' work, which is Megatron's forward, the pace, and the records. Gradients
# accumulate in order of arrival in Megatron's fp32 buffers and are reduced at the end of the step.


class PeerSchedule(ABC):
    """Runs one rank's steps with a named peer, and stores a report of the last step."""

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
        self.name = name
        self.model = model
        self.layout = layout
        self._record = record
        self._pace = pace
        self._clock = clock
        self.report: StepReport | None = None
        """Figures of the last step on this rank."""

    def run(self, step: int, batches: Sequence[Batch]) -> list[Any]:
        """Run one step; every rank of the pipeline calls this. Returns the loss function's results
        in microbatch order (empty except on the last stage). Gradients are added to the parameters'
        `main_grad` and reduced at the end.

        Sets `report`, and records the step's phase. The first step, and one with another number or
        shape of microbatches, also connects the ranks. Raises UsageError if the microbatches differ
        in shape.
        """
        shapes = {tuple(batch["tokens"].shape) for batch in batches}
        if len(shapes) > 1:
            raise UsageError(
                f"{self.name} exchanges messages of one shape, and this step's microbatches have "
                f"{len(shapes)}; give all of them one length"
            )
        self.prepare(len(batches), shapes.pop())
        shape = PEERS[self.name].shape(self.layout.pp, len(batches))
        tally = Tally(
            step,
            shape,
            None if self._pace is None else self._pace.start_step(step, shape),
            self._record,
            self._clock,
        )
        start_ns = self._clock()
        losses = self.run_tasks(batches, tally)
        finalize = self.model.config.finalize_model_grads_func
        if finalize is not None:
            with tally.wait(Cause.GRADIENT_SYNC):
                finalize(self.model.chunks)
        end_ns = self._clock()
        self._record(PhaseRecord(start_ns, end_ns, step, Phase.SCHEDULE))
        summary = StepSummary(start_ns, end_ns, tally.busy_ns, tally.peak_held)
        self.report = StepReport(summary)
        return losses

    @abstractmethod
    def prepare(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> None:
        """Build the peer's schedule for this number and shape of microbatches, unless it is already
        built. `batch_shape` is (micro_batch_size, length)."""

    @abstractmethod
    def run_tasks(self, batches: Sequence[Batch], tally: "Tally") -> list[Any]:
        """Run all tasks and transfers of a step. Returns the loss function's results in microbatch
        order (empty except on the last stage)."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all messages have left. Later steps still work."""


class ChunkModule(torch.nn.Module):
    """A model chunk, called by a peer's stage with the activation and the microbatch's number."""

    def __init__(self, chunk: Any, model: ModelChunks, *, is_last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._model = model
        self._is_last = is_last
        self._batches: Sequence[Batch] = ()
        self._reduced: dict[int, Any] = {}

    def begin(self, batches: Sequence[Batch]) -> None:
        """Set the microbatches of the next step."""
        self._batches = batches
        self._reduced = {}

    def losses(self) -> list[Any]:
        """The loss function's results of this step, in microbatch order."""
        return [reduced for _, reduced in sorted(self._reduced.items())]

    def forward(self, *inputs: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        """Run Megatron's forward of a microbatch. Returns the activation for the next stage or, on
        the last stage, the loss that the backward starts from; its reduced loss is kept for
        `losses`."""
        index, config = int(microbatch), self._model.config
        input_tensors: list[torch.Tensor | None] = list(inputs) or [None]
        reduced: list[Any] = []
        (output,), _ = run_forward(
            self._model.forward_step,
            iter([self._batches[index]]),
            self.chunk,
            len(self._batches),
            input_tensors,
            reduced,
            config,
            context_parallel_size(),
            microbatch=index,
            is_last_stage=self._is_last,
        )
        if self._is_last:
            (self._reduced[index],) = reduced
            if config.grad_scale_func is not None:
                # Scaling makes it a vector of one element, which some releases of torch refuse.
                output = config.grad_scale_func(output).reshape(())
        assert isinstance(output, torch.Tensor)
        return output


class Tally:
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
        """Peak number of activations so far, in microbatches of the whole rank."""
        return self._counts.peak_held / self._shape.num_chunks

    def message_ns(self, receiver: Task) -> int:
        """Return the modeled time of the message to a task; 0 without pace."""
        return 0 if self._pace is None else self._pace.message_ns(receiver)

    @contextmanager
    def task(self, task: Task) -> Iterator[None]:
        """Context of a task's work; paces and records it."""
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
        """Context of a wait; records it."""
        start_ns = self._clock()
        yield
        self._record(WaitRecord(start_ns, self._clock(), self._step, cause))

    @contextmanager
    def blocking(self, receiver: Task) -> Iterator[None]:
        """Context of a transfer that blocks sender and receiver, of the message to a task. On both
        it ends when the modeled time has passed since the exchange."""
        with self.transfer():
            yield
            sleep_until(self._clock() + self.message_ns(receiver))

    def transfer(self) -> AbstractContextManager[None]:
        """Context of a wait for transfers; records it, with a cause that depends on the tasks run
        so far."""
        return self.wait(self._counts.cause_of_transfer(self._shape.num_tasks_of_a_rank))


BatchSends = Callable[..., list[Any]]
"""Starts sends and receives and returns their handles."""


class DelayedSends:
    """Delays sends of torch.distributed by their modeled time, on one rank's outgoing links.

    A directed link carries one message at a time, in order of issue, while the rank continues. Each
    link has a thread that sleeps for a message's time and then sends it; `close` joins the thread.
    Waiting for a send includes waiting for its delay.
    """

    def __init__(self) -> None:
        self._times_ns: dict[int, int] = {}
        """Modeled message times by the id of their send operation; only sends not yet started."""
        self._links: dict[int, ThreadPoolExecutor] = {}

    def hold_back(self, sends: Sequence[dist.P2POp], message_ns: int) -> None:
        """Mark these sends to be delayed by `message_ns` when the function of `batch` starts them.
        Nothing is sent, and 0 marks nothing."""
        if message_ns:
            self._times_ns.update((id(send), message_ns) for send in sends)

    def batch(self, original: BatchSends) -> BatchSends:
        """Return a replacement for torch's `_batch_p2p` that delays the marked sends. As long as
        none was marked, it calls `original` with all operations at once."""

        def batch(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
            if not self._times_ns and not self._links:
                return original(p2p_ops, desc=desc)
            return [self._start(op, original) for op in p2p_ops]

        return batch

    def close(self) -> None:
        """Wait for all delayed sends, and end the links' threads."""
        for link in self._links.values():
            link.shutdown()
        self._links.clear()

    def _start(self, op: dist.P2POp, original: BatchSends) -> Any:
        """Start an operation, on its link's thread if it or an earlier send of the link is delayed;
        returns its handle."""
        message_ns = self._times_ns.pop(id(op), 0)
        if op.op is not dist.isend or not (message_ns or op.peer in self._links):
            (work,) = original([op])
            return work
        if op.peer not in self._links:
            self._links[op.peer] = ThreadPoolExecutor(1, f"rrfp-delayed-sends-{op.peer}")

        def send() -> Any:
            sleep_until(monotonic() + message_ns)
            (work,) = original([op])
            return work

        return _Delayed(self._links[op.peer].submit(send))


class _Delayed:
    """The handle of a delayed send."""

    def __init__(self, send: Future[Any]) -> None:
        self._send = send

    def wait(self) -> None:
        """Wait for the send. Raises the send's own error, such as a timeout."""
        self._send.result().wait()


class TorchSchedule(PeerSchedule):
    """Runs one rank's steps with one of torch's schedules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `PeerSchedule`."""
        super().__init__(*args, **kwargs)
        self._delayed_sends = DelayedSends()
        self._pipeline: _TorchPipeline | None = None

    def prepare(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> None:
        """Build torch's schedule and this rank's stages, unless the present ones fit."""
        if self._pipeline is None or not self._pipeline.fits(num_microbatches, batch_shape):
            self._pipeline = _TorchPipeline(
                self.name, self.model, self.layout, num_microbatches, batch_shape
            )

    def run_tasks(self, batches: Sequence[Batch], tally: Tally) -> list[Any]:
        """Run one step of torch's schedule. Meanwhile its functions for transfers are replaced by
        ones that delay sends and record waits. Returns the losses as `PeerSchedule.run_tasks`
        does."""
        assert self._pipeline is not None
        for stage in self._pipeline.stages:
            stage.begin(batches, tally, self._delayed_sends)
        indices = torch.arange(len(batches))
        with _transfers(tally, self._delayed_sends):
            self._pipeline.schedule.step(microbatch=indices, target=indices, return_outputs=False)
        return self._pipeline.stages[-1].losses()

    def close(self) -> None:
        """Wait for all delayed sends, and end their threads. Later steps still work."""
        self._delayed_sends.close()


class _TorchPipeline:
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
            _TorchStage(chunk, model, stage, self.shape, message)
            for chunk, stage in zip(model.chunks, layout.stages, strict=True)
        ]
        kind = getattr(pipelining, peer.schedule)
        # The last stage returns the final loss, already divided by the number of microbatches as in
        # Megatron, so torch must not compute or divide anything.
        self.schedule = kind(
            self.stages if issubclass(kind, schedules.PipelineScheduleMulti) else self.stages[0],
            num_microbatches,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )

    def fits(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> bool:
        """Return whether the schedule was built for this number and shape of microbatches."""
        return (self.shape.num_microbatches, self._batch_shape) == (num_microbatches, batch_shape)


def _empty_message(config: Any, batch_shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialized message of Megatron's stages for a microbatch: (length,
    micro_batch_size, hidden), with a tensor-parallel rank's part of the length under sequence
    parallelism."""
    micro_batch_size, length = batch_shape
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    return torch.empty(
        (length, micro_batch_size, config.hidden_size),
        dtype=config.pipeline_dtype,
        requires_grad=True,
    )


class _TorchStage(pipelining.PipelineStage):
    """A stage for torch's schedules, with paced and recorded tasks."""

    def __init__(
        self, chunk: Any, model: ModelChunks, stage: int, shape: Shape, message: torch.Tensor
    ) -> None:
        is_last = stage == shape.num_stages - 1
        self._module = ChunkModule(chunk, model, is_last=is_last)
        super().__init__(
            self._module,
            stage,
            shape.num_stages,
            message.device,
            input_args=() if stage == 0 else message,
            output_args=torch.empty((), requires_grad=True) if is_last else message,
            group=pipeline_group(None),
            dw_builder=self._weight_gradient if shape.splits_backward else None,
        )
        self._shape = shape
        self._deferred: DeferredWeightGradients | None = None
        self._deferring_microbatch = -1
        self._tally: Tally
        self._delayed_sends: DelayedSends

    def begin(self, batches: Sequence[Batch], tally: Tally, delayed_sends: DelayedSends) -> None:
        """Set the microbatches of the next step, and its pacing and recording."""
        self._module.begin(batches)
        if self.dw_builder is not None:
            self._deferred = DeferredWeightGradients(self._module, GradOrder.ARRIVAL, len(batches))
        self._tally = tally
        self._delayed_sends = delayed_sends

    def losses(self) -> list[Any]:
        """The loss function's results of this step, in microbatch order."""
        return self._module.losses()

    # torch's schedules call the following functions for a task, and for its messages.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a microbatch's F as torch does, paced and recorded."""
        task = Task(self.stage_index, Kind.F, fwd_chunk_id)
        with self._tally.task(task), self._defer_weights(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a microbatch's B as torch does, paced and recorded. If this schedule splits other
        backwards, a full one runs B, then W."""
        task = Task(self.stage_index, Kind.B, bwd_chunk_id)
        runs_weights_too = full_backward and self.dw_builder is not None
        with self._tally.task(task), self._defer_weights(bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward and not runs_weights_too, last_backward
            )
        if runs_weights_too:
            self.backward_weight_one_chunk(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a microbatch's W as torch does, paced and recorded."""
        with self._tally.task(Task(self.stage_index, Kind.W, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's sends of an activation, marked to be delayed by its modeled time."""
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        return self._hold_back(sends, Task(self.stage_index, Kind.F, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's sends of a gradient, marked to be delayed by its modeled time."""
        sends = super().get_bwd_send_ops(bwd_chunk_id)
        return self._hold_back(sends, Task(self.stage_index, Kind.B, bwd_chunk_id))

    @contextmanager
    def _defer_weights(self, microbatch: int) -> Iterator[None]:
        """Context of a task; defers its weight gradients if the schedule splits the backward."""
        self._deferring_microbatch = microbatch
        with nullcontext() if self._deferred is None else self._deferred.task(microbatch):
            yield

    def _weight_gradient(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients deferred by the current backward."""
        assert self._deferred is not None
        return partial(self._deferred.run, self._deferring_microbatch)

    def _hold_back(self, sends: list[dist.P2POp], sender: Task) -> list[dist.P2POp]:
        """Mark a task's sends to be delayed by the modeled time of its message, and return
        them."""
        receiver = self._shape.receiver(sender)
        if sends and receiver is not None:
            self._delayed_sends.hold_back(sends, self._tally.message_ns(receiver))
        return sends


@contextmanager
def _transfers(tally: Tally, delayed_sends: DelayedSends) -> Iterator[None]:
    """Replace, during the block, the two functions with which torch's schedules start transfers and
    wait for them, to delay sends and to record waits."""
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
