"""The loss on held-out data, computed by forwards alone through the same schedule."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.train.data.batches import Batch
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings
from rrfp.train.training import Schedule, run_schedule

_MIN_MICROBATCHES = 32
"""How many microbatches an evaluation runs, rounded up to whole steps on every replica."""


class OwnSchedule(Schedule, Protocol):
    """A schedule function that has no other caller."""

    def close(self) -> None: ...


class Evaluation:
    """Evaluates the same held-out microbatches every time, without affecting training."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        heldout: Callable[[int], Batch],
        schedule: OwnSchedule,
    ) -> None:
        """`schedule` must not be the training's: its steps are numbered separately. Raises what
        `heldout` raises."""
        self._settings = settings
        self._layout = layout
        self._model = model
        self._schedule = schedule
        num, dp = settings.data.microbatches, layout.dp
        # Load them now, so that an unreadable image ends the run before it has trained.
        self._steps = [
            [heldout((step * dp + layout.dp_rank) * num + index) for index in range(num)]
            for step in range(-(-_MIN_MICROBATCHES // (num * dp)))
        ]

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        settings = self._settings
        is_last = step + 1 == settings.num_steps
        every = settings.run.heldout_every
        return is_last or (every is not None and (step + 1) % every == 0)

    def loss(self) -> float:
        """The mean over all labels that count, the same on every rank. Raises RrfpError if it is
        not finite."""
        layout = self._layout
        for chunk in self._model.chunks:
            chunk.eval()
        with torch.no_grad():
            sums = torch.stack([self._step(batches) for batches in self._steps]).sum(dim=0)
        for chunk in self._model.chunks:
            chunk.train()
        if layout.pp_rank == layout.last_stage_pp_rank:
            from megatron.core import parallel_state

            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        dist.broadcast(sums, layout.first_rank(layout.last_stage_pp_rank))
        loss = (sums[0] / sums[1]).item()
        if not math.isfinite(loss):
            raise RrfpError(
                f"the held-out loss is {loss:g}, which further steps cannot fix; try a smaller --lr"
            )
        return loss

    def close(self) -> None:
        """Close the schedule's links."""
        self._schedule.close()

    def _step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Sum and number of the losses of some microbatches; only the last stage knows them."""
        losses = run_schedule(
            self._schedule, self._settings, self._model, batches, forward_only=True
        )
        sums = torch.zeros(2, dtype=torch.float64)
        # Empty except on the rank of the last stage.
        for item, batch in zip(losses, batches, strict=bool(losses)):
            count = float(batch["loss_mask"].sum())
            sums += torch.tensor([item["loss"].item() * count, count], dtype=torch.float64)
        return sums
