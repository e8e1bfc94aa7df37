"""A training loop's own data under our schedule: every microbatch learns from what Megatron's own
schedule would have given it, and the loop's random states are moved as there."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rrfp.errors import UsageError
from rrfp.schedule.admission import pyramid
from rrfp.schedule.shape import Shape
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

NUM = 6
NUM_STEPS = 2
NUM_SAMPLES = 8
"""Fewer than the steps take: the loader begins again in mid-step."""

LAYOUTS = {
    "pp2": {"pp": 2},
    # At two ranks Megatron's own interleaving mixes up its messages over gloo.
    "pp3-c2": {"pp": 3, "chunks": 2, "layers": 6},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp2-dp2": {"pp": 2, "dp": 2},
}
SLOW = {"pp2-tp2", "pp2-dp2"}
"""Quicker tests cover most of them."""


class Trained(NamedTuple):
    """What some steps came to on one rank."""

    losses: list[list[float]]
    gradients: list[str]
    drawn: list[int]
    """The samples in the order in which they were drawn."""
    states: list[str]
    """The digest of the loop's random states after each step."""


class Samples:
    """A dataset whose samples are known by their numbers."""

    def __init__(self, rig: Rig) -> None:
        self._items = []
        for number in range(NUM_SAMPLES):
            batch = rig.batches.batch(0, number)
            batch["loss_mask"][:, : 3 * number] = 0
            self._items.append({**batch, "number": number})

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._items[number]


def shuffled(samples: Samples, num_workers: int = 0) -> Iterator[Any]:
    """A loader that shuffles by the loop's own random state, epoch after epoch."""
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=None,
        shuffle=True,
        num_workers=num_workers,
    )
    while True:
        yield from loader


def of_workers(samples: Samples) -> Iterator[Any]:
    return shuffled(samples, num_workers=1)


def of_generators(samples: Samples) -> Iterator[Any]:
    """Draws from Python's, numpy's and torch's generators, for each item."""
    while True:
        number = random.randrange(3) + np.random.randint(3) + int(torch.randint(4, ()))
        yield samples[number % NUM_SAMPLES]


KINDS: dict[str, Callable[[Samples], Iterator[Any]]] = {
    each.__name__: each for each in (shuffled, of_workers, of_generators)
}


def set_off() -> None:
    """The same random states on every rank, as loops seed them; Megatron's tracker, too."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def states() -> str:
    numpys: Any = np.random.get_state()
    found = (random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().tolist())
    return hashlib.sha256(repr(found).encode()).hexdigest()


class Saved(NamedTuple):
    """What a checkpoint holds of the random states."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    named: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> "Saved":
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        named = {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()}
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), named)

    def restore(self) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        get_cuda_rng_tracker().set_states(dict(self.named))


class Loop:
    """A training loop on one rank, with iterators of its own for every chunk."""

    def __init__(self, rig: Rig, schedule: Callable[..., list[Any]], kind: str) -> None:
        self._rig = rig
        self._schedule = schedule
        samples = Samples(rig)
        self.iterators = [KINDS[kind](samples) for _ in rig.gpt.chunks]
        self.found = Trained([], [], [], [])

    def step(self, arrange: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """One step; `arrange` puts its items in another order."""
        iterators: list[Any] = list(self.iterators)
        if arrange is not None:
            iterators = [iter(arrange([next(each) for _ in range(NUM)])) for each in self.iterators]

        def with_data(**given: Any) -> list[Any]:
            return self._schedule(**{**given, "data_iterator": iterators})

        def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
            item = next(data_iterator)
            self.found.drawn.append(item["number"])
            return three_value_step(iter([item]), model)

        outcome = self._rig.run(with_data, forward_step, num_microbatches=NUM)
        self.found.losses.append(outcome.losses)
        self.found.gradients.append(outcome.gradients_sha256)
        self.found.states.append(states())


def train(rig: Rig, schedule: Callable[..., Any], kind: str, **arrangement: Any) -> Trained:
    set_off()
    loop = Loop(rig, schedule, kind)
    for _ in range(NUM_STEPS):
        loop.step(**arrangement)
    if hasattr(schedule, "close"):
        schedule.close()
    return loop.found


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


@pytest.mark.parametrize("layout", by_layout(LAYOUTS))
def test_the_data_are_megatrons(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SMALL, **layout, "microbatches": NUM}
    num_ranks = settings["pp"] * settings.get("tp", 1) * settings.get("dp", 1)
    reverse = backwards_in_reverse(
        tmp_path / "reverse.csv", Shape(settings["pp"], NUM, settings.get("chunks", 1))
    )
    found = run_ranks(num_ranks, on_rigs, compare, settings, reverse, timeout_s=TIMEOUT_S)
    if "chunks" not in layout:
        # Inputs meet the labels of their own samples: both stages draw the same.
        assert found[0] == found[-1]


def compare(layout: Any, settings: dict[str, Any], reverse: str) -> list[list[int]]:
    """Compare ours with Megatron's own on this rank; the samples that each kind draws."""
    rig = Rig(settings, layout)
    has_chunks = layout.chunks > 1
    drawn = []
    for kind in KINDS if layout.world_size == 2 else ("shuffled", "of_generators"):
        expected = train(rig, native(), kind)
        drawn.append(expected.drawn)
        assert len(set(expected.states)) > 1
        # Workers take seconds to start and to end.
        for hint in ("bfw",) if kind == "of_workers" else ("bf", "bfw", "f-first", reverse):
            found = train(rig, ours(hint=hint), kind)
            in_order = not has_chunks and hint != reverse
            assert same(found, expected, in_order=in_order), (kind, hint)
        if not has_chunks and kind != "of_workers":

            def arrange(items: list[Any]) -> list[Any]:
                order = pyramid([float(item["number"]) for item in items])
                return [items[number] for number in order]

            expected = train(rig, native(), kind, arrange=arrange)
            for hint in ("bfw", reverse):
                admitting = ours(hint=hint, admit="pyramid", admit_cost=number_of)
                found = train(rig, admitting, kind)
                assert same(found, expected, in_order=hint != reverse), (kind, hint)
    return drawn


def number_of(item: Any) -> float:
    return float(item["number"])


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
        ({"admit": "pyramid"}, "has no __next__, and admit 'pyramid' .*; leave admit out"),
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
