"""Random streams by task: dropout is the same whatever the order, and states go on as ever."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.ranks import run_ranks
from tests.megatron.one_chunk import MICROBATCHES, TIMEOUT_S, Chunk, digests, in_groups, some_order
from tests.megatron.training import balance_losses, forget_balance_losses

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


DROPOUT = {"dropout": 0.2}
TP2 = {"tp": 2, **DROPOUT}

ORDERS = [
    [(kind, microbatch) for microbatch in range(MICROBATCHES) for kind in "FB"],
    [(kind, microbatch) for kind in "FB" for microbatch in reversed(range(MICROBATCHES))],
    *(some_order(seed, "FB") for seed in range(2)),
]


def gradients_by_order(layout: Any, settings: dict[str, Any]) -> list[dict[str, str]]:
    """The gradients of a step in each of the orders, from the same random states; and last those
    of a second step."""
    from rrfp.megatron.step.random_streams import RandomStreams

    chunk = Chunk(layout, settings)
    streams = RandomStreams(torch.device("cpu"))
    states = all_states()
    found: list[dict[str, str]] = []
    for order in [*ORDERS, ORDERS[0]]:
        if len(found) < len(ORDERS):
            restore(states)
        found.append(gradients(chunk, streams, order))
    return found


def gradients(chunk: Chunk, streams: Any, order: list[tuple[str, int]]) -> dict[str, str]:
    from rrfp.megatron.step.gradients import CanonicalGradients

    chunk.model.zero_grad_buffer()
    total = CanonicalGradients(chunk.model.parameters(), MICROBATCHES)
    streams.start_step()
    before = digest_of_states()
    for kind, microbatch in order:
        with streams.task(3, microbatch) as task, task.active():
            if kind == "F":
                chunk.forward(microbatch)
            else:
                with total.adding(microbatch):
                    chunk.backward(microbatch)
        assert digest_of_states() == before
    streams.finish_step()
    return digests(chunk.model)


def all_states() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    named = get_cuda_rng_tracker().get_states()
    return torch.get_rng_state(), {name: state.clone() for name, state in named.items()}


def restore(states: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states[0])
    get_cuda_rng_tracker().set_states(dict(states[1]))


def digest_of_states() -> dict[str, bytes]:
    default, named = all_states()
    return {name: state.numpy().tobytes() for name, state in {"": default, **named}.items()}


@pytest.mark.parametrize(
    "recompute", ["none", pytest.param("selective", marks=pytest.mark.slow), "full"]
)
def test_dropout_does_not_follow_the_order(recompute: str) -> None:
    settings = {**DROPOUT, "recompute": recompute}
    (found,) = run_ranks(1, in_groups, settings, gradients_by_order, settings, timeout_s=TIMEOUT_S)
    first, *others, second_step = found
    assert all(other == first for other in others)
    assert second_step != first


def test_tensor_parallel_ranks_drop_alike_where_they_must() -> None:
    ranks = run_ranks(2, in_groups, TP2, gradients_by_order, TP2, timeout_s=TIMEOUT_S)
    for first, *others, second_step in ranks:
        assert all(other == first for other in others)
        assert second_step != first
    # The norms' gradients are whole on each rank, so a different mask in the residual would show.
    for step in (0, -1):
        norms = [{n: d for n, d in rank[step].items() if "layernorm" in n} for rank in ranks]
        assert norms[0] == norms[1]
        assert norms[0]


def test_streams() -> None:
    run_ranks(1, in_groups, {}, check_streams, timeout_s=TIMEOUT_S)


def check_streams(_layout: Any) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    from rrfp.megatron.step.random_streams import RandomStreams

    tracker = megatron_random.get_cuda_rng_tracker()
    names = list(tracker.get_states())
    assert len(names) == 3

    def drawn() -> list[float]:
        values = [torch.rand(()).item()]
        for name in names:
            with tracker.fork(name):
                values.append(torch.rand(()).item())
        return values

    streams = RandomStreams(torch.device("cpu"))
    start = all_states()
    streams.start_step()
    tasks = [(0, 0), (0, 1), (1, 0), (0, 0)]
    values = []
    for stage, microbatch in tasks:
        with streams.task(stage, microbatch) as task, task.active():
            values.append(drawn())
    assert values[0] == values[-1]
    different = [value for task_values in values[:-1] for value in task_values]
    assert len(set(different)) == len(different)
    streams.finish_step()

    # A checkpoint between two steps: the states alone say how it goes on.
    saved = all_states()
    following: list[list[float]] = []
    for _ in range(2):
        restore(saved)
        streams = RandomStreams(torch.device("cpu"))
        streams.start_step()
        # What the loop draws in between, its data say, changes nothing.
        torch.rand(len(following))
        with streams.task(0, 0) as task, task.active():
            following.append(drawn())
    assert following[0] == following[1]
    assert following[0] != values[0]

    # The tracker's states move on by one draw a step, however many the tasks made; torch's own,
    # from which loaders draw, stay.
    restore(start)
    streams.start_step()
    streams.finish_step()
    assert digest_of_states() == {
        name: state.numpy().tobytes() for name, state in {"": start[0], **saved[1]}.items()
    }

    # An evaluation leaves them where they are.
    before = digest_of_states()
    streams.start_step(advances=False)
    streams.finish_step()
    assert digest_of_states() == before

    # A task that fails puts the states back, too.
    before = digest_of_states()
    with pytest.raises(ZeroDivisionError), streams.task(0, 0) as task, task.active():
        torch.rand(1 // 0)
    assert digest_of_states() == before
    check_inside_and_outside(streams, drawn)
    check_a_model_that_is_called(streams)


def check_inside_and_outside(streams: Any, drawn: Callable[[], list[float]]) -> None:
    """The task's draws go on where they were left, and so do the caller's."""
    with streams.task(0, 0) as task, task.active():
        of_task = [drawn(), drawn()]
    start = all_states()
    of_caller = [drawn(), drawn()]
    restore(start)
    with streams.task(0, 0) as task:
        found = [drawn()]
        with task.active():
            mine = [drawn()]
            with task.inactive():
                found.append(drawn())
            with task.active():
                mine.append(drawn())
    assert (found, mine) == (of_caller, of_task)


def check_a_model_that_is_called(streams: Any) -> None:
    """A wrapped model draws from the task's streams, however it is called and ends."""

    class Drawing(torch.nn.Module):
        def forward(self, fails: bool = False) -> float:
            return torch.rand(1 // (not fails)).item()

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: bool) -> float:
            value: float = self.module(*args)
            return value

    model: Any = Wrapper(Wrapper(Drawing()))
    with streams.task(0, 0) as task, task.active():
        expected = [torch.rand(1).item() for _ in range(4)]
    with streams.task(0, 0) as task, task.active_in_calls_of(model):
        before = digest_of_states()
        found = [model(), model.module(), model.module.module()]
        assert digest_of_states() == before
        with pytest.raises(ZeroDivisionError):
            model(True)
        assert digest_of_states() == before
        found.append(model())
    assert found == expected
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_loop_that_never_seeded_megatrons_tracker() -> None:
    run_ranks(1, in_groups, {}, check_streams_without_named_states, timeout_s=TIMEOUT_S)


