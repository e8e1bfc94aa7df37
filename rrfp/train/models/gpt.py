"""A GPT stage, with or without experts or attention: its parameters, Megatron-Core's `GPTModel` and
its forward step.

Initial values depend on the layer, not on the rank. Each parameter is drawn whole from its own
generator, seeded by the run's seed and the parameter's name in the whole model, then cut to this
rank's slice. All layouts whose `tp` divides 64, to which the vocabulary is padded, start from the
same function.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rrfp.train.data.batches import Batch
from rrfp.train.launch.process_groups import Layout, virtual_pipeline_size
from rrfp.train.settings import (
    NUM_EXPERTS_PER_TOKEN,
    DeviceKind,
    Dtype,
    ModelKind,
    Recompute,
    TrainSettings,
)

_AUX_LOSS_COEFFICIENT = 1e-2
"""The weight of the experts' load-balancing loss."""


def transformer_config(settings: TrainSettings) -> Any:
    """Make Megatron's TransformerConfig for all layers and for its schedules. Fused kernels are
    off, and on a GPU it is deterministic."""
    import torch
    from megatron.core.transformer import TransformerConfig, enums

    dtype = torch.bfloat16 if settings.model.dtype == Dtype.BF16 else torch.float32
    recomputes_layers = settings.model.recompute == Recompute.FULL
    has_experts = settings.model.num_experts is not None
    return TransformerConfig(
        num_layers=settings.model.layers,
        hidden_size=settings.model.hidden,
        num_attention_heads=settings.model.heads,
        tensor_model_parallel_size=settings.layout.tp,
        pipeline_model_parallel_size=settings.layout.pp,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(settings),
        context_parallel_size=settings.layout.cp,
        expert_model_parallel_size=settings.layout.ep,
        sequence_parallel=settings.layout.sequence_parallel,
        bf16=settings.model.dtype == Dtype.BF16,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        hidden_dropout=settings.model.dropout,
        attention_dropout=settings.model.dropout,
        recompute_granularity=None
        if settings.model.recompute == Recompute.NONE
        else settings.model.recompute,
        recompute_method="uniform" if recomputes_layers else None,
        recompute_num_layers=1 if recomputes_layers else None,
        num_moe_experts=settings.model.num_experts,
        moe_ffn_hidden_size=4 * settings.model.hidden if has_experts else None,
        moe_router_topk=NUM_EXPERTS_PER_TOKEN,
        moe_aux_loss_coeff=_AUX_LOSS_COEFFICIENT,
        # Megatron divides experts among tensor-parallel ranks only if they have no biases.
        add_bias_linear=not has_experts,
        variable_seq_lengths=settings.data.variable_lengths or settings.model.kind == ModelKind.VLM,
        # Megatron requires this token dispatcher for variable lengths, in dense models too.
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        # Fused kernels need CUDA, or torch.compile, which needs a C++ compiler at run time.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        # Fixes the order of sums on a GPU.
        deterministic_mode=settings.run.device == DeviceKind.CUDA,
        # Empty, because Megatron warns of its own default. 0.18 has renamed it.
        **{"cuda_graph_modules" if hasattr(enums, "CudaGraphModule") else "cuda_graph_scope": []},
    )


_LOCAL_LAYER = re.compile(r"(?<=coder\.layers\.)\d+")
"""The index of a layer of a decoder or an image encoder."""
_LOCAL_EXPERT = re.compile(r"(?<=local_experts\.)\d+")

_OUTPUT_WEIGHT = "output_layer.weight"
_EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"

_SCALED_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
"""Weights that write to the residual stream; Megatron scales them down by the number of layers."""


def finish_chunk(
    chunk: Any, layers: Any, settings: TrainSettings, layout: Layout, num_before: int
) -> Any:
    """Number the `layers` of a chunk, after `num_before` layers of earlier stages, and initialize
    its weight matrices, in place. Return the chunk on the rank's device, in bf16 if the run asks
    for it."""
    _number_layers(layers, num_before)
    _initialize(chunk, settings, layout)
    # Megatron creates its own layers on the GPU, and torch's norms on the CPU.
    chunk = chunk.to(layout.device)
    # Unlike Megatron's Float16Module, which also casts the outputs of the last *rank*: in a V that
    # is not the last stage. The loss is in fp32 without it.
    return chunk.bfloat16() if chunk.config.bf16 else chunk


