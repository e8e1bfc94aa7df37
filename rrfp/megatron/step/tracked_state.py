"""What a model's forward leaves behind besides its output, and what becomes of it out of order.

- Losses for the log (of experts' balance, of multi-token prediction, of sparse attention) are added
  up over the microbatches by Megatron: here in microbatch order, the same to the bit.
- The tokens that a router counts for its experts' biases are whole numbers, whose sum is exact
  in any order (up to 2**24 of them), and the largest attention logit is a maximum.
- What a later microbatch reads from an earlier one is refused.
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
"""Where Megatron adds losses up: dicts with a vector of `values` by layer, and the process groups
to reduce it in. The first holds one such dict a loss, by name."""


class TrackedLosses:
    """The losses that one step's tasks on this rank leave for the log."""

    def __init__(self) -> None:
        self._apart: list[tuple[int, list[dict[str, Any]]]] = []

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Run this microbatch's forward inside, and its backward, which may run forwards again."""
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
        """Add what the step's tasks left to Megatron's trackers, in microbatch order."""
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
    """Raise UsageError, before the first task, for a model in which one microbatch's forward reads
    what another's has left: its result would follow the order of the tasks."""
    # A plain ModelParallelConfig has neither.
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
"""What a module that carries such an attribute cannot do, and the way out."""
