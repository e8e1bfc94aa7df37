"""Process-wide state of Megatron's modules outside of the model: random states and logged losses.

- Random states: Megatron's modules draw from named states (`CudaRNGStatesTracker`). Some trackers
  store states by value. Others, Transformer Engine's and the one for CUDA graphs, store generators.
  A captured graph refers to its generators, so rrfp never replaces them.
- Logged losses: Megatron sums losses for its log by layer, over microbatches. Up to 0.17 each
  tracker is a dict with a vector of `values` by layer and the groups to reduce it in; the experts'
  tracker has one such dict per loss. From 0.18 on the experts' tracker is a `MoEMetricsTracker`,
  and from 0.19 on multi-token prediction has several vectors.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    is_graph_safe_cuda_rng_tracker,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:
    moe_logging = None


def named_states() -> dict[str, torch.Tensor]:
    """All named random states, by value, on the CPU."""
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


def set_named_states(states: dict[str, torch.Tensor]) -> None:
    """Set random states that `named_states` returned: in place if the tracker stores generators. An
    empty dict changes nothing."""
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    if any(isinstance(state, torch.Generator) for state in current.values()):
        for name, state in states.items():
            current[name].set_state(state)
    # `set_states` marks a tracker as initialized, even with an empty dict.
    elif states:
        tracker.set_states(states)


def shared_state_name() -> str:
    """The name of the random state that is equal on all tensor-parallel ranks."""
    return str(get_data_parallel_rng_tracker_name())


def tracker_of_generators() -> str | None:
    """The type name of Megatron's tracker of random states if recomputation restores its states by
    reference, as generators; None otherwise."""
    tracker = get_cuda_rng_tracker()
    return type(tracker).__name__ if is_graph_safe_cuda_rng_tracker(tracker) else None


def seed_states(seed: int) -> None:
    """Reset and seed all named random states, by Megatron's own function; except
    `data-parallel-rng`, they differ between tensor-parallel ranks."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


class LossTracker(Protocol):
    """A place where Megatron sums losses for its log."""

    def empty(self) -> Any:
        """A new tracker value without losses."""

    def exchange(self, losses: Any) -> Any:
        """Replace the tracker's losses and return the previous ones."""

    def add(self, losses: Any) -> None:
        """Add losses to the tracker's."""


class _DictTracker:
    """A tracker that is a dict in an attribute of `owner`."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def empty(self) -> dict[str, Any]:
        """An empty dict."""
        return {}

    def exchange(self, losses: dict[str, Any]) -> dict[str, Any]:
        """Replace the dict in the owner's attribute and return the previous one."""
        previous: dict[str, Any] = getattr(self._owner, self._name)
        setattr(self._owner, self._name, losses)
        return previous

    def add(self, losses: dict[str, Any]) -> None:
        """Add losses to the dict in the owner's attribute, in place."""
        _add_losses(getattr(self._owner, self._name), losses)


def _add_losses(total: dict[str, Any], losses: dict[str, Any]) -> None:
    """Add losses to a dict in place, also in nested dicts: tensors that both have are summed, other
    values are replaced."""
    for key, value in losses.items():
        if isinstance(value, dict):
            _add_losses(total.setdefault(key, {}), value)
        elif isinstance(value, torch.Tensor) and key in total:
            total[key] += value
        else:
            total[key] = value


class _MetricsTracker:
    """The `MoEMetricsTracker` of the process."""

    def empty(self) -> Any:
        """A new `MoEMetricsTracker`, without losses."""
        return moe_logging.MoEMetricsTracker()

    def exchange(self, losses: Any) -> Any:
        """Make `losses` the tracker of the process and return the previous one."""
        previous = moe_logging.get_moe_metrics_tracker()
        moe_logging.set_moe_metrics_tracker(losses)
        return previous

    def add(self, losses: Any) -> None:
        """Add another tracker's losses to the process's tracker: values of a metric that both have
        are summed in place."""
        total: MutableMapping[str, Any] = moe_logging.get_moe_metrics_tracker().metrics
        for name, entry in losses.metrics.items():
            if name in total:
                entry.values = total[name].values.add_(entry.values)
            total[name] = entry


TRACKERS: tuple[LossTracker, ...] = (
    _DictTracker(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER")
    if moe_logging is None
    else _MetricsTracker(),
    _DictTracker(MTPLossLoggingHelper, "tracker"),
    _DictTracker(DSAIndexerLossLoggingHelper, "tracker"),
)
"""The loss trackers of the installed Megatron-Core."""
