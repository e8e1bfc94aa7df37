"""State that a model's forward leaves behind besides its output, when tasks run out of order.

- Losses for the log (experts' balance, multi-token prediction, sparse attention), which Megatron
  sums over microbatches, are summed in microbatch order here, the same to the bit.
- The token counts of a router for its experts' biases are whole numbers, whose sum is exact in any
  order (up to 2**24), and the largest attention logit is a maximum. Neither needs anything.
- Models in which a later microbatch reads state of an earlier one are refused.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from rrfp.errors import UsageError

_TRACKERS: tuple[tuple[Any, str], ...] = (
    (moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    (MTPLossLoggingHelper, "tracker"),
    (DSAIndexerLossLoggingHelper, "tracker"),
)
"""Where Megatron sums losses: dicts with a vector of `values` by layer, and the process groups to
reduce it in. The first holds one such dict per loss, by name."""


class TrackedLosses:
    """The losses for the log from one step's tasks on this rank."""

    def __init__(self) -> None:
        self._apart: list[tuple[int, list[dict[str, Any]]]] = []

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Wrap this microbatch's forward, and its backward, which may recompute forwards."""
        totals = [getattr(owner, name) for owner, name in _TRACKERS]
        apart: list[dict[str, Any]] = [{} for _ in _TRACKERS]
        _install(apart)
        try:
            yield
        finally:
            _install(totals)
        if any(apart):
            self._apart.append((microbatch, apart))

    def finish(self) -> None:
        """Add the step's losses to Megatron's trackers, in microbatch order."""
        for _, apart in sorted(self._apart, key=lambda left: left[0]):
            for (owner, name), tracker in zip(_TRACKERS, apart, strict=True):
                _add(getattr(owner, name), tracker)
        self._apart.clear()


def _install(trackers: list[dict[str, Any]]) -> None:
    for (owner, name), tracker in zip(_TRACKERS, trackers, strict=True):
        setattr(owner, name, tracker)


def _add(total: dict[str, Any], apart: dict[str, Any]) -> None:
    for key, value in apart.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), value)
        elif key == "values" and key in total:
            total[key] += value
        else:
            total[key] = value


def refuse_stateful(chunks: Iterable[torch.nn.Module], config: Any) -> None:
    """Raise UsageError, before the first task, for a model in which a microbatch's forward reads
    state from another's, because the result would depend on the order of tasks."""
    # A plain ModelParallelConfig has neither attribute.
    recipe = getattr(config, "fp8_recipe", None) if getattr(config, "fp8", None) else None
    if recipe in ("delayed", "custom"):
        raise UsageError(
            f"fp8_recipe {str.__str__(recipe)} cannot run readiness-first: it scales a "
            "microbatch by what earlier ones held; choose tensorwise, blockwise or mxfp8"
        )
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for attribute, (what, next_step) in _STATEFUL.items():
                if module.training and getattr(module, attribute, None) is not None:
                    raise UsageError(
                        f"{name} cannot run readiness-first: {what} follow the order of the "
                        f"microbatches; {next_step}"
                    )


_STATEFUL = {
    "running_mean": ("its running statistics", "switch track_running_stats off"),
    "global_tokens_per_expert": (
        "the running counts of its global_aux_loss",
        "choose aux_loss or seq_aux_loss",
    ),
    "router_replay": ("the routes that it records", "switch moe_enable_routing_replay off"),
}
"""By attribute of a module: what depends on the order of tasks, and what to do about it."""
