"""A training loop's own data under our schedule: random draws of the forward step, and objects that
are no iterators. That microbatches get Megatron's data stands in test_learns_the_same.py."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from tests.loops import (
    NUM,
    NUM_SAMPLES,
    NUM_STEPS,
    Loop,
    Samples,
    Saved,
    Trained,
    set_off,
    train,
)
from tests.ranks import run_ranks
from tests.rigs import (
    TIMEOUT_S,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    three_value_step,
)
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

SLOW = {"pp2-tp2"}
"""A quicker layout covers most of it."""


def same(found: Trained, expected: Trained, *, in_order: bool = True) -> bool:
    """The numbers of the samples are compared in the order in which they ran, where that is
    Megatron's."""
    if in_order:
        return found == expected
    return found._replace(drawn=sorted(found.drawn)) == expected._replace(
        drawn=sorted(expected.drawn)
    )


def by_layout(names: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(layout, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, layout in names.items()
    ]


@pytest.mark.parametrize("layout", by_layout({"pp2": {"pp": 2}, "pp2-tp2": {"pp": 2, "tp": 2}}))
def test_dropout_does_not_follow_the_data(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SMALL, **layout, "microbatches": NUM, "dropout": 0.2}
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, NUM))
    num_ranks = 2 * settings.get("tp", 1)
    found = run_ranks(num_ranks, on_rigs, drop_out, settings, reverse, timeout_s=TIMEOUT_S)
    assert found[0] == found[-1]


def drop_out(layout: Any, settings: dict[str, Any], reverse: str) -> list[list[int]]:
    """With dropout all hints learn the same from the same data, and go on alike from a checkpoint;
    the samples that each kind draws."""
    rig = Rig(settings, layout)
    drawn = []
    for kind in ("shuffled", "of_generators"):
        expected = train(rig, ours(), kind)
        assert len(set(expected.gradients)) == NUM_STEPS
        drawn.append(expected.drawn)
        for hint in ("bfw", "f-first", reverse):
            found = train(rig, ours(hint=hint), kind)
            assert same(found, expected, in_order=hint != reverse), (kind, hint)
    # A loader cannot be saved in mid-epoch; one that only has the random states can.
    set_off()
    schedule = ours(hint="bfw")
    loop = Loop(rig, schedule, "of_generators")
    loop.step()
    saved = Saved.now()
    loop.step()
    loop.step()
    saved.restore()
    resumed = Loop(rig, schedule, "of_generators")
    resumed.step()
    resumed.step()
    schedule.close()
    assert resumed.found.losses == loop.found.losses[1:]
    assert resumed.found.gradients == loop.found.gradients[1:]
    assert resumed.found.states == loop.found.states[1:]
    return drawn


# What else a loop draws.


@pytest.mark.parametrize(
    "layout", by_layout({"pp2": {"pp": 2}, "pp3-c2": {"pp": 3, "chunks": 2, "layers": 6}})
)
def test_noise_of_the_forward_step(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SMALL, **layout, "microbatches": NUM}
    num_ranks, num_chunks = settings["pp"], settings.get("chunks", 1)
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(num_ranks, NUM, num_chunks))
    for found in run_ranks(num_ranks, on_rigs, add_noise, settings, reverse, timeout_s=TIMEOUT_S):
        natives, in_order, out_of_order, resumed = found
        assert in_order[1:] == in_order[:-1]
        # Out of order, or with several chunks, it belongs to the tasks, whatever their timing.
        assert out_of_order[0] == out_of_order[1] != natives
        assert in_order[0] == (natives if num_chunks == 1 else out_of_order[0])
        assert resumed == in_order[0][1:]


