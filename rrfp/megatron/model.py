"""The chunks of a GPT that one rank holds: Megatron-Core's `GPTModel`, its data parallelism, its
optimizer.

Parameters are initialised by layer and not by rank: each is drawn whole from a generator of its
own, seeded by the run's seed and the parameter's name in the whole model, and then cut to this
rank's slice. Every layout whose `tp` divides `_VOCAB_MULTIPLE` starts from the same function.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from rrfp.megatron.parallel import Layout, virtual_pipeline_size
from rrfp.megatron.settings import NUM_EXPERTS_A_TOKEN, Dtype, Recompute, TrainSettings

_VOCAB_MULTIPLE = 64
"""The vocabulary is padded to this, whatever the tensor-parallel size: a padded token has a
logit, so padding that followed the layout would change the loss with it."""

_LOCAL_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_LOCAL_EXPERT = re.compile(r"(?<=local_experts\.)\d+")

_OUTPUT_WEIGHT = "output_layer.weight"
_EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"

_SCALED_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
"""Weights that write to the residual stream: Megatron shrinks them by the number of layers."""

_CLIP_NORM = 1.0
_ADAM_BETA2 = 0.95


_AUX_LOSS_COEFFICIENT = 1e-2
"""How much the balance of the experts counts."""


@dataclass(frozen=True, slots=True)
class GptChunks:
    """What one rank trains."""

    chunks: list[Any]
    """The model chunks, each in Megatron's DistributedDataParallel."""
    config: Any
    """The TransformerConfig that Megatron's schedules read."""
    optimizer: Any


def build_gpt(settings: TrainSettings, layout: Layout, num_tokens: int) -> GptChunks:
    """Build this rank's chunks for a vocabulary of `num_tokens`, with their optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _transformer_config(settings)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.distributed_optimizer
    )
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=_build_chunk(settings, layout, config, chunk, num_tokens),
            # As in Megatron's training: the reduction of other chunks overlaps with work anyway.
            disable_bucketing=chunk > 0,
        )
        for chunk in range(settings.chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            adam_beta2=_ADAM_BETA2,
            clip_grad=_CLIP_NORM,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    no_sync_funcs = [chunk.no_sync for chunk in chunks]
    # As in Megatron's training: its interleaved schedule alone takes a list.
    config.no_sync_func = no_sync_funcs if len(chunks) > 1 else no_sync_funcs[0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return GptChunks(chunks, config, optimizer)


def _transformer_config(settings: TrainSettings) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if settings.dtype == Dtype.BF16 else torch.float32
    recomputes_layers = settings.recompute == Recompute.FULL
    has_experts = settings.experts is not None
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(settings),
        context_parallel_size=settings.cp,
        expert_model_parallel_size=settings.ep,
        sequence_parallel=settings.sequence_parallel,
        bf16=settings.dtype == Dtype.BF16,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        hidden_dropout=settings.dropout,
        attention_dropout=settings.dropout,
        recompute_granularity=None if settings.recompute == Recompute.NONE else settings.recompute,
        recompute_method="uniform" if recomputes_layers else None,
        recompute_num_layers=1 if recomputes_layers else None,
        num_moe_experts=settings.experts,
        moe_ffn_hidden_size=4 * settings.hidden if has_experts else None,
        moe_router_topk=NUM_EXPERTS_A_TOKEN,
        moe_aux_loss_coeff=_AUX_LOSS_COEFFICIENT,
        # Megatron cuts experts among tensor-parallel ranks only when they have no biases.
        add_bias_linear=not has_experts,
        variable_seq_lengths=settings.variable_lengths,
        # Megatron asks for this dispatcher with variable lengths, in dense models too.
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        # The fused kernels are CUDA's, or torch.compile's, which wants a C++ compiler at run time.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )


def _build_chunk(
    settings: TrainSettings, layout: Layout, config: Any, chunk: int, num_tokens: int
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
    )

    stage = layout.stages[chunk]
    num_layers = settings.layers // layout.num_stages
    multiple = math.lcm(_VOCAB_MULTIPLE, settings.tp)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[get_gpt_layer_local_spec(settings.experts)] * num_layers,
            layer_norm=LayerNormImpl,
        ),
        vocab_size=-(-num_tokens // multiple) * multiple,
        max_sequence_length=settings.seq_length,
        pre_process=stage == 0,
        post_process=stage == layout.num_stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=settings.tie_embeddings,
        vp_stage=None if virtual_pipeline_size(settings) is None else chunk,
    )
    _number_layers(gpt, stage * num_layers)
    _initialise(gpt, settings, layout)
    # What Megatron's Float16Module does; that would also cast the outputs of the last *rank*, which
    # in a V has no last stage. The loss is in fp32 without it.
    return gpt.bfloat16() if config.bf16 else gpt


def _number_layers(gpt: Any, num_before: int) -> None:
    """Number the layers on from those of the stages before: Megatron knows no V to count by."""
    shift = num_before + 1 - gpt.decoder.layers[0].layer_number
    for module in gpt.decoder.modules():
        if getattr(module, "layer_number", None) is not None:
            module.layer_number += shift


def _initialise(gpt: Any, settings: TrainSettings, layout: Layout) -> None:
    config = gpt.config
    std = config.init_method_std
    scaled_std = std / math.sqrt(2.0 * config.num_layers)
    for name, parameter in gpt.named_parameters():
        if parameter.dim() < 2:
            continue  # Biases and norms start as constants.
        shape = list(parameter.shape)
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            assert parameter.partition_stride == 1
            shape[parameter.partition_dim] *= layout.tp
        whole = torch.empty(shape)
        whole_name = _whole_name(name, gpt, settings, layout)
        generator = torch.Generator().manual_seed(_seed_of(settings.seed, whole_name))
        whole.normal_(
            0.0, scaled_std if name.endswith(_SCALED_WEIGHTS) else std, generator=generator
        )
        if is_cut:
            whole = whole.chunk(layout.tp, parameter.partition_dim)[layout.tp_rank]
        with torch.no_grad():
            parameter.copy_(whole)


def _whole_name(name: str, gpt: Any, settings: TrainSettings, layout: Layout) -> str:
    """A parameter's name in the model that is on one rank."""
    if settings.tie_embeddings and name == _OUTPUT_WEIGHT:
        return _EMBEDDING_WEIGHT
    layers = gpt.decoder.layers
    name = _LOCAL_LAYER.sub(lambda match: str(layers[int(match[0])].layer_number - 1), name)
    first_expert = layout.ep_rank * ((settings.experts or 0) // layout.ep)
    return _LOCAL_EXPERT.sub(lambda match: str(first_expert + int(match[0])), name)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
