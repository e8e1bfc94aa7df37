"""Megatron's TransformerConfig for a run's settings."""

from typing import Any

from rrfp.train.ranks.parallel import virtual_pipeline_size
from rrfp.train.setting_groups import NUM_EXPERTS_PER_TOKEN, DeviceKind, Dtype, ModelKind, Recompute
from rrfp.train.settings import TrainSettings

_AUX_LOSS_COEFFICIENT = 1e-2
"""The weight of the experts' load-balancing loss."""


def transformer_config(settings: TrainSettings) -> Any:
    """The configuration of all layers, and of Megatron's schedules."""
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
        # Megatron demands this token dispatcher for variable lengths, in dense models too.
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        # Fused kernels need CUDA, or torch.compile, which needs a C++ compiler at run time.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        # Sums in a fixed order, where a GPU has a quicker one.
        deterministic_mode=settings.run.device == DeviceKind.CUDA,
        # What a graph would capture: Megatron warns of its own default. The name is of 0.18.
        **{"cuda_graph_modules" if hasattr(enums, "CudaGraphModule") else "cuda_graph_scope": []},
    )
