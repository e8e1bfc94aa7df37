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
    """All states by value, on the CPU."""
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


def set_named_states(states: dict[str, torch.Tensor]) -> None:
    """Set states that `named_states` gave."""
    tracker = get_cuda_rng_tracker()
    kept = tracker.get_states()
    if any(isinstance(state, torch.Generator) for state in kept.values()):
        for name, state in states.items():
            kept[name].set_state(state)
    # A tracker that is given states, even an empty dict, considers itself initialised.
    elif states:
        tracker.set_states(states)


def shared_state_name() -> str:
    """The name of the state that tensor-parallel ranks have in common."""
    return str(get_data_parallel_rng_tracker_name())


def tracker_of_generators() -> str | None:
    """The type of the tracker, if Megatron's recomputation brings its states back by reference;
    None otherwise."""
    tracker = get_cuda_rng_tracker()
    return type(tracker).__name__ if is_graph_safe_cuda_rng_tracker(tracker) else None


def seed_states(seed: int) -> None:
    """Reset all states to those of this seed, which differ between tensor-parallel ranks."""
    # Only whoever sets up the process groups needs it.
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


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
