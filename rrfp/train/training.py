"""What one rank does in a training step, under any schedule function of Megatron's signature."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import Clock, monotonic
from rrfp.trace.records import Phase, PhaseRecord, Record
from rrfp.train.admission import run_order
from rrfp.train.data.batches import Batch, Batches
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings

if TYPE_CHECKING:
    from rrfp.train.pacing import StepPacer

_NUM_WARMUP_STEPS = 10
"""The learning rate rises to its full value over these steps; without it Adam's first updates,
all of one size, throw a fresh model off."""


class Schedule(Protocol):
    """A schedule function as `megatron.core.pipeline_parallel.get_forward_backward_func` gives."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: list[Iterator[Batch]],
        model: list[Any],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
    ) -> list[Any]: ...


def run_schedule(
    schedule: Schedule,
    settings: TrainSettings,
    model: ModelChunks,
    batches: Sequence[Batch],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Have a schedule run a step on these microbatches, in their order; gives what the losses came
    to, on the last stage's rank, and nothing on others."""
    return schedule(
        forward_step_func=model.forward_step,
        data_iterator=[iter(batches) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=settings.data.seq_length,
        micro_batch_size=settings.data.micro_batch_size,
        forward_only=forward_only,
    )


class StepResult(NamedTuple):
    """What a step came to; the same numbers on every rank."""

    loss: float
    """Mean over the microbatches, in their order, and over the replicas, in theirs."""
    grad_norm: float
    """Norm of the whole model's gradient before it is clipped."""
    tokens: int
    """Labels that counted, over all replicas."""
    heldout_loss: float | None = None
    """Mean over the labels that training never sees; None where it was not looked at."""


class Trainer:
    """Trains one rank's chunks, a step at a time."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        batches: Batches,
        schedule: Schedule,
        record: Callable[[Record], None],
        clock: Clock = monotonic,
        pace: "StepPacer | None" = None,
    ) -> None:
        """`record` receives the step's data and optimizer phases; the schedule records its own. The
        schedule's `pace` says in which order microbatches are admitted if it knows what they cost,
        and is drawn before each step."""
        self._settings = settings
        self._layout = layout
        self._model = model
        self._batches = batches
        self._schedule = schedule
        self._record = record
        self._clock = clock
        self._order = run_order(settings, pace)
        self._pace = pace

    def train_step(self, step: int) -> StepResult:
        """Run one step on every rank. Raises RrfpError when loss or gradient is not finite."""
        settings, model = self._settings, self._model
        start_ns = self._clock()
        given = [self._batches.batch(step, index) for index in range(settings.data.microbatches)]
        batches = [given[index] for index in self._order(step, given)]
        if self._pace is not None:
            self._pace.prepare(step)
        self._finish_phase(Phase.DATA, start_ns, step)

        losses = run_schedule(self._schedule, settings, model, batches)

        start_ns = self._clock()
        for group in model.optimizer.param_groups:
            group["lr"] = settings.run.lr * min(1.0, (step + 1) / _NUM_WARMUP_STEPS)
        _, grad_norm, _ = model.optimizer.step()
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        tokens = sum(float(batch["loss_mask"].sum()) for batch in batches)
        loss, tokens = self._shared(losses, tokens)
        self._finish_phase(Phase.OPTIMIZER, start_ns, step)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise RrfpError(
                f"step {step} came to a loss of {loss:g} and a gradient norm of {grad_norm:g}, "
                "which no step mends; try a smaller --lr"
            )
        return StepResult(loss, float(grad_norm), int(tokens))

    def _finish_phase(self, phase: Phase, start_ns: int, step: int) -> None:
        self._record(PhaseRecord(start_ns, self._clock(), step, phase))

    def _shared(self, losses: list[dict[str, torch.Tensor]], tokens: float) -> tuple[float, float]:
        """The step's loss and tokens, known to the last stage, on every rank."""
        layout = self._layout
        shared = torch.zeros(2, dtype=torch.float64)
        if layout.pp_rank == layout.last_stage_pp_rank:
            from megatron.core import parallel_state

            loss = sum(item["loss"].item() for item in losses) / len(losses)
            own = torch.tensor([loss, tokens], dtype=torch.float64)
            replicas = [torch.empty_like(own) for _ in range(layout.dp)]
            dist.all_gather(replicas, own, group=parallel_state.get_data_parallel_group())
            shared[0] = sum(replica[0].item() for replica in replicas) / layout.dp
            shared[1] = sum(replica[1].item() for replica in replicas)
        dist.broadcast(shared, layout.first_rank(layout.last_stage_pp_rank))
        return shared[0].item(), shared[1].item()
