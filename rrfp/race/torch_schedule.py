"""The schedules of torch.distributed.pipelining.

If a schedule splits the backward, weight gradients are deferred as under our own hints, through the
hook that torch's stages have for this. torch's own split, by traversing the autograd graph, would
compute every weight gradient twice and give Megatron's layers a second whole backward in W. Where
a schedule of this kind runs a backward whole, as DualPipeV does beside a forward, its W follows its
B at once, and only then its message leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.weight_gradients import DeferredWeightGradients
from rrfp.race.delayed_sends import DelayedSends
from rrfp.race.peer_schedule import ChunkModule, PeerSchedule, Tally
from rrfp.race.peers import PEERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.train.data.batches import Batch
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout


class TorchSchedule(PeerSchedule):
    """Runs one rank's steps with one of torch's schedules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `PeerSchedule`."""
        super().__init__(*args, **kwargs)
        self._delayed_sends = DelayedSends()
        self._built: _Built | None = None

    def prepare(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> None:
        if self._built is None or not self._built.fits(num_microbatches, batch_shape):
            self._built = _Built(self.name, self.model, self.layout, num_microbatches, batch_shape)

    def run_tasks(self, batches: Sequence[Batch], tally: Tally) -> list[Any]:
        assert self._built is not None
        for stage in self._built.stages:
            stage.begin(batches, tally, self._delayed_sends)
        indices = torch.arange(len(batches))
        with _transfers(tally, self._delayed_sends):
            self._built.schedule.step(microbatch=indices, target=indices, return_outputs=False)
        return self._built.stages[-1].losses()

    def close(self) -> None:
        self._delayed_sends.close()


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
        self._module = ChunkModule(chunk, model, is_last=is_last)
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
        self._tally: Tally
        self._delayed_sends: DelayedSends

    def begin(self, batches: Sequence[Batch], tally: Tally, delayed_sends: DelayedSends) -> None:
        """Prepare for a step."""
        self._module.begin(batches)
        if self.dw_builder is not None:
            self._deferred = DeferredWeightGradients(self._module, GradOrder.ARRIVAL, len(batches))
        self._tally = tally
        self._delayed_sends = delayed_sends

    def losses(self) -> list[Any]:
        """What the loss function returned in this step, in microbatch order."""
        return self._module.losses()

    # Called by torch's schedules for a task, and for its message to another rank.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        task = Task(self.stage_index, Kind.F, fwd_chunk_id)
        with self._tally.task(task), self._deferring(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        task = Task(self.stage_index, Kind.B, bwd_chunk_id)
        runs_weights_too = full_backward and self.dw_builder is not None
        with self._tally.task(task), self._deferring(bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward and not runs_weights_too, last_backward
            )
        if runs_weights_too:
            self.backward_weight_one_chunk(bwd_chunk_id)

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


@contextmanager
def _transfers(tally: Tally, delayed_sends: DelayedSends) -> Iterator[None]:
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
