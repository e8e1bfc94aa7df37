"""Losses for the log are the same to the bit in any order, and what is stateful is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.balance_losses import balance_losses, forget_balance_losses
from tests.one_chunk import MICROBATCHES, TIMEOUT_S, Chunk, in_groups, some_order
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

ORDERS = [
    [(kind, microbatch) for kind in "FB" for microbatch in reversed(range(MICROBATCHES))],
    *(some_order(seed, "FB") for seed in range(3)),
]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_losses_of_experts(recompute: str) -> None:
    settings = {"experts": 4, "recompute": recompute}
    run_ranks(1, in_groups, settings, compare_balance_losses, settings, timeout_s=TIMEOUT_S)


def compare_balance_losses(layout: Any, settings: dict[str, Any]) -> None:
    from rrfp.megatron.step.stage import TrackedLosses

    chunk = Chunk(layout, settings)

    def losses() -> torch.Tensor:
        (name,) = balance_losses()
        assert name == "load_balancing_loss"
        values, reduce_group = balance_losses()[name]
        assert reduce_group is not None
        return values.clone()

    chunk.gradients_in_order()
    expected = losses()
    assert bool((expected > 0).all())

    for order in ORDERS:
        for values, _ in balance_losses().values():
            values.zero_()
        tracked = TrackedLosses()
        for kind, microbatch in order:
            with tracked.task(microbatch):
                (chunk.forward if kind == "F" else chunk.backward)(microbatch)
        assert not losses().any()
        tracked.finish()
        assert torch.equal(losses(), expected)
        tracked.finish()
        assert torch.equal(losses(), expected)

    # On the first step of all, Megatron's tracker is not there yet.
    forget_balance_losses()
    tracked = TrackedLosses()
    for kind, microbatch in ORDERS[0]:
        with tracked.task(microbatch):
            (chunk.forward if kind == "F" else chunk.backward)(microbatch)
    tracked.finish()
    assert torch.equal(losses(), expected)


def test_other_losses_for_the_log() -> None:
    run_ranks(1, in_groups, {}, compare_other_losses, timeout_s=TIMEOUT_S)


def compare_other_losses(_layout: Any) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from rrfp.megatron.step.stage import TrackedLosses

    # Megatron asks for it where it makes a tracker.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    # A sum in another order would give 0.0 or 2.0.
    losses = torch.tensor([1e8, 1.0, -1e8, 1.0])
    for helper, layer in ((MTPLossLoggingHelper, 0), (DSAIndexerLossLoggingHelper, 1)):

        def save(loss: torch.Tensor, helper: Any = helper, layer: int = layer) -> None:
            if hasattr(helper, "save_loss_to_tracker"):
                helper.save_loss_to_tracker(loss, layer, 1)
            else:  # With the numbers of correct predictions and of all.
                helper.save_metrics_to_tracker(loss, loss + 1, loss + 2, layer, 1)

        helper.tracker = {}
        for loss in losses:
            save(loss)
        expected = {name: value for name, value in helper.tracker.items() if "values" in name}
        assert expected
        helper.tracker = {}
        tracked = TrackedLosses()
        for microbatch in (1, 3, 2, 0):
            with tracked.task(microbatch):
                save(losses[microbatch])
        tracked.finish()
        for name, values in expected.items():
            assert torch.equal(helper.tracker[name], values)


def test_what_one_microbatch_leaves_for_another_is_refused() -> None:
    run_ranks(1, in_groups, {}, check_refusals, timeout_s=TIMEOUT_S)


def check_refusals(_layout: Any) -> None:
    from megatron.core.enums import Fp8Recipe

    from rrfp.errors import UsageError
    from rrfp.megatron.step.stage import refuse_stateful

    def refuse(
        module: torch.nn.Module, fp8: str | None = None, recipe: Any = "delayed", **others: bool
    ) -> None:
        config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe, **others)
        refuse_stateful([torch.nn.Sequential(module)], config)

    refuse(torch.nn.BatchNorm1d(2, track_running_stats=False))
    refuse(torch.nn.BatchNorm1d(2).eval())
    refuse(torch.nn.LayerNorm(2))
    for recipe in (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8, "mxfp8"):
        refuse(torch.nn.LayerNorm(2), "e4m3", recipe)
        for attention in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            refuse(torch.nn.LayerNorm(2), None, recipe, **{attention: True})
            with pytest.raises(UsageError, match=f"{attention} cannot run readiness-first"):
                refuse(torch.nn.LayerNorm(2), "e4m3", recipe, **{attention: True})
    with pytest.raises(UsageError, match="0 cannot run readiness-first: its running statistics"):
        refuse(torch.nn.BatchNorm1d(2))
    for recipe in ("delayed", Fp8Recipe.delayed):
        with pytest.raises(UsageError, match="fp8_recipe delayed cannot run"):
            refuse(torch.nn.LayerNorm(2), "e4m3", recipe)

    class Router(torch.nn.Module):
        router_replay: Any = None
        global_tokens_per_expert: Any = None

    router = Router()
    refuse(router)
    router.router_replay = object()
    with pytest.raises(UsageError, match="switch moe_enable_routing_replay off"):
        refuse(router)
    router.router_replay, router.global_tokens_per_expert = None, torch.zeros(4)
    with pytest.raises(UsageError, match="choose aux_loss or seq_aux_loss"):
        refuse(router)
