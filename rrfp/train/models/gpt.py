"""A stage of a GPT, perhaps with experts or without attention: Megatron-Core's `GPTModel` and its
forward step."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rrfp.train.data.batches import Batch
from rrfp.train.launch.process_groups import Layout, virtual_pipeline_size
from rrfp.train.models.parameters import finish_chunk
from rrfp.train.settings import ModelKind, TrainSettings

_VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this for every tensor-parallel size. Padded tokens have
logits, so padding that depended on the layout would change the loss."""


def build_chunk(
    settings: TrainSettings, layout: Layout, config: Any, chunk: int, num_tokens: int
) -> Any:
    """One chunk of a rank, for a vocabulary of `num_tokens`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage = layout.stages[chunk]
    layer_spec = get_gpt_layer_local_spec(settings.model.num_experts)
    if settings.model.kind == ModelKind.MLP:
        _leave_attention_out(layer_spec)
    gpt = gpt_stage(
        settings,
        config,
        layer_spec,
        num_layers=settings.split[stage],
        num_tokens=num_tokens,
        is_first=stage == 0,
        is_last=stage == layout.num_stages - 1,
        vp_stage=None if virtual_pipeline_size(settings) is None else chunk,
    )
    num_before = sum(settings.split[:stage])
    return finish_chunk(gpt, gpt.decoder.layers, settings, layout, num_before)


def _leave_attention_out(layer_spec: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    layer_spec.submodules.input_layernorm = IdentityOp
    layer_spec.submodules.self_attention = IdentityOp
    layer_spec.submodules.self_attn_bda = IdentityFuncOp


def gpt_stage(
    settings: TrainSettings,
    config: Any,
    layer_spec: Any,
    *,
    num_layers: int,
    num_tokens: int,
    is_first: bool,
    is_last: bool,
    vp_stage: int | None,
) -> Any:
    """A GPTModel of `num_layers`, with the embedding if `is_first`, and the head if `is_last`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
    )

    multiple = math.lcm(_VOCAB_MULTIPLE, settings.layout.tp)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec] * num_layers, layer_norm=LayerNormImpl
        ),
        vocab_size=-(-num_tokens // multiple) * multiple,
        max_sequence_length=settings.data.seq_length,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="none" if settings.model.kind == ModelKind.MLP else "rope",
        share_embeddings_and_output_weights=settings.model.tie_embeddings,
        vp_stage=vp_stage,
    )


def forward_step(
    data_iterator: Iterator[Batch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run a chunk on the iterator's next microbatch (Megatron's `forward_step_func`)."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"])


def mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the labels that count, for the backward and for reporting."""
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    # A copy: Megatron divides the loss in place by the number of microbatches.
    return loss, {"loss": loss.detach().clone()}
