"""Makes Megatron-Core run without Transformer Engine and Apex, on any device.

Its wrapper of torch's norms, which then stands in for theirs, refuses sequence parallelism: here it
returns torch's norm with its weights tagged for Megatron's gradient finalisation. And the router of
experts looks up Transformer Engine's matrix product by a name that does not exist without it.
"""

import importlib
from typing import Any

import torch


def prepare_without_transformer_engine() -> None:
    """Patch Megatron-Core. Further calls change nothing, nor does one where both are installed."""
    _core("transformer.torch_norm").WrappedTorchNorm.__new__ = _tagged_norm
    experts = _core("transformer.moe.moe_utils")
    experts.te_general_gemm = getattr(experts, "te_general_gemm", None)


def _tagged_norm(
    _cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: object
) -> torch.nn.Module:
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
    parameter: Any  # Megatron sets its tags as attributes that torch's type does not declare
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")
