"""Megatron's own sums of the losses of experts, wherever the installed release keeps them."""

from typing import Any

import torch


def balance_losses() -> dict[str, tuple[torch.Tensor, Any]]:
    """By name: a vector by layer, and the group to reduce it in."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        found = get_moe_layer_wise_logging_tracker()
        return {name: (each["values"], each["reduce_group"]) for name, each in found.items()}
    metrics = get_moe_metrics_tracker().metrics
    return {name: (each.values, each.reduce_group) for name, each in metrics.items()}


def forget_balance_losses() -> None:
    """As before the first step."""
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()