def check_streams_without_named_states(_layout: Any) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rrfp.megatron.step.random_streams import RandomStreams

    get_cuda_rng_tracker().reset()
    streams = RandomStreams(torch.device("cpu"))

    def step(*, draws: bool, **arguments: bool) -> float:
        streams.start_step(**arguments)
        with streams.task(0, 0) as task, task.active():
            value = torch.rand(()).item() if draws else 0.0
        streams.finish_step()
        return value

    start = torch.get_rng_state()
    # Nothing moves where no task draws, and no evaluation moves anything.
    step(draws=False)
    step(draws=True, advances=False)
    assert start.equal(torch.get_rng_state())
    first, second = step(draws=True), step(draws=True)
    assert first != second
    torch.set_rng_state(start)
    assert [step(draws=True), step(draws=True)] == [first, second]


def test_generators_as_states_give_the_same_streams_and_stay() -> None:
    (found,) = run_ranks(1, in_groups, {}, drawn_from_both_trackers, timeout_s=TIMEOUT_S)
    of_bytes, of_generators = found
    assert of_generators == of_bytes
    assert len(set(of_bytes)) == len(of_bytes)


def drawn_from_both_trackers(_layout: Any) -> list[list[float]]:
    """The draws of two steps and of the loop between them, with a tracker that stores states by
    value, and one that stores generators, as Transformer Engine's and that for CUDA graphs do."""
    from megatron.core.tensor_parallel import random as megatron_random

    from rrfp.megatron.step.random_streams import RandomStreams

    class Keeper(type(megatron_random.get_cuda_rng_tracker())):  # type: ignore[misc]
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            outer, generator = torch.get_rng_state(), self.states_[name]
            torch.set_rng_state(generator.get_state())
            yield
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(outer)

    plain = megatron_random.get_cuda_rng_tracker()
    keeper = Keeper()
    for name, state in plain.get_states().items():
        keeper.states_[name] = torch.Generator()
        keeper.states_[name].set_state(state)
    generators, start = dict(keeper.states_), torch.get_rng_state()
    found = []
    for tracker in (plain, keeper):
        torch.set_rng_state(start)
        megatron_random._CUDA_RNG_STATE_TRACKER = tracker
        streams = RandomStreams(torch.device("cpu"))
        values: list[float] = []

        def draw(tracker: Any = tracker, values: list[float] = values) -> None:
            values.append(torch.rand(()).item())
            for name in generators:
                with tracker.fork(name):
                    values.append(torch.rand(()).item())

        for _ in range(2):
            streams.start_step()
            for microbatch in (1, 0):
                with streams.task(0, microbatch) as task, task.active():
                    draw()
            streams.finish_step()
            draw()
        found.append(values)
    assert all(keeper.states_[name] is generator for name, generator in generators.items())
    return found


# Losses for the log are the same to the bit in any order, and what is stateful is refused.


ORDERS_OF_TWO = [
    [(kind, microbatch) for kind in "FB" for microbatch in reversed(range(MICROBATCHES))],
    *(some_order(seed, "FB") for seed in range(3)),
]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_losses_of_experts(recompute: str) -> None:
    settings = {"experts": 4, "recompute": recompute}
    run_ranks(1, in_groups, settings, compare_balance_losses, settings, timeout_s=TIMEOUT_S)


def compare_balance_losses(layout: Any, settings: dict[str, Any]) -> None:
    from rrfp.megatron.step.stage import LoggedLosses

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

    for order in ORDERS_OF_TWO:
        for values, _ in balance_losses().values():
            values.zero_()
        tracked = LoggedLosses()
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
    tracked = LoggedLosses()
    for kind, microbatch in ORDERS_OF_TWO[0]:
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

    from rrfp.megatron.step.stage import LoggedLosses

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
        tracked = LoggedLosses()
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
    from rrfp.megatron.refusals import refuse_stateful

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