def _number_layers(layers: Any, num_before: int) -> None:
    """Shift the layer numbers of a chunk so that they continue those of earlier stages; Megatron
    cannot number them in a V. Do nothing without layers."""
    if not len(layers):
        return
    shift = num_before + 1 - layers[0].layer_number
    for module in layers.modules():
        if getattr(module, "layer_number", None) is not None:
            module.layer_number += shift


def _initialize(chunk: Any, settings: TrainSettings, layout: Layout) -> None:
    """Draw the initial values of all weight matrices in place, whole and with a seed of each one's
    own name, then cut to this rank's slice. Biases and norms stay as they are."""
    config = chunk.config
    std = config.init_method_std
    scaled_std = std / math.sqrt(2.0 * config.num_layers)
    for name, parameter in chunk.named_parameters():
        if parameter.dim() < 2:
            continue  # biases and norms start as constants
        shape = list(parameter.shape)
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            assert parameter.partition_stride == 1
            shape[parameter.partition_dim] *= layout.tp
        whole = torch.empty(shape)
        seed = _seed_of(settings.run.seed, whole_name(name, chunk, settings, layout))
        generator = torch.Generator().manual_seed(seed)
        whole.normal_(
            0.0, scaled_std if name.endswith(_SCALED_WEIGHTS) else std, generator=generator
        )
        if is_cut:
            whole = whole.chunk(layout.tp, parameter.partition_dim)[layout.tp_rank]
        with torch.no_grad():
            parameter.copy_(whole)


def whole_name(name: str, chunk: Any, settings: TrainSettings, layout: Layout) -> str:
    """Return the name of a chunk's parameter in the whole model: layers and experts have the
    model's numbers, and the output layer's copy of a tied embedding has the embedding's name."""
    if is_second_copy(name, settings):
        return _EMBEDDING_WEIGHT

    def whole_layer(match: re.Match[str]) -> str:
        return str(chunk.get_submodule(name[: match.end()]).layer_number - 1)

    first_expert = layout.ep_rank * ((settings.model.num_experts or 0) // layout.ep)
    return _LOCAL_EXPERT.sub(
        lambda match: str(first_expert + int(match[0])), _LOCAL_LAYER.sub(whole_layer, name)
    )


def is_second_copy(name: str, settings: TrainSettings) -> bool:
    """True if a chunk's parameter is the output layer's copy of a tied embedding's weight."""
    return settings.model.tie_embeddings and name == _OUTPUT_WEIGHT


def _seed_of(seed: int, name: str) -> int:
    """Derive the seed of a parameter from the run's seed and its name in the whole model."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


_VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this under every layout. Padded tokens have logits, so
padding that depended on the layout would change the loss."""


def build_chunk(
    settings: TrainSettings, layout: Layout, config: Any, chunk: int, num_tokens: int
) -> Any:
    """Build and initialize one chunk of a rank's GPT, for a vocabulary of `num_tokens`. Its layers
    have no attention for --model mlp."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage = layout.stages[chunk]
    layer_spec = get_gpt_layer_local_spec(settings.model.num_experts)
    if settings.model.kind == ModelKind.MLP:
        _remove_attention(layer_spec)
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


def _remove_attention(layer_spec: Any) -> None:
    """Replace attention and the norm before it in a layer spec, in place, by operations that pass
    on their input."""
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
    """Build an uninitialized GPTModel of `num_layers`, with the embedding if `is_first` and the
    head if `is_last`. Its vocabulary is padded to a multiple of 64, and of --tp."""
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
    """Run a chunk on the iterator's next microbatch, as Megatron's `forward_step_func`: return the
    output and the function that makes the loss of it."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"])


def mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss over the labels with mask 1, for the backward, and a detached copy for
    reporting."""
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    # A copy: Megatron divides the loss in place by the number of microbatches.
    return loss, {"loss": loss.detach().clone()}
