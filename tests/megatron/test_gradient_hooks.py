"""Hooks on weights, other gradients of weights, and autocast: the same under a split backward."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Shape
from tests.e2e.ranks import run_ranks
from tests.megatron.training import (
    MICROBATCHES,
    SMALL,
    TIMEOUT_S,
    Outcome,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


SETTINGS = {**SMALL, "pp": 2, "layers": 4}
STEPS = 2

Seen = list[tuple[str, float]]
"""The arguments of hook calls, in order."""

Case = Callable[[Rig, Seen], Any]
"""Prepares a model; may return a forward step."""


def every_hook(rig: Rig, seen: Seen) -> None:
    """Every kind of hook that torch has on a parameter."""

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        note(seen, "tensor", gradient)
        return gradient / 2

    first, second = layers(rig)
    first.mlp.linear_fc1.weight.register_hook(halve)
    hooked = first.mlp.linear_fc2.weight
    node: Any = torch.autograd.graph.get_gradient_edge(hooked).node
    node.register_prehook(lambda gradients: note(seen, "before", gradients[0]))
    node.register_hook(lambda *_: note(seen, "after", hooked.main_grad))
    second.mlp.linear_fc1.weight.register_post_accumulate_grad_hook(
        lambda weight: note(seen, "accumulated", weight.grad)
    )
    several = [layer.self_attention.linear_qkv.weight for layer in (first, second)]
    torch.autograd.graph.register_multi_grad_hook(
        several, lambda gradients: note(seen, "several", *gradients)
    )


def module_hooks(rig: Rig, seen: Seen) -> None:
    """Hooks of modules that look at the gradients so far."""
    # Megatron cannot free the output of the last layer once it has such a hook.
    layer, _ = layers(rig)

    def look(*_: Any) -> None:
        note(seen, "module", *(each.main_grad for each in layer.parameters()))

    layer.mlp.linear_fc1.register_full_backward_pre_hook(look)
    layer.register_full_backward_hook(look)


def late_hooks(rig: Rig, seen: Seen) -> Any:
    """Hooks that come in the first step: before a forward, and between a forward and its
    backward."""
    first, second = layers(rig)
    todo = [second.mlp.linear_fc2.weight, first.mlp.linear_fc2.weight]

    def hook() -> None:
        if todo:
            number = float(len(todo))
            todo.pop().register_hook(lambda gradient: note(seen, "late", gradient * number))

    def step(data: Any, model: Any) -> Any:
        hook()
        output, loss = mean_loss_step(data, model)
        hook()
        return output, loss

    return step


def other_gradients(rig: Rig, _: Seen, *, is_before: bool) -> Any:
    """Penalties on a weight, from the third microbatch on, of terms created before or after those
    of the layer."""
    count = 0

    def step(data: Any, model: Any) -> Any:
        nonlocal count
        count += 1
        weight = layers(rig)[0].mlp.linear_fc1.weight

        def penalty() -> torch.Tensor:
            total: torch.Tensor = 0.01 * (weight * weight).sum() + 0.03 * weight.abs().sum()
            return total

        early = penalty() if is_before else None
        output, loss = mean_loss_step(data, model)
        if count > 2:
            output = output + (penalty() if early is None else early)
        return output, loss

    return step


def own_weight(rig: Rig, _: Seen) -> None:
    """A layer called several times, also with functions of its own weight."""
    linear = layers(rig)[1].mlp.linear_fc1
    own = linear.forward

    def forward(input_: torch.Tensor) -> Any:
        weight = linear.weight
        first, bias = own(input_, weight=weight / weight.norm())
        second, _ = own(input_)
        third, _ = own(input_, weight=0.5 * weight)
        return first + second + third, bias

    linear.forward = forward


def recomputed_own_weight(rig: Rig, seen: Seen) -> None:
    """In a backward inside the backward."""
    own_weight(rig, seen)
    from megatron.core.tensor_parallel import checkpoint

    mlp = layers(rig)[1].mlp
    own = mlp.forward
    # A bias that went through it, too, would become an output of its own.
    mlp.forward = lambda input_, **_: (
        checkpoint(lambda given: own(given)[0], False, input_),
        mlp.linear_fc2.bias,
    )


def weight_of_two_layers(rig: Rig, seen: Seen) -> Any:
    first, second = layers(rig)
    second.mlp.linear_fc1.weight = first.mlp.linear_fc1.weight
    return other_gradients(rig, seen, is_before=True)


def gradient_of_inputs(rig: Rig, _: Seen) -> Any:
    """A `torch.autograd.grad` in the forward passes the layers, too."""
    inputs: list[torch.Tensor] = []
    layers(rig)[1].register_forward_pre_hook(
        lambda _module, _args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )

    def step(data: Any, model: Any) -> Any:
        output, loss = mean_loss_step(data, model)
        own_inputs = inputs.pop()
        # Megatron's cross entropy allows only one backward.
        if not rig.gpt.chunks[0].module.post_process:
            torch.autograd.grad(output.sum(), own_inputs, retain_graph=True)
        return output, loss

    return step


def autocast(rig: Rig, _: Seen) -> Any:
    """Runs half of the microbatches in another default dtype."""
    count = 0

    def step(data: Any, model: Any) -> Any:
        nonlocal count
        count += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=count % 2 == 0):
            output, loss = mean_loss_step(data, model)
        return output.float(), loss

    return step


def note(seen: Seen, kind: str, *tensors: Any) -> None:
    seen.append((kind, sum(float(each.double().sum()) for each in tensors)))


def layers(rig: Rig) -> list[Any]:
    return list(rig.gpt.chunks[0].module.decoder.layers)


def mean_loss_step(data: Any, model: Any) -> Any:
    from rrfp.train.models.gpt import forward_step

    return forward_step(data, model)


CASES: list[Case] = [
    every_hook,
    module_hooks,
    late_hooks,
    partial(other_gradients, is_before=True),
    partial(other_gradients, is_before=False),
    own_weight,
    recomputed_own_weight,
    weight_of_two_layers,
    gradient_of_inputs,
]


def trained(layout: Any, settings: dict[str, Any], cases: list[Case]) -> list[list[Any]]:
    """By case, what some steps come to, and what the hooks saw: natively and with the backward
    split."""
    found = []
    for case in cases:
        outcomes = []
        split = ours(hint="bfw")
        for schedule in (native(), split):
            rig = Rig(settings, layout)
            seen: Seen = []
            step = case(rig, seen)
            outcomes.append(([rig.run(schedule, step) for _ in range(STEPS)], seen))
        split.close()
        found.append(outcomes)
    return found


def test_hooks_and_other_gradients_are_as_natively(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(2, on_rigs, trained, SETTINGS, CASES, timeout_s=TIMEOUT_S)
    for rank in found:
        for case, (expected, got) in zip(CASES, rank, strict=True):
            assert got == expected, case
    hooks = [bool(seen) for (_, seen), _ in found[0]]
    assert hooks == [True] * 3 + [False] * (len(CASES) - 3)
    # One line says which weights stay with the backward.
    told = capfd.readouterr().err
    assert (
        "layers.0.mlp.linear_fc2.weight has the hook tests.megatron.test_gradient_hooks.late_h"
        in told
    )
    assert "weight has another gradient than its layer's, so its gradient is not split off" in told


def test_weight_gradients_are_computed_under_the_autocast_of_their_backwards() -> None:
    bf16 = {**SETTINGS, "dropout": 0.0}
    for rank in run_ranks(2, on_autocast_rigs, bf16, timeout_s=TIMEOUT_S, fresh=True):
        ((expected, got),) = rank
        assert got == expected


def on_autocast_rigs(settings: dict[str, Any]) -> Any:
    """On rigs whose autocast of the CPU Megatron restores as it does that of a GPU."""
    amp: Any = torch.amp
    for name in ("custom_fwd", "custom_bwd"):
        setattr(amp, name, partial(_of_cpu, getattr(amp, name)))
    return on_rigs(trained, settings, [autocast])


def _of_cpu(decorate: Any, function: Any = None, *, device_type: str) -> Any:
    return (
        partial(decorate, device_type="cpu")
        if function is None
        else decorate(function, device_type="cpu")
    )


# The reduction of gradients between replicas starts as Megatron starts it, or in a fixed order.


PP2_DP2 = {**SMALL, "pp": 2, "dp": 2, "microbatches": MICROBATCHES}


def test_overlapped_reduction_is_started_as_megatron_starts_it(tmp_path: Path) -> None:
    hint = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))
    for rank, found in enumerate(
        run_ranks(4, on_rigs, reduce_in_many_ways, PP2_DP2, hint, timeout_s=TIMEOUT_S)
    ):
        for case, (native_one, in_order, *out_of_order) in found.items():
            outcomes, num_calls = native_one
            assert outcomes == outcomes[:1] * 3, "the same step gave different gradients"
            # On the first stage Megatron starts the reduction inside the last backward.
            assert num_calls == (3 if case == "grad_sync_func" and rank // 2 > 0 else 0)
            assert in_order == native_one, case
            for ours_of_case, _ in out_of_order:
                assert ours_of_case == outcomes, case


def reduce_in_many_ways(
    layout: Any, settings: dict[str, Any], hint: str
) -> dict[str, list[tuple[list[Outcome], int]]]:
    """By case, what Megatron's and our schedules came to in three steps, and how often they
    called `grad_sync_func`."""
    from megatron.core import distributed

    plain = distributed.DistributedDataParallelConfig
    distributed.DistributedDataParallelConfig = partial(
        plain, overlap_grad_reduce=True, bucket_size=2000
    )
    schedules = [native(), ours(), ours(hint=hint), ours(hint=hint, dispatch=Dispatch.FIXED)]
    found = {
        "hooks": [reduced(Rig(settings, layout), schedule, None) for schedule in schedules],
        "grad_sync_func": [
            reduced(rig, schedule, rig.gpt.chunks[0].start_grad_sync)
            for schedule in schedules
            for rig in [Rig(settings, layout)]
        ],
    }
    for schedule in schedules[1:]:
        schedule.close()
    return found


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_gradients_are_reduced_once(pp: int, chunks: int, tmp_path: Path) -> None:
    settings = {**PP2_DP2, "pp": pp, "dp": 4 // pp, "chunks": chunks, "distributed_optimizer": True}
    hint = backwards_in_reverse(tmp_path / "reverse.csv", Shape(pp, MICROBATCHES, chunks))
    for found in run_ranks(4, on_rigs, reduce_once, settings, hint, timeout_s=TIMEOUT_S):
        for case, (expected, *outcomes) in found.items():
            assert expected == expected[:1] * 3, case
            for outcome in outcomes:
                assert outcome == expected, case


def reduce_once(layout: Any, settings: dict[str, Any], hint: str) -> dict[str, list[list[Outcome]]]:
    """By case, what three steps came to under Megatron's schedule and then under ours."""
    from megatron.core import distributed, parallel_state

    # Megatron divides the replicas into instances by a function of einops, which is not installed.
    vars(parallel_state).update(HAVE_EINOPS=True, einops=SimpleNamespace(rearrange=levels))
    schedules = [ours(), ours(hint="bfw"), ours(hint=hint)]
    # Megatron's interleaving needs more than two ranks over gloo; ours follows the same hooks.
    expected = native() if settings["chunks"] == 1 else schedules[0]
    plain = distributed.DistributedDataParallelConfig
    found = {}
    for instances in (2, 1):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=settings["pp"],
            num_distributed_optimizer_instances=instances,
        )
        distributed.DistributedDataParallelConfig = partial(
            plain,
            overlap_grad_reduce=True,
            bucket_size=2000,
            num_distributed_optimizer_instances=instances,
        )
        for calls in (1, 2):
            outcomes = []
            for schedule in [expected, *schedules]:
                rig = Rig(settings, layout)
                if settings["chunks"] == 1 and layout.pp_rank == 0:
                    # There Megatron passes over it and follows its hooks.
                    rig.gpt.config.grad_sync_func = rig.gpt.chunks[0].start_grad_sync
                run = schedule if calls == 1 else partial(in_two_calls, schedule, rig.gpt.config)
                number = calls * MICROBATCHES
                outcomes.append([rig.run(run, num_microbatches=number) for _ in range(3)])
            found[f"{instances} instances, {calls} calls"] = outcomes
    for schedule in schedules:
        schedule.close()
    return found


