"""One pipeline stage of a GPT: Megatron-Core's `GPTModel`, its data parallelism, its optimizer.

Parameters are initialised by layer and not by rank: each is drawn whole from a generator of its
own, seeded by the run's seed and the parameter's name in the whole model, and then cut to this
rank's slice. Every layout therefore starts from the same function.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from rrfp.megatron.parallel import Layout
from rrfp.megatron.settings import TrainSettings

_VOCAB_MULTIPLE = 64
"""The vocabulary is padded to this, whatever the tensor-parallel size: a padded token has a
logit, so padding that followed the layout would change the loss with it."""

_LOCAL_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")

_SCALED_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
"""Weights that write to the residual stream: Megatron shrinks them by the number of layers."""

_CLIP_NORM = 1.0
_ADAM_BETA2 = 0.95


@dataclass(frozen=True, slots=True)
class GptStage:
    """What one rank trains."""

    module: Any
    """The stage in Megatron's DistributedDataParallel."""
    config: Any
    """The TransformerConfig that Megatron's schedules read."""
    optimizer: Any


def build_gpt(settings: TrainSettings, layout: Layout, num_tokens: int) -> GptStage:
    """Build this rank's stage for a vocabulary of `num_tokens`, with its optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _transformer_config(settings)
    multiple = math.lcm(_VOCAB_MULTIPLE, settings.tp)
    vocab_size = -(-num_tokens // multiple) * multiple
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=vocab_size,
        max_sequence_length=settings.seq_length,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    _initialise(gpt, settings.seed, layout)
    module = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=gpt,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=settings.lr, adam_beta2=_ADAM_BETA2, clip_grad=_CLIP_NORM
        ),
        [module],
        use_gloo_process_groups=False,
    )
    config.no_sync_func = module.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return GptStage(module, config, optimizer)


def _transformer_config(settings: TrainSettings) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
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


def _initialise(gpt: Any, seed: int, layout: Layout) -> None:
    config = gpt.config
    std = config.init_method_std
    scaled_std = std / math.sqrt(2.0 * config.num_layers)
    numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    for name, parameter in gpt.named_parameters():
        if parameter.dim() < 2:
            continue  # Biases and norms start as constants.
        whole_name = _LOCAL_LAYER.sub(lambda match: str(numbers[int(match[0])]), name)
        shape = list(parameter.shape)
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            assert parameter.partition_stride == 1
            shape[parameter.partition_dim] *= layout.tp
        whole = torch.empty(shape, dtype=parameter.dtype)
        generator = torch.Generator().manual_seed(_seed_of(seed, whole_name))
        whole.normal_(
            0.0, scaled_std if name.endswith(_SCALED_WEIGHTS) else std, generator=generator
        )
        if is_cut:
            whole = whole.chunk(layout.tp, parameter.partition_dim)[layout.tp_rank]
        with torch.no_grad():
            parameter.copy_(whole)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
