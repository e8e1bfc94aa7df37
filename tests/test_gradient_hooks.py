"""Hooks on weights, other gradients of weights, and autocast: the same under a split backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.rigs import TIMEOUT_S, Rig, native, on_rigs, ours
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

SETTINGS = {**SMALL, "pp": 2, "layers": 4}
STEPS = 2

Seen = list[tuple[str, float]]
"""What hooks were called with, in their order."""

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
    """Around half of the microbatches, in another default dtype of theirs."""
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
    assert "layers.0.mlp.linear_fc2.weight has the hook tests.test_gradient_hooks.late_h" in told
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