def levels(ranks: Any, _pattern: str, u: int, s: int, l: int) -> Any:  # noqa: E741
    """einops' rearrange by "(l s u) -> (l u) s"."""
    return ranks.reshape(l, s, u).transpose(0, 2, 1).reshape(l * u, s)


def in_two_calls(
    schedule: Callable[..., list[Any]], config: Any, *, num_microbatches: int, **arguments: Any
) -> list[Any]:
    """A step whose loop calls the schedule twice before gradients are finalized."""
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    first = schedule(num_microbatches=num_microbatches // 2, **arguments)
    config.finalize_model_grads_func = finalize
    return first + schedule(num_microbatches=num_microbatches // 2, **arguments)


def test_a_weight_that_the_last_microbatch_does_not_use(tmp_path: Path) -> None:
    """Megatron's hooks wait for it in vain; where they are not followed the step is as without
    overlap."""
    settings = {**SMALL, "pp": 1, "dp": 2, "microbatches": MICROBATCHES}
    hint = backwards_in_reverse(tmp_path / "reverse.csv", Shape(1, MICROBATCHES))
    for found in run_ranks(2, on_rigs, leave_a_weight_out, settings, hint, timeout_s=TIMEOUT_S):
        without_overlap, natively, in_order, *others = found
        for outcomes in (natively, in_order):
            assert outcomes[0] == without_overlap[0]
            assert "Communication call has not been issued for this bucket" in str(outcomes[1])
        assert others == [without_overlap] * 2


def leave_a_weight_out(layout: Any, settings: dict[str, Any], hint: str) -> list[list[Any]]:
    """By schedule, what two steps came to; in the second one the last microbatch has no image."""
    from megatron.core import distributed

    from rrfp.train.models import gpt

    build_chunk, plain = gpt.build_chunk, distributed.DistributedDataParallelConfig

    def with_tower(*args: Any) -> Any:
        module = build_chunk(*args)
        torch.manual_seed(1)
        module.tower = torch.nn.Linear(4, 4)
        return module

    def step(uses: bool, data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)
        is_last = int((batch["loss_mask"] == 0).sum()) == 3 * (MICROBATCHES - 1)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        if uses or not is_last:
            output = output + model.module.tower(torch.ones(4)).mean()
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    vars(gpt)["build_chunk"] = with_tower  # pyright: ignore[reportIndexIssue]
    found: list[list[Any]] = []
    schedules = [native(), native(), ours(), ours(hint="bfw"), ours(hint=hint)]
    for schedule in schedules:
        distributed.DistributedDataParallelConfig = partial(
            plain, overlap_grad_reduce=len(found) > 0, bucket_size=2000
        )
        rig, outcomes = Rig(settings, layout), list[Any]()
        for uses in (True, False):
            try:
                outcomes.append(rig.run(schedule, partial(step, uses)))
            except AssertionError as error:
                outcomes.append(str(error))
        found.append(outcomes)
    for schedule in schedules[2:]:
        schedule.close()
    return found


def test_chunks_are_reduced_in_one_order(tmp_path: Path) -> None:
    settings = {**PP2_DP2, "chunks": 2}
    hint = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES, 2))
    for expected, *found in run_ranks(
        4, on_rigs, reduce_chunks_in_many_ways, settings, hint, timeout_s=TIMEOUT_S
    ):
        for outcomes in found:
            assert outcomes == expected


