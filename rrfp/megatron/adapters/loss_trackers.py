"""Where Megatron sums a step's losses for its log: by layer, over microbatches.

Up to 0.17 each place is a dict that holds a vector of `values` by layer and the groups to reduce it
in; that of the experts holds one such dict per loss. From 0.18 on the experts' is a
`MoEMetricsTracker`, and from 0.19 on multi-token prediction has several vectors.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:
    moe_logging = None


class LossTracker(Protocol):
    """One of these places."""

    def empty(self) -> Any:
        """What can stand there and holds no losses."""

    def exchange(self, losses: Any) -> Any:
        """Put losses there; returns those that were there."""

    def add(self, losses: Any) -> None:
        """Add losses to those that are there."""


class _Dict:
    """A dict that is an attribute."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def empty(self) -> dict[str, Any]:
        return {}

    def exchange(self, losses: dict[str, Any]) -> dict[str, Any]:
        there: dict[str, Any] = getattr(self._owner, self._name)
        setattr(self._owner, self._name, losses)
        return there

    def add(self, losses: dict[str, Any]) -> None:
        _add(getattr(self._owner, self._name), losses)


def _add(total: dict[str, Any], losses: dict[str, Any]) -> None:
    for key, value in losses.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), value)
        elif isinstance(value, torch.Tensor) and key in total:
            total[key] += value
        else:
            total[key] = value


class _Metrics:
    """The `MoEMetricsTracker` of the process."""

    def empty(self) -> Any:
        return moe_logging.MoEMetricsTracker()

    def exchange(self, losses: Any) -> Any:
        there = moe_logging.get_moe_metrics_tracker()
        moe_logging.set_moe_metrics_tracker(losses)
        return there

    def add(self, losses: Any) -> None:
        total: MutableMapping[str, Any] = moe_logging.get_moe_metrics_tracker().metrics
        for name, entry in losses.metrics.items():
            if name in total:
                entry.values = total[name].values.add_(entry.values)
            total[name] = entry


TRACKERS: tuple[LossTracker, ...] = (
    _Dict(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER") if moe_logging is None else _Metrics(),
    _Dict(MTPLossLoggingHelper, "tracker"),
    _Dict(DSAIndexerLossLoggingHelper, "tracker"),
)
"""All of them in the installed Megatron-Core."""
