"""What cannot run readiness-first is refused in one sentence before the first task, and before any
link is opened. The settings of Megatron's that need no rig stand in test_dropin.py."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from rrfp.errors import UsageError
from tests.ranks import run_ranks
from tests.rigs import Rig, on_rigs, ours
from tests.training import SMALL

PP1 = {**SMALL, "pp": 1, "experts": 4}


@pytest.mark.timeout(200)
def test_what_cannot_run_is_refused_before_the_first_task() -> None:
    assert run_ranks(1, on_rigs, refuse_all, PP1, timeout_s=150) == [None]


def refuse_all(layout: Any, settings: dict[str, Any]) -> None:
    rig = Rig(settings, layout)
    (wrapped,) = rig.gpt.chunks
    gpt, config = wrapped.module, rig.gpt.config

    for name, reason in (
        ("cpu_offloading", "in the reverse order of the forwards"),
        ("fine_grained_activation_offloading", "in the order of the schedule's first step"),
        ("overlap_moe_expert_parallel_comm", "pairs tasks by a schedule"),
        ("moe_paged_stash", "in pages by the schedule's order"),
        ("overlap_dispatch_backward_with_experts_wgrad", "beside the schedule's tasks"),
    ):
        # Older releases lack some of them.
        with patch.object(config, name, True, create=True):
            refused(rig, f"{name} cannot run readiness-first: .*{reason}")
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        with patch.object(config, name, 2, create=True):
            refused(rig, f"{name} 2 cannot run readiness-first: ranks gather each other's weights")
    for kind in ("local", "transformer_engine"):
        with patch.object(config, "cuda_graph_impl", kind):
            refused(rig, f"cuda_graph_impl {kind} cannot run readiness-first: all graphs share")
    for recipe in ("delayed", "custom"):
        with patch.multiple(config, fp8="e4m3", fp8_recipe=recipe):
            refused(rig, f"fp8_recipe {recipe} cannot run readiness-first: it scales")
    with patch.object(wrapped.ddp_config, "use_megatron_fsdp", True):
        refused(rig, "frees gradients in its own order")

    gpt.decoder.layers[1].add_module("running", torch.nn.BatchNorm1d(2))
    refused(rig, r"decoder\.layers\.1\.running cannot run .*switch track_running_stats off")
    del gpt.decoder.layers[1].running
    router = gpt.decoder.layers[0].mlp.router
    for attribute, advice in (
        ("global_tokens_per_expert", "choose aux_loss or seq_aux_loss"),
        ("qb_beta_accum", "choose aux_loss or seq_aux_loss"),
        ("router_replay", "switch moe_enable_routing_replay off"),
    ):
        with patch.object(router, attribute, torch.zeros(4), create=True):
            refused(rig, rf"layers\.0\.mlp\.router cannot run readiness-first: .*{advice}")

    graph_safe_random_states(rig)
    both_ends_on_a_rank(rig)


def graph_safe_random_states(rig: Rig) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with (
        patch.object(get_cuda_rng_tracker(), "use_cudagraphable_rng", True),
        patch.object(rig.gpt.config, "recompute_granularity", "selective"),
    ):
        refused(rig, "leave te_rng_tracker and use_cudagraphable_rng off, or recompute_granularity")


def both_ends_on_a_rank(rig: Rig) -> None:
    """Two copies of an embedding that nobody adds up."""
    (chunk,) = rig.gpt.chunks
    chunks: dict[str, Any] = {"model": [chunk] * 2, "data_iterator": [iter(())] * 2}
    for placement in ("v", "loop"):
        with patch.object(chunk.module, "share_embeddings_and_output_weights", True):
            refused(
                rig, "embedding that is tied are added up by nobody; untie it", placement, chunks
            )
        with patch.object(rig.gpt.config, "mtp_num_layers", 1):
            refused(rig, "that mtp_num_layers makes are added up by nobody", placement, chunks)
        # Without either, a whole model is no chunk of one.
        refused(rig, "chunk 0 .* was built with post_process True", placement, chunks)


def refused(
    rig: Rig, sentence: str, placement: str = "loop", changed: dict[str, Any] | None = None
) -> None:
    """The step is refused with this sentence, in training and in evaluation."""
    schedule = ours(placement=placement)
    for forward_only in (False, True):
        with pytest.raises(UsageError, match=sentence):
            rig.run(
                lambda **given: schedule(**{**given, **(changed or {})}),
                never_called,
                forward_only=forward_only,
            )


def never_called(*_: object) -> None:
    raise AssertionError("a task has begun")
