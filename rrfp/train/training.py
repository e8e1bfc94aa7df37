"""One rank's training step, under any schedule function with Megatron's signature."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import Clock, monotonic
from rrfp.trace.records import BegunRecord, Phase, PhaseRecord, Record
from rrfp.train.admission import RunAdmission, RunPlanner
from rrfp.train.data.batches import Batch, Batches
from rrfp.train.dealing import RunDealing
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.liveness.heartbeat import enter
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings

if TYPE_CHECKING:
    from rrfp.train.pacing import StepPacer

_NUM_WARMUP_STEPS = 10
"""The learning rate rises to its full value over these steps. Without that, Adam's first updates,
all of one size, destabilise a fresh model."""


class Schedule(Protocol):
    """A schedule function like those of Megatron's `get_forward_backward_func`."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: list[Iterator[Any]],
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
    """Let a schedule run a step on these microbatches, in their order. Returns the losses on the
    last stage's rank, and an empty list on others."""
    on_device = [_moved(batch, model.device) for batch in batches]
    return schedule(
        forward_step_func=model.forward_step,
        data_iterator=[iter(on_device) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=settings.data.seq_length,
        micro_batch_size=settings.data.micro_batch_size,
        forward_only=forward_only,
    )


def _moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


class StepResult(NamedTuple):
    """The outcome of a step, the same on every rank."""

    loss: float
    """Mean over the microbatches, in their order, and over the replicas, in theirs."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping."""
    tokens: int
    """Labels that counted, over all replicas."""
    heldout_loss: float | None = None
    """Mean over the held-out labels; None if there was no evaluation after this step."""


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
        planner: RunPlanner | None = None,
        dealing: RunDealing | None = None,
    ) -> None:
        """`record` receives the step's data and optimizer phases; the schedule records its own.
        `pace` is the schedule's: it is prepared before each step, and decides on admission if it
        has costs, unless a `planner` does. A `dealing` takes the place of the `batches`."""
        self._settings = settings
        self._layout = layout
        self._model = model
        self._admission = dealing or RunAdmission(settings, layout, batches, pace, planner)
        self._schedule = schedule
        self._record = record
        self._clock = clock
        self._pace = pace

    def train_step(self, step: int) -> StepResult:
        """Run one step on every rank. Raises RrfpError if the loss or the gradient is not
        finite."""
        settings, model = self._settings, self._model
        start_ns = self._begin_phase(Phase.DATA, step)
        batches = self._admission.batches(step)
        if self._pace is not None:
            self._pace.prepare(step)
        self._finish_phase(Phase.DATA, start_ns, step)

        self._begin_phase(Phase.SCHEDULE, step)
        losses = run_schedule(self._schedule, settings, model, batches)

        enter(f"in the optimizer of step {step}")
        start_ns = self._begin_phase(Phase.OPTIMIZER, step)
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
                f"step {step} has a loss of {loss:g} and a gradient norm of {grad_norm:g}, which "
                "further steps cannot fix; try a smaller --lr"
            )
        return StepResult(loss, float(grad_norm), int(tokens))

    def _begin_phase(self, phase: Phase, step: int) -> int:
        start_ns = self._clock()
        self._record(BegunRecord(start_ns, start_ns, step, phase))
        return start_ns

    def _finish_phase(self, phase: Phase, start_ns: int, step: int) -> None:
        self._record(PhaseRecord(start_ns, self._clock(), step, phase))

    def _shared(self, losses: list[dict[str, torch.Tensor]], tokens: float) -> tuple[float, float]:
        """Share the step's loss and tokens, which only the last stage knows, with every rank."""
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
