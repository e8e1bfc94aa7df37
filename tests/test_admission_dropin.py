"""The drop-in admits a step's items in another order than they come in: it learns what Megatron's
own schedule learns from items that come in that order, whoever has data."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import pyramid
from rrfp.train.data.batches import Batch
from tests.loops import NUM, run_on_items
from tests.ranks import run_ranks
from tests.rigs import Outcome, Rig, native, on_rigs, ours
from tests.training import SMALL

VARIED = {**SMALL, "pp": 2, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}

pytestmark = pytest.mark.timeout(310)


class Unhashable:
    """A cost function that no table of schedules can be keyed by."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, item: Batch) -> float:
        return 1.0


def test_settings_that_sort_nothing_are_refused() -> None:
    with pytest.raises(
        UsageError, match="admit 'given' does not sort them; choose admit 'pyramid'"
    ):
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


def test_a_file_and_what_fails() -> None:
    assert all(run_ranks(2, on_rigs, follow_and_fail, VARIED, timeout_s=300))


def follow_and_fail(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    items = list(rig.data(NUM))
    order = pyramid([batch["tokens"].numel() for batch in items])
    expected = run_on_items(rig, native(), [items[number] for number in order])
    follow_a_file(rig, items, order, expected)
    fail_and_go_on(rig, items, expected)
    return True


def follow_a_file(rig: Rig, items: list[Batch], order: list[int], expected: Outcome) -> None:
    """Its lines are those of the steps that train."""
    lines = [" ".join(map(str, each)) for each in (order, range(NUM))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        schedule = ours(admit=file.name)
    assert run_on_items(rig, schedule, items) == expected
    with torch.no_grad():
        given = run_on_items(rig, schedule, items, forward_only=True)
    assert run_on_items(rig, schedule, items).losses == given.losses
    assert run_on_items(rig, schedule, items) == expected
    is_first = rig.layout.pp_rank == rig.layout.tp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match=f"admits {NUM} microbatches and step 3 has 2" if is_first else "could not order",
    ):
        rig.run(schedule, num_microbatches=2)
    dist.barrier()
    fail_without_data(rig, schedule)
    schedule.close()


def fail_without_data(rig: Rig, schedule: Callable[..., list[Any]]) -> None:
    is_first = rig.layout.pp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match="has no data iterator; pass one" if is_first else "could not order",
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
        (
            plain,
            [(item, 1) for item in items],
            "a tuple, has none of tokens, input_ids, text, whose size",
        ),
    ):
        with pytest.raises(
            UsageError if is_first else PeerLostError,
            match=complaint if is_first else "first rank of this replica could not order",
        ):
            run_on_items(rig, schedule, given)
        dist.barrier()
    fail_without_data(rig, plain)
    assert run_on_items(rig, plain, items) == expected
    plain.close()
    by_fails.close()
