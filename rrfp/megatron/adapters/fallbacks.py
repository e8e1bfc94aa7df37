"""Makes Megatron-Core's collectives go over gloo, on the CPU and on GPUs that ranks share.

- The loss is reduced over the tensor-parallel group three times per microbatch, even in a group of
  one rank. NCCL takes a launch for that; gloo wakes up a thread, and on a GPU waits for it.
- Data parallelism unites the collectives of its buckets, which gloo does not take of a GPU.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

# Makes Megatron-Core run without Transformer Engine and Apex, on any device.
#
# Its wrapper of torch's norms, which then stands in for theirs, refuses sequence parallelism: here
# it returns torch's norm with its weights tagged for Megatron's gradient finalisation. And the
# router of experts looks up Transformer Engine's matrix product by a name that does not exist
# without it.


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


def reduce_losses_among_several() -> None:
    """Leave the reduction of losses out in groups of one rank."""
    distributed = ModuleType("torch.distributed", torch.distributed.__doc__)
    vars(distributed).update(vars(torch.distributed))

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        if group.size() > 1:
            torch.distributed.all_reduce(tensor, op=op, group=group)

    vars(distributed)["all_reduce"] = all_reduce
    loss_torch = ModuleType("torch", torch.__doc__)
    vars(loss_torch).update(vars(torch))
    vars(loss_torch)["distributed"] = distributed
    _core("tensor_parallel.cross_entropy").torch = loss_torch


def reduce_one_by_one() -> None:
    """Let data parallelism without overlap call a collective for each of its buckets."""
    _core("distributed.param_and_grad_buffer")._coalescing_manager = _one_by_one


@contextmanager
def _one_by_one(*_: object, **__: object) -> Iterator[None]:
    """In the place of the manager that unites them; without overlap nobody asks it for more."""
    yield
