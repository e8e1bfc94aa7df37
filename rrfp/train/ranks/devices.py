"""The device of a rank, taken before it joins any group, and Megatron-Core prepared for it."""

import os
from typing import Any

import torch

from rrfp.megatron.cpu.patches import prepare_cpu
from rrfp.megatron.over_gloo import reduce_losses_among_several, reduce_one_by_one
from rrfp.megatron.without_transformer_engine import prepare_without_transformer_engine
from rrfp.train.device_checks import index_of_gpu
from rrfp.train.setting_groups import DeviceKind, RunSettings

_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
"""Read by CUDA's libraries as they start: the same sums in every run. A user's own values stay."""


def take_device(run: RunSettings) -> torch.device:
    """Prepare this process, whose LOCAL_RANK is in the environment, for the device on which its
    tensors are to lie. Must come before any other use of Megatron-Core and of CUDA."""
    if run.device is DeviceKind.CPU:
        prepare_cpu()
        return torch.device("cpu")
    for name, value in _DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    prepare_without_transformer_engine()
    if run.share_gpu:
        reduce_losses_among_several()
        reduce_one_by_one()
    # Where a sum has no fixed order on a GPU, a slower one that has takes its place. Some have
    # none, and of these Megatron takes sums of whole numbers, which need no order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic  # declares no names
    deterministic.fill_uninitialized_memory = False
    index = index_of_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_of(run: RunSettings) -> str:
    """The backend of torch's groups. Few numbers travel from the CPU, so there is gloo for them on
    every device. NCCL takes no two ranks on one GPU; then gloo carries a GPU's tensors, too."""
    has_nccl = run.device is DeviceKind.CUDA and not run.share_gpu
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
