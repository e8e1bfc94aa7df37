"""Builds the model of one rank: its chunks, their data parallelism and their optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rrfp.train.launch.process_groups import Layout
from rrfp.train.models.gpt import transformer_config
from rrfp.train.settings import ModelKind, TrainSettings

_CLIP_NORM = 1.0
_ADAM_BETA2 = 0.95


class Vocabulary(Protocol):
    """The vocabulary of the data, as a model needs it."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token of the data."""


@dataclass(frozen=True, slots=True)
class ModelChunks:
    """The model chunks of one rank and their optimizer."""

    chunks: list[Any]
    """The model chunks, each in Megatron's DistributedDataParallel."""
    config: Any
    """The TransformerConfig that Megatron's schedules read."""
    optimizer: Any
    device: torch.device
    """The device of the chunks and of their data."""
    forward_step: Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]
    """Runs a chunk on the iterator's next batch (Megatron's `forward_step_func`)."""


def build_model(settings: TrainSettings, layout: Layout, data: Vocabulary) -> ModelChunks:
    """Build this rank's chunks, for the vocabulary of `data` and with Megatron's data parallelism,
    and their Adam optimizer. Sets the functions that Megatron's schedules call in the shared
    configuration."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if settings.model.kind == ModelKind.VLM:
        from rrfp.train.models.vlm import build_chunk, forward_step
    else:
        from rrfp.train.models.gpt import build_chunk, forward_step

    config = transformer_config(settings)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.layout.distributed_optimizer
    )
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=build_chunk(settings, layout, config, chunk, data.vocab_size),
            # As in Megatron's training: the reduction of the other chunks overlaps with work.
            disable_bucketing=chunk > 0,
        )
        for chunk in range(settings.layout.chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.run.lr,
            adam_beta2=_ADAM_BETA2,
            clip_grad=_CLIP_NORM,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.layout.distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    no_sync_funcs = [chunk.no_sync for chunk in chunks]
    # As in Megatron's training: only its interleaved schedule takes a list.
    config.no_sync_func = no_sync_funcs if len(chunks) > 1 else no_sync_funcs[0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return ModelChunks(chunks, config, optimizer, layout.device, forward_step)
