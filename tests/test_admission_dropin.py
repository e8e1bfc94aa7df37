"""The drop-in admits a step's items in another order than they come in: it learns what Megatron's
own schedule learns from items that come in that order, whoever has data."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.data import Batch
from rrfp.megatron.dispatching import DispatchSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import pyramid
from rrfp.schedule.dispatcher import Dispatch
from tests.ranks import run_ranks
from tests.rigs import Outcome, Rig, native, on_rigs, ours, three_value_step
from tests.training import SMALL

NUM = 6
VARIED = {**SMALL, "pp": 2, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}

pytestmark = pytest.mark.timeout(310)


class Unhashable:
    """A cost function that no table of schedules can be keyed by."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, item: Batch) -> float:
        return 1.0


def test_settings_that_sort_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="admit 'given' sorts none; choose admit 'pyramid'"):
        DispatchSettings(admit_cost="tokens")
    for wrong in (3, ["tokens"], Unhashable()):
        with pytest.raises(UsageError, match="it must be a name, or a function of an item that"):
            DispatchSettings(admit="pyramid", admit_cost=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="admit is 3; it must be a name or a path, as text"):
        DispatchSettings(admit=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'heavy' is not an admission order"):
        ours(admit="heavy")
    with pytest.raises(UsageError, match="'weight' is not a microbatch's cost"):
        ours(admit="pyramid", admit_cost="weight")


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        pytest.param({"pp": 3, "layers": 3}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 3, "chunks": 2, "layers": 6}, marks=pytest.mark.slow),
    ],
    ids=lambda layout: "-".join(f"{name}{value}" for name, value in layout.items()),
)
def test_it_is_as_if_the_items_came_in_that_order(layout: dict[str, Any]) -> None:
    settings = {**VARIED, **layout}
    num_ranks = settings["pp"] * settings.get("tp", 1) * settings.get("dp", 1)
    for done in run_ranks(num_ranks, on_rigs, admit, settings, timeout_s=300):
        assert done


def admit(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    items = list(rig.data(NUM))
    order = pyramid([batch["tokens"].numel() for batch in items])
    assert order != list(range(NUM))
    given = run(rig, native(), items)
    expected = run(rig, native(), [items[number] for number in order])
    assert given.gradients_sha256 != expected.gradients_sha256
    assert sorted(given.losses) == sorted(expected.losses)
    for chosen, step in (
        ({}, three_value_step),
        ({"hint": "bfw"}, megatron_lm_step),
        ({"dispatch": Dispatch.FIXED}, megatron_lm_step),
        # Every rank finds other numbers, but those of the replica's first rank count.
        ({"admit_cost": FirstRankKnows(layout)}, three_value_step),
    ):
        schedule = ours(admit="pyramid", **chosen)
        for _ in range(2):
            assert run(rig, schedule, items, step) == expected, chosen
        with torch.no_grad():
            evaluated = run(rig, schedule, items, step, forward_only=True)
        assert evaluated.losses == given.losses
        schedule.close()
    if layout.world_size == layout.pp == 2:
        follow_a_file(rig, items, order, expected)
        fail_and_go_on(rig, items, expected)
    return True


def run(
    rig: Rig,
    schedule: Callable[..., list[Any]],
    items: Sequence[Any],
    step: Callable[..., Any] = three_value_step,
    **arguments: Any,
) -> Outcome:
    """A step on iterators of their own for every chunk, where this rank is given data at all."""
    layout = rig.layout
    is_given = step is not megatron_lm_step or (
        layout.pp_rank in (0, layout.last_stage_pp_rank) and layout.tp_rank == 0
    )

    def called(**given: Any) -> list[Any]:
        iterators = [iter(items) if is_given else None for _ in rig.gpt.chunks]
        return schedule(**{**given, "data_iterator": iterators, **arguments})

    return rig.run(called, step, num_microbatches=NUM)


def megatron_lm_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """As in Megatron-LM: the first and the last stage have data, on the first rank of a
    tensor-parallel group, which tells the others."""
    from megatron.core import parallel_state

    if not (model.module.pre_process or model.module.post_process):
        return model(None, None, None), None
    group = parallel_state.get_tensor_model_parallel_group()
    told: list[Any] = [None if data_iterator is None else next(data_iterator)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    return three_value_step(iter(told), model)


class FirstRankKnows:
    """A cost that only the first rank of a replica tells rightly."""

    def __init__(self, layout: Any) -> None:
        self._knows = layout.pp_rank == layout.tp_rank == 0

    def __call__(self, item: Batch) -> torch.Tensor:
        return torch.tensor(item["tokens"].numel() if self._knows else 0)


def follow_a_file(rig: Rig, items: list[Batch], order: list[int], expected: Outcome) -> None:
    """Its lines are those of the steps that train."""
    lines = [" ".join(map(str, each)) for each in (order, range(NUM))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        schedule = ours(admit=file.name)
    assert run(rig, schedule, items) == expected
    with torch.no_grad():
        given = run(rig, schedule, items, forward_only=True)
    assert run(rig, schedule, items).losses == given.losses
    assert run(rig, schedule, items) == expected
    is_first = rig.layout.pp_rank == rig.layout.tp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match=f"admits {NUM} microbatches and step 3 has 2" if is_first else "could not order",
    ):
        rig.run(schedule, num_microbatches=2)
    dist.barrier()
    fail_without_data(rig, schedule)


def fail_without_data(rig: Rig, schedule: Callable[..., list[Any]]) -> None:
    is_first = rig.layout.pp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match="is given no data iterator; pass one" if is_first else "could not order",
    ):
        rig.run(lambda **given: schedule(**{**given, "data_iterator": None}))
    dist.barrier()


def fail_and_go_on(rig: Rig, items: list[Batch], expected: Outcome) -> None:
    """The first rank says what is wrong, and the others that it was the first rank."""

    def fails(_: Batch) -> int:
        raise ArithmeticError("too heavy")

    by_fails, plain = ours(admit="pyramid", admit_cost=fails), ours(admit="pyramid")
    is_first = rig.layout.pp_rank == 0
    for schedule, given, complaint in (
        (by_fails, items, "the cost fails of microbatch 0 raised ArithmeticError: too heavy"),
        (plain, items[:3], "data iterator ended after 3 microbatches"),
        (plain, [(item, 1) for item in items], "a tuple, has none of tokens, input_ids, text, by"),
    ):
        with pytest.raises(
            UsageError if is_first else PeerLostError,
            match=complaint if is_first else "first rank of this replica could not order",
        ):
            run(rig, schedule, given)
        dist.barrier()
    fail_without_data(rig, plain)
    assert run(rig, plain, items) == expected
    plain.close()
