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

from rrfp.errors import UsageError
from rrfp.megatron.adapters.loss_trackers import TRACKERS


class TrackedLosses:
    """The losses for the log from one step's tasks on this rank."""

    def __init__(self) -> None:
        self._apart: list[tuple[int, list[Any]]] = []

    @contextmanager
    def task(self, microbatch: int) -> Iterator[None]:
        """Wrap this microbatch's forward, and its backward, which may recompute forwards."""
        totals = [tracker.exchange(tracker.empty()) for tracker in TRACKERS]
        try:
            yield
        finally:
            apart = [
                tracker.exchange(total) for tracker, total in zip(TRACKERS, totals, strict=True)
            ]
        self._apart.append((microbatch, apart))

    def finish(self) -> None:
        """Add the step's losses to Megatron's trackers, in microbatch order."""
        for _, apart in sorted(self._apart, key=lambda left: left[0]):
            for tracker, losses in zip(TRACKERS, apart, strict=True):
                tracker.add(losses)
        self._apart.clear()


def refuse_stateful(chunks: Iterable[torch.nn.Module], config: Any) -> None:
    """Raise UsageError, before the first task, for a model in which a microbatch's forward reads
    state from another's, because the result would depend on the order of tasks."""
    # A plain ModelParallelConfig has neither attribute.
    has_fp8 = bool(getattr(config, "fp8", None))
    recipe = getattr(config, "fp8_recipe", None) if has_fp8 else None
    if recipe in ("delayed", "custom"):
        raise UsageError(
            f"fp8_recipe {str.__str__(recipe)} cannot run readiness-first: it scales a "
            "microbatch by what earlier ones held; choose tensorwise, blockwise or mxfp8"
        )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if has_fp8 and getattr(config, name, False):
            raise UsageError(
                f"{name} cannot run readiness-first: under every recipe Transformer Engine scales "
                "the attention's scores by what earlier microbatches held; switch it off"
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
    "qb_beta_accum": (
        "the running averages of its quantile balancing",
        "choose aux_loss or seq_aux_loss",
    ),
    "router_replay": ("the routes that it records", "switch moe_enable_routing_replay off"),
}
"""By attribute of a module: what depends on the order of tasks, and what to do about it."""
