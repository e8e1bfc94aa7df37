"""One rank's part of a small GPT, run for a step by Megatron's schedule or by ours."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rrfp.megatron.settings import DispatchSettings
from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch, Batches
from rrfp.train.settings import TrainSettings
from tests.training import SMALL

MICROBATCHES = 4

TIMEOUT_S = 300.0
"""Many steps on several ranks, on a machine that may be busy."""


class Outcome(NamedTuple):
    """What a step came to on one rank."""

    losses: list[float]
    gradients_sha256: str


def backwards_in_reverse(path: Path, shape: Shape) -> str:
    """An order file that takes the microbatches from the last to the first."""
    microbatches = range(shape.num_microbatches - 1, -1, -1)

    def row(rank: int) -> list[str]:
        stages = shape.stages_of(rank)
        forwards = [f"{stage}F{microbatch}" for stage in stages for microbatch in microbatches]
        stages = stages[::-1]
        return forwards + [f"{stage}B{index}" for stage in stages for index in microbatches]

    rows = (",".join(row(rank)) for rank in range(shape.num_ranks))
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


class Rig:
    """One rank's chunks of a small GPT, their data, and their place."""

    def __init__(self, settings: dict[str, Any], layout: Any) -> None:
        from rrfp.train.data.open import open_data
        from rrfp.train.models.model import build_model

        chosen = TrainSettings(**settings)
        data = open_data(chosen)
        self.layout = layout
        self.batches = data.batches(layout.dp_rank)
        self.gpt = build_model(chosen, layout, data)

    def run(
        self,
        schedule: Callable[..., list[Any]],
        forward_step: Callable[..., Any] | None = None,
        *,
        num_microbatches: int = MICROBATCHES,
        data: Iterator[Any] | None = None,
        **arguments: Any,
    ) -> Outcome:
        """One step from empty gradients; the parameters stay as they are."""
        from rrfp.train.models.gpt import forward_step as mean_loss_step

        chunks = self.gpt.chunks
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reduced = schedule(
            forward_step_func=forward_step or mean_loss_step,
            data_iterator=[data or self.data(num_microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=SMALL["seq_length"],
            micro_batch_size=1,
            **arguments,
        )
        digest = hashlib.sha256()
        for chunk in chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.main_grad.numpy().tobytes())
        return Outcome([item["loss"].item() for item in reduced], digest.hexdigest())

    def gradients(self) -> dict[str, str]:
        """Digests of this rank's gradients by the parameters' names in the whole model."""
        found = {}
        for chunk in self.gpt.chunks:
            gpt = chunk.module
            numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
            for name, parameter in gpt.named_parameters():
                if name.startswith("decoder.layers."):
                    _, _, index, rest = name.split(".", 3)
                    name = f"layer {numbers[int(index)]} {rest}"
                found[name] = hashlib.sha256(parameter.main_grad.numpy().tobytes()).hexdigest()
        return found

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """Batches of which each masks a few more labels than the one before."""
        return masked(self.batches, num_microbatches)


def masked(batches: Batches, num_microbatches: int) -> Iterator[Batch]:
    for index in range(num_microbatches):
        batch = batches.batch(0, index)
        batch["loss_mask"][:, : 3 * (index % 8)] = 0
        yield batch


def on_rigs(work: Callable[..., Any], settings: dict[str, Any], *args: object) -> Any:
    """Run `work(layout, *args)` on this rank, in Megatron's groups."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    with parallel_groups(TrainSettings(**settings), timeout_s=120.0) as layout:
        return work(layout, settings, *args)


def native() -> Callable[..., list[Any]]:
    from megatron.core.pipeline_parallel import schedules

    function: Callable[..., list[Any]] = schedules.get_forward_backward_func()
    return function


def ours(**settings: Any) -> Any:
    from rrfp.megatron.dropin import get_forward_backward_func

    return get_forward_backward_func(settings=DispatchSettings(**settings))


def three_value_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = (losses * batch["loss_mask"]).sum()
        return total, batch["loss_mask"].sum().int(), {"loss": total.detach().clone()}

    return output, loss