def add_noise(layout: Any, settings: dict[str, Any], reverse: str) -> list[Any]:
    """What steps with random masks come to: Megatron's own, ours in order, ours out of order, and
    the second step once more, from a checkpoint."""
    rig = Rig(settings, layout)

    def noisy_step(data_iterator: Iterator[Any], model: Any) -> Any:
        item: Any = next(data_iterator)
        kept = torch.rand_like(item["loss_mask"]).round()
        item = {**item, "loss_mask": kept}
        return three_value_step(iter([item]), model)

    def steps(schedule: Any, num_steps: int = 2, *, saves: bool = False) -> list[Any]:
        # The data move no random state: the noise alone does.
        samples = Samples(rig)
        iterators = [itertools.cycle(samples[n] for n in range(NUM)) for _ in rig.gpt.chunks]

        def with_data(**given: Any) -> Any:
            return schedule(**{**given, "data_iterator": iterators})

        found = []
        for step in range(num_steps):
            found.append(rig.run(with_data, noisy_step, num_microbatches=NUM))
            if saves and step == 0:
                saved.append(Saved.now())
        if hasattr(schedule, "close"):
            schedule.close()
        return found

    def afresh(schedule: Any, **how: bool) -> list[Any]:
        set_off()
        return steps(schedule, **how)

    saved: list[Saved] = []
    found = [
        afresh(native()),
        [afresh(ours(hint="bf"), saves=True), afresh(ours(hint="bfw")), afresh(ours())],
        [afresh(ours(hint=reverse, dispatch=dispatch)) for dispatch in ("ready", "fixed")],
    ]
    saved[0].restore()
    # With settings of its own: it has seen nothing of the loop yet.
    return [*found, steps(ours(hint="bf", hold=NUM), num_steps=1)]


# Objects that are no iterators.


class Indexed:
    """Draws by a method of its own, and has no `__next__`."""

    def __init__(self, rig: Rig) -> None:
        self._samples = Samples(rig)
        self._next = 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        sample = self._samples[self._next % NUM_SAMPLES]
        self._next += 1
        return {key: sample[key] for key in keys}


def test_objects_that_are_no_iterators(tmp_path: Path) -> None:
    settings = {**SMALL, "pp": 2, "microbatches": NUM}
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, NUM))
    assert all(run_ranks(2, on_rigs, draw_otherwise, settings, reverse, timeout_s=TIMEOUT_S))


def draw_otherwise(layout: Any, settings: dict[str, Any], reverse: str) -> bool:
    rig = Rig(settings, layout)
    handed: set[int] = set()

    def indexed_step(data: Any, model: Any) -> Any:
        handed.add(id(data))
        return three_value_step(
            iter([data.get_next(["tokens", "position_ids", "labels", "loss_mask"])]), model
        )

    def twice_step(data: Any, model: Any) -> Any:
        first: Any = next(data)
        item: Any = {**first, "loss_mask": next(data)["loss_mask"]}
        return three_value_step(iter([item]), model)

    def run(schedule: Any, step: Any, given: Any, **arguments: Any) -> Any:
        def with_data(**others: Any) -> Any:
            return schedule(**{**others, "data_iterator": given, **arguments})

        return rig.run(with_data, step, num_microbatches=NUM)

    def twice() -> Iterator[Any]:
        return iter([Samples(rig)[number % NUM_SAMPLES] for number in range(2 * NUM)])

    expected = run(native(), indexed_step, Indexed(rig))
    expected_twice = run(native(), twice_step, twice())
    for hint in ("bf", "bfw", "f-first", "1f1b"):
        schedule = ours(hint=hint)
        given = Indexed(rig)
        handed.clear()
        assert run(schedule, indexed_step, [given]) == expected
        assert handed == {id(given)}
        assert run(schedule, twice_step, twice()) == expected_twice
        schedule.close()
    for settings_, sentence in (
        (
            {"hint": reverse},
            r"a Indexed, has no __next__, and .*reverse.csv takes microbatches in another order .*"
            r"\(bf, fb, b-first, f-first, bfw, bf-deep, bfw-deep, 1f1b, gpipe, zb-h1\)",
        ),
        ({"admit": "pyramid"}, "has no __next__, and admit 'pyramid' .*; leave it out"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run(ours(**settings_), never_called, Indexed(rig))
    # An evaluation admits no other order.
    schedule = ours(admit="pyramid")
    with torch.no_grad():
        looked = run(schedule, indexed_step, Indexed(rig), forward_only=True)
    assert looked.losses == expected.losses
    schedule.close()
    return True


def never_called(*_: object) -> None:
    raise AssertionError("a task has begun")
