"""A training loop's arguments, and the arguments that its functions get, compared with Megatron's
own schedule on the same modules and data."""

import hashlib
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

from rrfp.errors import UsageError
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch
from tests.e2e.ranks import run_ranks
from tests.megatron.test_weight_gradients import FusedKernel
from tests.megatron.training import (
    MICROBATCHES,
    SMALL,
    TIMEOUT_S,
    Rig,
    backwards_in_reverse,
    balance_losses,
    forget_balance_losses,
    native,
    on_rigs,
    ours,
    three_value_step,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


PP2 = {**SMALL, "pp": 2, "microbatches": MICROBATCHES}

ByCase = dict[str, list[Any]]
"""By case: the result of Megatron's schedule, and then those of rrfp's schedules."""


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
    """The timers, without those of transfers, because no task of rrfp waits for a transfer."""
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
    """The input of a stage is a separate leaf tensor that requires a gradient, and the model gets
    the microbatch's number."""
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


# What cannot run readiness-first is refused in one sentence before the first task, and before any
# link is opened. The settings of Megatron's that need no rig stand in megatron/test_dropin.py.


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


# The calls that loops of reinforcement learning make: forwards alone with loss functions of their
# own, whatever these return; as many microbatches as the data come to; actor, critic and reference
# in turns in one process, and results told to all ranks in between.
#
# The shapes of calls and returns are those of
# - verl (volcengine/verl): `verl/workers/actor/megatron_actor.py`,
# `verl/workers/critic/megatron_critic.py`, `verl/workers/engine/megatron/transformer_impl.py` and
# `verl/utils/megatron/pipeline_parallel.py`;
# - NeMo-RL (NVIDIA-NeMo/RL): `nemo_rl/models/megatron/train.py` and
# `nemo_rl/models/megatron/pipeline_parallel.py`;
# - slime (THUDM/slime): `slime/backends/megatron_utils/model.py`.


COUNTS = (MICROBATCHES, 1, 2, 7)
"""How many microbatches the calls of a round have: fewer than ranks, and more."""

LossFunction = Callable[..., Any]


@pytest.mark.parametrize(
    ("pp", "chunks", "counts"),
    [
        pytest.param(3, 1, COUNTS, id="pp3"),
        # Megatron's own interleaving takes whole groups of as many microbatches as ranks.
        pytest.param(3, 2, (6, 3, 9), id="pp3-c2", marks=pytest.mark.slow),
    ],
)
def test_loops_of_reinforcement_learning(
    tmp_path: Path, pp: int, chunks: int, counts: tuple[int, ...]
) -> None:
    settings = {**SMALL, "pp": pp, "chunks": chunks, "layers": 6, "variable_lengths": True}
    shape = Shape(pp, counts[0], chunks)
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", shape)
    found = run_ranks(pp, on_rigs, compare, settings, reverse, counts, timeout_s=TIMEOUT_S)
    for rank in found:
        for (hint, call), (expected, got) in rank.items():
            assert got == expected, f"{call} under {hint}"
    told = found[0]
    # All ranks were told what the last one found, and it depends on the model and the data.
    for call in ("log probabilities, 0", "values, 0", "lists of what is no loss, 0"):
        ((first, _), *_) = (outcomes for (_, name), outcomes in told.items() if name == call)
        assert len(first) == counts[0]
        assert len({str(each) for each in first}) == counts[0]


def compare(
    layout: Any, settings: dict[str, Any], reverse: str, counts: tuple[int, ...]
) -> dict[tuple[str, str], tuple[Any, Any]]:
    """By hint and call, what Megatron's own schedule gives on this rank, and what ours does."""
    loop = Loop(layout, settings)
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for hint in ("bf", "bfw", reverse):
        # A file's order is of one number of microbatches.
        own_counts = counts[:1] * 2 if hint == reverse else counts
        expected = loop.rounds(native(), own_counts)
        schedule = ours(hint=hint)
        got = loop.rounds(schedule, own_counts)
        schedule.close()
        assert got.keys() == expected.keys()
        found |= {(hint, call): (expected[call], got[call]) for call in expected}
    return found


class Loop:
    """The models of a loop on this rank: each takes the parameters of its own seed."""

    def __init__(self, layout: Any, settings: dict[str, Any]) -> None:
        self._actor = Rig(settings, layout)
        self._critic = Rig({**settings, "seed": 7}, layout)
        # A reference is not trained, so nothing is wrapped around it.
        reference = Rig({**settings, "seed": 8}, layout)
        self._reference = [chunk.module for chunk in reference.gpt.chunks]

    def rounds(self, schedule: Callable[..., Any], counts: tuple[int, ...]) -> dict[str, Any]:
        """By call, what it came to."""
        found = {}
        for number, count in enumerate(counts):
            for name, outcome in self._round(schedule, number, count).items():
                found[f"{name}, {number}"] = outcome
        found |= self._one_iterator(schedule, counts)
        return found

    def _round(self, schedule: Callable[..., Any], number: int, count: int) -> dict[str, Any]:
        actor, critic = self._actor.gpt.chunks, self._critic.gpt.chunks
        batches, others = (
            [self._actor.batches.batch(step, index) for index in range(count)]
            for step in (number, 10 + number)
        )

        def look(model: list[Any], loss: LossFunction | None, **arguments: Any) -> Any:
            with torch.no_grad():
                return broadcast_to_all(call(schedule, model, batches, loss, **arguments))

        def learn(rig: Rig, loss: LossFunction) -> Any:
            for chunk in rig.gpt.chunks:
                chunk.zero_grad_buffer()
            return call(schedule, rig.gpt.chunks, others, loss), gradients(rig)

        found = {
            "log probabilities": look(actor, log_probabilities),
            "of the reference": look(self._reference, log_probabilities),
            "values": look(critic, values),
            "critic": learn(self._critic, of_critic),
            "actor": learn(self._actor, partial(of_actor, scale=count)),
        }
        if number > 0:
            return found
        for chunk in actor:
            chunk.eval()
        found["in evaluation mode"] = look(actor, log_probabilities)
        for chunk in actor:
            chunk.train()
        return found | {
            "with entropy": look(actor, with_entropy),
            "lists of what is no loss": look(critic, lists, collect_non_loss_data=True),
            "nothing": look(actor, nothing),
            "nothing that is no loss": look(actor, no_data, collect_non_loss_data=True),
            "no loss function": look(actor, None),
            "with gradients on": plain(call(schedule, actor, batches, values, forward_only=True)),
        }

    def _one_iterator(
        self, schedule: Callable[..., Any], counts: tuple[int, ...]
    ) -> dict[str, Any]:
        """Several calls that go on with the same iterators."""
        batches = [self._actor.batches.batch(5, index) for index in range(sum(counts))]
        chunks = self._actor.gpt.chunks
        iterators = [iter(batches) for _ in chunks]
        found = {}
        for number, count in enumerate(counts):
            with torch.no_grad():
                outcome = call(
                    schedule,
                    chunks,
                    batches[:count],
                    log_probabilities,
                    data_iterator=iterators if len(chunks) > 1 else iterators[0],
                )
            found[f"one iterator, call {number}"] = plain(outcome)
        return found


def call(
    schedule: Callable[..., Any],
    model: list[Any],
    batches: list[Batch],
    loss: LossFunction | None,
    **arguments: Any,
) -> list[Any]:
    """As loops of reinforcement learning call: shapes that say nothing, because messages bring
    their own."""
    iterators = [iter(batches) for _ in model]
    given: dict[str, Any] = {
        "forward_step_func": partial(forward_step, loss=loss),
        "data_iterator": iterators if len(model) > 1 else iterators[0],
        "model": model,
        "num_microbatches": len(batches),
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": not torch.is_grad_enabled(),
    }
    found: list[Any] = schedule(**{**given, **arguments})
    return found


def forward_step(
    data_iterator: Iterator[Batch], model: Any, *, loss: LossFunction | None
) -> tuple[Any, Any]:
    """The last stage gives a dict of what its loss functions need, the others a tensor."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None)
    gpt = getattr(model, "module", model)
    if gpt.post_process:
        # In place, as for another temperature.
        logits = output.float().div_(2.0)
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
        output = {
            "log_probs": chosen * batch["loss_mask"],
            "entropy": -(every.exp() * every).sum(-1),
            "values": logits[..., 0],
        }
    return output, None if loss is None else partial(loss, data=batch)


def log_probabilities(output: dict[str, torch.Tensor], data: Batch) -> Any:
    """A loss that stands for none, and a dict in which tensors, numbers and dicts mix."""
    told = {"model_output": {"log_probs": output["log_probs"]}, "loss": 1.0, "metrics": {}}
    return torch.tensor(1.0), told


def with_entropy(output: dict[str, torch.Tensor], data: Batch) -> Any:
    entropy = output["entropy"] if data["tokens"].shape[1] % 2 else None
    return torch.tensor(1.0), [{"kl": [0.5], "length": data["tokens"].shape[1]}, entropy]


def values(output: dict[str, torch.Tensor], data: Batch) -> Any:
    """A loss that is no tensor."""
    return 1.0, {"vpreds": output["values"]}


def lists(output: dict[str, torch.Tensor], data: Batch, *, non_loss_data: bool) -> Any:
    """Collected data are returned alone, without a loss."""
    assert non_loss_data
    return {"values": [*output["values"]], "lengths": [len(row) for row in data["tokens"]]}


def nothing(output: dict[str, torch.Tensor], data: Batch) -> Any:
    return torch.tensor(0.0), None


def no_data(output: dict[str, torch.Tensor], data: Batch, *, non_loss_data: bool) -> None:
    assert non_loss_data


def of_critic(output: dict[str, torch.Tensor], data: Batch) -> Any:
    loss = (output["values"] - 1.0).square().mean()
    return loss, {"critic/vf_loss": loss.detach().item()}


def of_actor(output: dict[str, torch.Tensor], data: Batch, *, scale: int) -> Any:
    """Scaled, because Megatron divides by the number of microbatches."""
    loss = -(output["log_probs"].mean() + 0.1 * output["entropy"].mean()) * scale
    return loss, [{"actor/loss": [loss.detach().item()], "actor/steps": 1}, None]


def gradients(rig: Rig) -> str:
    digest = hashlib.sha256()
    for chunk in rig.gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.main_grad.numpy().tobytes())
    return digest.hexdigest()


def broadcast_to_all(found: list[Any]) -> Any:
    """The results of the last stage's rank, broadcast to its pipeline right after the call."""
    from megatron.core import parallel_state

    last = parallel_state.get_pipeline_model_parallel_last_rank()
    assert bool(found) == (dist.get_rank() == last)
    told = [plain(found)]
    dist.broadcast_object_list(told, last, group=parallel_state.get_pipeline_model_parallel_group())
    return told[0]


def plain(found: Any) -> Any:
    """Tensors as lists, so that == compares them to the bit."""
    if isinstance(found, torch.Tensor):
        return [tuple(found.shape), found.flatten().tolist()]
    if isinstance(found, dict):
        return {name: plain(each) for name, each in found.items()}
    if isinstance(found, list):
        return [plain(each) for each in found]
    return found
