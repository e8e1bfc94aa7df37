"""What a training loop passes, and what its functions are called with, against Megatron's own
schedule on the same modules and data."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch
from tests.balance_losses import balance_losses, forget_balance_losses
from tests.ranks import run_ranks
from tests.rigs import (
    MICROBATCHES,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    three_value_step,
)
from tests.test_weight_gradients import FusedKernel
from tests.training import SMALL

PP2 = {**SMALL, "pp": 2, "microbatches": MICROBATCHES}

ByCase = dict[str, list[Any]]
"""By case, what Megatron's schedule came to and then what each of ours did."""


@pytest.mark.timeout(400)
def test_it_is_called_and_calls_as_megatrons(tmp_path: Path) -> None:
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))
    for found in run_ranks(2, on_rigs, call_all, PP2, reverse, timeout_s=300):
        for case, (expected, *outcomes) in found.items():
            for outcome in outcomes:
                assert outcome == expected, case
    for different in ("scaled", "scaled per token"):
        assert found[different][0] != found["plain"][0]
    for same in ("forced", "groups of the caller's", "a view"):
        assert found[same][0] == found["plain"][0]
    losses = {name for logged, _, _ in found["experts"] for name in logged}
    assert losses == {"load_balancing_loss", "z_loss"}


def call_all(layout: Any, settings: dict[str, Any], reverse: str) -> ByCase:
    schedules = [native(), ours(), ours(hint="bfw"), ours(hint=reverse)]
    rig = Rig(settings, layout)
    found = {
        "plain": [rig.run(schedule) for schedule in schedules],
        **scale(rig, schedules),
        "finalized": [finalized(rig, schedule) for schedule in schedules],
        "timed": [timed(rig, schedule) for schedule in schedules],
        "inputs": [inputs(rig, schedule) for schedule in schedules],
        "freed": [freed(rig, schedule) for schedule in schedules],
        **group(rig, schedules),
        # Megatron's own asserts that an output is no view.
        "a view": [rig.run(native()), *(rig.run(s, a_view_step) for s in schedules[1:])],
        "experts": [experts(layout, schedule) for schedule in schedules],
        "experts per token": [experts(layout, s, per_token=True) for s in schedules],
    }
    found["several tokens ahead"] = [several_tokens_ahead(layout, s) for s in schedules]
    in_sequence = [ours(hint="fb"), ours(hint="1f1b", dispatch=Dispatch.FIXED)]
    found["deferred embedding"] = deferred_embedding(layout, [*schedules[:2], *in_sequence])
    for schedule in (*schedules[1:], *in_sequence):
        schedule.close()
    return found


def scale(rig: Rig, schedules: list[Any]) -> ByCase:
    """The loss scale that the optimizer asks for."""
    config = rig.gpt.config
    with patch.object(config, "grad_scale_func", lambda loss: loss * 1024):
        scaled = [rig.run(schedule) for schedule in schedules]
        with patch.object(config, "calculate_per_token_loss", True):
            per_token = [rig.run(schedule, three_value_step) for schedule in schedules]
    return {"scaled": scaled, "scaled per token": per_token}


def finalized(rig: Rig, schedule: Any) -> list[Any]:
    """How often gradients are finalised, and with what; also when there is nothing to finalise."""
    config = rig.gpt.config
    finalize = config.finalize_model_grads_func
    calls: list[Any] = []

    def spy(
        model: list[Any], num_tokens: Any, *, pg_collection: Any, force_all_reduce: Any
    ) -> None:
        groups = {
            name: group and dist.get_process_group_ranks(group)
            for name in ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")
            for group in [getattr(pg_collection, name)]
        }
        tokens = None if num_tokens is None else int(num_tokens)
        calls.append((model == rig.gpt.chunks, tokens, groups, force_all_reduce))
        finalize(model, num_tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)

    with patch.object(config, "finalize_model_grads_func", spy):
        rig.run(schedule, force_all_reduce=True)
        with patch.object(config, "calculate_per_token_loss", True):
            rig.run(schedule, three_value_step)
        with torch.no_grad():
            rig.run(schedule, forward_only=True)
    assert len(calls) == 2
    with patch.object(config, "finalize_model_grads_func", None):
        return [*calls, rig.run(schedule)]


