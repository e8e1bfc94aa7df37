"""Layers for `pretrain_hybrid.py --spec hybrid_layers stack_spec`: Megatron's own attention and MLP
without Transformer Engine, which its own specification asks for."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

# A stack's last norm is Transformer Engine's, whatever its layers are made of.
hybrid_block.TENorm = WrappedTorchNorm

_whole = get_gpt_layer_local_spec().submodules

stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_whole.input_layernorm,
                self_attention=_whole.self_attention,
                self_attn_bda=_whole.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_whole.pre_mlp_layernorm,
                mlp=_whole.mlp,
                mlp_bda=_whole.mlp_bda,
            ),
        ),
    ),
)
