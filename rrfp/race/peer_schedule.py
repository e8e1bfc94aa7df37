"""A step under another project's pipeline schedule, run unchanged on Megatron's model chunks.

The peer decides the order, moves the tensors and calls the backward. We supply the stages' work,
which is Megatron's `forward_step`, the pace, and the records. Gradients are accumulated as they
come, in Megatron's fp32 buffers, and reduced at the end of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step

from rrfp.errors import UsageError
from rrfp.race.peers import PEERS
from rrfp.runtime.pace import Pace, StepPace, sleep_until
from rrfp.runtime.protocols import Clock, StepSummary, monotonic
from rrfp.schedule.causes import Cause
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.trace.fixed_schedule import FixedScheduleCounts
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, WaitRecord
from rrfp.train.data.batches import Batch
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout


class PeerSchedule(ABC):
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
        self.name = name
        self.model = model
        self.layout = layout
        self._record = record
        self._pace = pace
        self._clock = clock
        self.last_step: StepSummary | None = None
        """The figures of the last step on this rank."""

    def run(self, step: int, batches: Sequence[Batch]) -> list[Any]:
        """Run one step; every rank of the pipeline calls this. Returns what the loss function
        returned, in microbatch order (empty except on the last stage). Gradients are added to the
        parameters' `main_grad`.

        The first step, and one with another number or shape of microbatches, also connects the
        ranks. Raises UsageError if the microbatches differ in shape.
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
        self.last_step = StepSummary(start_ns, end_ns, tally.busy_ns, tally.peak_held)
        return losses

    @abstractmethod
    def prepare(self, num_microbatches: int, batch_shape: tuple[int, ...]) -> None:
        """Build the peer's schedule for microbatches like these, unless the last step had such.
        `batch_shape` is (micro_batch_size, length)."""

    @abstractmethod
    def run_tasks(self, batches: Sequence[Batch], tally: "Tally") -> list[Any]:
        """Run all tasks and transfers of a step. Returns what the loss function returned, in
        microbatch order (empty except on the last stage)."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all messages have left. Later steps still work."""


class ChunkModule(torch.nn.Module):
    """A model chunk as a peer's stage calls it: with the activation and the microbatch's number."""

    def __init__(self, chunk: Any, model: ModelChunks, *, is_last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._model = model
        self._is_last = is_last
        self._batches: Sequence[Batch] = ()
        self._reduced: dict[int, Any] = {}

    def begin(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._reduced = {}

    def losses(self) -> list[Any]:
        """What the loss function returned in this step, in microbatch order."""
        return [reduced for _, reduced in sorted(self._reduced.items())]

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
            (self._reduced[index],) = reduced
            if config.grad_scale_func is not None:
                # Scaling makes it a vector of one, which some of torch's releases refuse.
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

    @contextmanager
    def blocking(self, receiver: Task) -> Iterator[None]:
        """Wrap a transfer that blocks both ends, of the message for a task; for each of them it
        ends when the modelled time has passed since the exchange."""
        with self.transfer():
            yield
            sleep_until(self._clock() + self.message_ns(receiver))

    def transfer(self) -> AbstractContextManager[None]:
        """Wrap a wait for transfers."""
        return self.wait(self._counts.cause_of_transfer(self._shape.num_tasks_of_a_rank))
