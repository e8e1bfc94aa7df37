"""Lets Megatron's interleaved schedule run over gloo, which ours needs nothing for.

It relies on NCCL twice: that a tensor may be freed as soon as a send is enqueued, and that each
group has an order of its own, so that two ranks which are both neighbours of each other tell their
two directions apart.
"""

import importlib
from typing import Any

import torch
import torch.distributed as dist

_FORWARDS, _BACKWARDS = 1, 2


def prepare() -> None:
    """Keep outputs, and tag messages by direction; the arithmetic stays Megatron's."""
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    schedules.deallocate_output_tensor = lambda *_args, **_kwargs: None
    # Megatron's own asserts that the output was freed.
    schedules.custom_backward = lambda output, gradient: torch.autograd.backward(output, gradient)
    p2p._p2p_ops = _p2p_ops


def _p2p_ops(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    requests = {}
    if tensor_send_next is not None:
        requests["send_next"] = dist.isend(
            tensor_send_next, next_pipeline_rank, group, tag=_FORWARDS
        )
    if tensor_recv_prev is not None:
        requests["recv_prev"] = dist.irecv(
            tensor_recv_prev, prev_pipeline_rank, group, tag=_FORWARDS
        )
    if tensor_send_prev is not None:
        requests["send_prev"] = dist.isend(
            tensor_send_prev, prev_pipeline_rank, group, tag=_BACKWARDS
        )
    if tensor_recv_next is not None:
        requests["recv_next"] = dist.irecv(
            tensor_recv_next, next_pipeline_rank, group, tag=_BACKWARDS
        )
    return requests