def reduce_chunks_in_many_ways(
    layout: Any, settings: dict[str, Any], hint: str
) -> list[list[Outcome]]:
    """Run three steps: without overlap, then with overlap started by hooks and by own functions."""
    from megatron.core import distributed

    schedules = [ours(), ours(hint="bfw-deep"), ours(hint="fb", limit=1), ours(hint=hint)]
    rig = Rig(settings, layout)
    found = [[rig.run(schedules[0]) for _ in range(3)]]
    plain = distributed.DistributedDataParallelConfig
    distributed.DistributedDataParallelConfig = partial(
        plain, overlap_grad_reduce=True, bucket_size=2000
    )
    for schedule in schedules:
        rig = Rig(settings, layout)
        found.append([rig.run(schedule) for _ in range(3)])

        calls: list[str] = []
        rig = Rig(settings, layout)

        def grad_sync(chunk: int, _: Any, rig: Rig = rig, calls: list[str] = calls) -> None:
            calls.append(f"gradients {chunk}")
            rig.gpt.chunks[chunk].start_grad_sync()

        def param_sync(chunk: int, _: Any, calls: list[str] = calls) -> None:
            calls.append(f"parameters {chunk}")

        rig.gpt.config.grad_sync_func = [partial(grad_sync, chunk) for chunk in range(2)]
        rig.gpt.config.param_sync_func = [partial(param_sync, chunk) for chunk in range(2)]
        found.append([rig.run(schedule) for _ in range(3)])
        in_one_order = ["parameters 0", "parameters 1", "gradients 1", "gradients 0"]
        assert calls == in_one_order * 3
        with torch.no_grad():
            rig.run(schedule, forward_only=True)
        assert calls == in_one_order * 3
        schedule.close()
    return found


def reduced(
    rig: Rig, schedule: Callable[..., list[Any]], start: Callable[..., None] | None
) -> tuple[list[Outcome], int]:
    # Megatron divides the gradients into buckets on the first stage only.
    assert (len(rig.gpt.chunks[0].bucket_groups) > 1) == (rig.layout.pp_rank == 0)
    num_calls = 0

    def grad_sync_func(parameters: Iterator[torch.nn.Parameter]) -> None:
        nonlocal num_calls
        num_calls += 1
        assert start is not None
        start(parameters)

    rig.gpt.config.grad_sync_func = start and grad_sync_func
    # The first step shows Megatron which gradients to wait for; it overlaps from the second on.
    return [rig.run(schedule) for _ in range(3)], num_calls