class Timers:
    """Stands for Megatron's, and counts."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        def start(*, barrier: bool = False) -> None:
            self.counts[name, f"started, level {log_level}, barrier {barrier}"] += 1

        def stop() -> None:
            self.counts[name, "stopped"] += 1

        return SimpleNamespace(start=start, stop=stop)


def timed(rig: Rig, schedule: Any) -> dict[tuple[str, str], int]:
    """What is timed, but for the transfers, which no task of ours waits for."""
    timers = Timers()
    with patch.object(rig.gpt.config, "timers", timers):
        rig.run(schedule)
    assert timers.counts["forward-compute", "stopped"] == MICROBATCHES
    return {
        (name, what): count
        for (name, what), count in timers.counts.items()
        if not name.endswith(("-recv", "-send"))
    }


def inputs(rig: Rig, schedule: Any) -> list[Any]:
    """What a stage finds as its input: a leaf that asks for its gradient, in a tensor of its own,
    and told which microbatch it is."""
    found: dict[int, Any] = {}

    def step(data_iterator: Iterator[Batch], model: Any) -> Any:
        decoder = model.module.decoder
        tensor = decoder.input_tensor
        (microbatch,) = {layer.current_microbatch for layer in decoder.layers}
        found[microbatch] = tensor is not None and (
            tensor.requires_grad,
            tensor.is_leaf,
            tensor._base is None,
            tensor.shape,
        )
        return three_value_step(data_iterator, model)

    rig.run(schedule, step)
    with torch.no_grad():
        rig.run(schedule, step, forward_only=True)
    return sorted(found.items())


def freed(rig: Rig, schedule: Any) -> list[Any]:
    """How many numbers each output has left when the step is over, when they may be freed and when
    not."""
    outputs: list[torch.Tensor] = []

    def step(data_iterator: Iterator[Batch], model: Any) -> Any:
        output, loss = three_value_step(data_iterator, model)
        outputs.append(output)
        return output, loss

    found = []
    for may_free in (True, False):
        with patch.object(rig.gpt.config, "deallocate_pipeline_outputs", may_free):
            rig.run(schedule, step)
        sizes = [output.numel() for output in outputs]
        if rig.layout.pp_rank == 0:
            assert (set(sizes) == {1}) == may_free
        found.append(sizes)
        outputs.clear()
    return found


def group(rig: Rig, schedules: list[Any]) -> ByCase:
    """Process groups that the caller passes, and a reduction that it forces."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    communicator = P2PCommunicator(pp_group=pipeline, config=rig.gpt.config)
    passed = partial(rig.run, p2p_communicator=communicator, pg_collection=groups)
    return {
        "groups of the caller's": [passed(schedule) for schedule in schedules],
        "forced": [rig.run(schedule, force_all_reduce=True) for schedule in schedules],
    }


def a_view_step(data_iterator: Iterator[Batch], model: Any) -> Any:
    from rrfp.train.models.gpt import forward_step

    output, loss = forward_step(data_iterator, model)
    return output[:], loss


def experts(layout: Any, schedule: Any, *, per_token: bool = False) -> list[Any]:
    """Experts whose balance costs two losses, scaled with the loss, and moves biases: what is
    logged, the biases, and the gradients."""
    from megatron.core import transformer

    configured = partial(
        transformer.TransformerConfig,
        moe_z_loss_coeff=1e-2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        calculate_per_token_loss=per_token,
    )
    with patch.object(transformer, "TransformerConfig", configured):
        rig = Rig({**PP2, "experts": 4}, layout)
    rig.gpt.config.grad_scale_func = lambda loss: loss * 1024
    forget_balance_losses()
    outcomes = [rig.run(schedule, three_value_step) for _ in range(2)]
    logged = {name: values.tolist() for name, (values, _) in balance_losses().items()}
    biases = [
        module.expert_bias.tolist()
        for module in rig.gpt.chunks[0].modules()
        if hasattr(module, "expert_bias")
    ]
    assert any(map(any, biases))
    return [logged, biases, outcomes]


def several_tokens_ahead(layout: Any, schedule: Any) -> list[Any]:
    """Multi-token prediction, whose embedding is the first stage's, and whose losses are scaled
    with the loss and logged."""
    from megatron.core import transformer
    from megatron.core.models import gpt
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    plain: Any = gpt.GPTModel

    def model(**given: Any) -> Any:
        block = get_gpt_mtp_block_spec(given["config"], given["transformer_layer_spec"], False)
        return plain(**given, mtp_block_spec=block)

    configured = partial(transformer.TransformerConfig, mtp_num_layers=2)
    MTPLossLoggingHelper.tracker.clear()
    with (
        patch.object(transformer, "TransformerConfig", configured),
        patch.object(gpt, "GPTModel", model),
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
    ):
        rig = Rig(PP2, layout)
        rig.gpt.config.grad_scale_func = lambda loss: loss * 1024
        outcome = rig.run(schedule, three_value_step)
    # One vector, or several from 0.19 on.
    logged = {
        name: values.tolist()
        for name, values in MTPLossLoggingHelper.tracker.items()
        if name.endswith("values")
    }
    assert bool(logged) == (layout.pp_rank == 1)
    return [logged, outcome]


def deferred_embedding(layout: Any, schedules: list[Callable[..., Any]]) -> list[Any]:
    """The output layer's weight gradient, put off to the end by Megatron itself."""
    from megatron.core import transformer
    from megatron.core.tensor_parallel import layers

    kernel: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = torch.no_grad()(FusedKernel().wgrad_gemm_accum_fp32)
    configured: Any = transformer.TransformerConfig

    def config(**given: Any) -> Any:
        return configured(
            **{**given, "gradient_accumulation_fusion": True, "defer_embedding_wgrad_compute": True}
        )

    with (
        patch.dict(sys.modules, {kernel.__name__: kernel}),
        patch.object(layers, kernel.__name__, kernel, create=True),
        patch.object(layers, "_grad_accum_fusion_available", True),
        patch.object(transformer, "TransformerConfig", config),
    ):
        rig = Rig(PP2, layout)
        gpt = rig.gpt.chunks[0].module
        # Megatron's own linear layers take the setting for theirs, and fail; those of Transformer
        # Engine, for which it is meant, do not look at it.
        undeferred = copy(rig.gpt.config)
        undeferred.defer_embedding_wgrad_compute = False
        for module in gpt.decoder.modules():
            if isinstance(module, layers.ColumnParallelLinear):
                module.config = undeferred
        found = [rig.run(schedule) for schedule in schedules]
        if layout.pp_rank == 1:
            assert gpt.output_layer.weight.main_grad.any()
            assert gpt.embedding_activation_buffer == gpt.grad_output_buffer == []
    return found
