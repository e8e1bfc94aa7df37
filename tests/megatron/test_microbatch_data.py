"""Each microbatch of a step draws the data that it has under Megatron's own schedule, in any order
of tasks. A loop over Megatron's order of forwards simulates its schedule here."""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.megatron.step.microbatch_data import DataHabits, LoopRandomStates, StepData
from rrfp.planning.item_costs import resolve_cost
from rrfp.schedule.shape import Shape
from tests.e2e.ranks import run_ranks
from tests.megatron.training import (
    NUM,
    NUM_SAMPLES,
    NUM_STEPS,
    SMALL,
    TIMEOUT_S,
    Loop,
    Rig,
    Samples,
    Saved,
    Trained,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
    set_off,
    three_value_step,
    train,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


Slot = tuple[int, int]
"""A chunk and the number of a microbatch."""


class NoStreams:
    """Stands for a task's random streams, of which nothing is asked here but to be there."""

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def inactive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def active_in_calls_of(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def counting(chunk: int) -> Iterator[Any]:
    number = 0
    while True:
        yield chunk, number
        number += 1


def from_python(_: int) -> Iterator[Any]:
    while True:
        yield random.random()


def from_numpy(_: int) -> Iterator[Any]:
    while True:
        yield np.random.rand()


def from_torch(_: int) -> Iterator[Any]:
    while True:
        yield torch.rand(()).item()


def shuffled(_: int) -> Iterator[Any]:
    """As a loader that shuffles: it moves the loop's random state at the start of an epoch only."""
    while True:
        samples = list(range(5))
        random.Random(int(torch.randint(2**31, ()))).shuffle(samples)
        yield from samples


KINDS: dict[str, Callable[[int], Iterator[Any]]] = {
    each.__name__: each for each in (counting, from_python, from_numpy, from_torch, shuffled)
}


def iterators(kind: str, num_chunks: int) -> list[Iterator[Any]]:
    if kind == "shared":
        return [counting(0)] * num_chunks
    return [KINDS[kind](chunk) for chunk in range(num_chunks)]


def in_megatrons_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[Slot]:
    """As `get_schedule_table` of megatron.core.pipeline_parallel.schedules has it."""
    found: list[Slot] = []
    start = 0
    while start < num_microbatches:
        stop = min(start + group_size, num_microbatches)
        for chunk in range(num_chunks):
            found += [(chunk, number) for number in range(start, stop)]
        start = stop
    return found


def natively(
    given: Sequence[Any], steps: Sequence[Sequence[Slot]], draws: Callable[[Slot], int]
) -> list[dict[Slot, list[Any]]]:
    """The draws of each microbatch in each step, one after the other."""
    return [
        {slot: [next(given[slot[0]]) for _ in range(draws(slot))] for slot in step}
        for step in steps
    ]


def run_step(
    data: StepData, order: Sequence[Slot], draws: Callable[[Slot], int]
) -> dict[Slot, list[Any]]:
    found = {}
    for chunk, number in order:
        with data.of(chunk, number, None, NoStreams()) as iterator:  # type: ignore[arg-type]
            found[chunk, number] = [next(iterator) for _ in range(draws((chunk, number)))]
    return found


@st.composite
def cases(draw: st.DrawFn, *, in_order: bool) -> tuple[int, int, int, list[list[Slot]]]:
    """Microbatches, chunks, Megatron's groups, and for three steps an order that a rank may run:
    a microbatch enters a chunk after it was in the ones before."""
    num_chunks = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 6))
    steps = []
    for _ in range(3):
        entering = list(range(num_microbatches))
        if not in_order:
            entering = draw(st.permutations(entering))
        done = [0] * num_chunks
        order = []
        while done[-1] < num_microbatches:
            free = [
                chunk
                for chunk in range(num_chunks)
                if done[chunk] < (num_microbatches if chunk == 0 else done[chunk - 1])
            ]
            chunk = draw(st.sampled_from(free))
            order.append((chunk, entering[done[chunk]]))
            done[chunk] += 1
        steps.append(order)
    return num_microbatches, num_chunks, draw(st.integers(1, 6)), steps


def check(
    kind: str,
    case: tuple[int, int, int, list[list[Slot]]],
    draws: Callable[[Slot], int],
    *,
    in_order: bool,
) -> None:
    num_microbatches, num_chunks, group_size, steps = case
    table = in_megatrons_order(num_microbatches, num_chunks, group_size)
    seed_all()
    expected = natively(iterators(kind, num_chunks), [table] * len(steps), draws)
    states = LoopRandomStates()
    seed_all()
    given, habits = iterators(kind, num_chunks), DataHabits()
    for step, order in enumerate(steps):
        data = StepData(
            given, num_microbatches, habits, keeps_order=in_order, group_size=group_size
        )
        assert run_step(data, order, draws) == expected[step]
    if kind != "shuffled":
        assert LoopRandomStates() == states


@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@given(case=cases(in_order=True))
def test_in_order_every_microbatch_draws_what_it_draws_natively(kind: str, case: Any) -> None:
    check(kind, case, lambda _: 1, in_order=True)


@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@given(case=cases(in_order=False))
def test_out_of_order_too(kind: str, case: Any) -> None:
    check(kind, case, lambda _: 1, in_order=False)


@pytest.mark.parametrize("kind", ["counting", "shared"])
@given(case=cases(in_order=True))
def test_a_microbatch_may_draw_twice(kind: str, case: Any) -> None:
    check(kind, case, lambda _: 2, in_order=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_microbatch_may_draw_twice_from_the_loops_states(kind: str) -> None:
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (1, 2), (1, 3)]
    check(kind, (4, 2, 2, [order] * 3), lambda _: 2, in_order=True)


@given(case=cases(in_order=False), speaking=st.sets(st.integers(0, 2)))
def test_a_chunk_that_does_not_draw_leaves_its_iterator_alone(
    case: Any, speaking: set[int]
) -> None:
    for in_order in (False, True):
        if not in_order or all(order == sorted(order, key=lambda s: s[1]) for order in case[3]):
            check("counting", case, lambda slot: int(slot[0] in speaking), in_order=in_order)


@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@given(case=cases(in_order=True))
def test_some_microbatches_may_draw_nothing(kind: str, case: Any) -> None:
    if case[1] == 1 or kind == "counting":
        check(kind, case, lambda slot: slot[1] % 2, in_order=True)


def test_a_microbatch_that_ran_without_data_leaves_its_item_to_the_next() -> None:
    data = StepData([counting(0)], 3, DataHabits(), keeps_order=False, group_size=1)
    found = run_step(data, [(0, 1), (0, 0), (0, 2)], lambda slot: slot[1] != 1)
    assert found == {(0, 1): [], (0, 0): [(0, 0)], (0, 2): [(0, 1)]}


def test_a_chunk_that_draws_nothing_may_be_given_an_empty_iterator() -> None:
    given = [from_torch(0), iter(())]
    data = StepData(given, 4, DataHabits(), keeps_order=True, group_size=2)
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1), (1, 2), (1, 3)]
    seed_all()
    expected = [torch.rand(()).item() for _ in range(4)]
    seed_all()
    found = run_step(data, order, lambda slot: 1 - slot[0])
    assert [found[0, number] for number in range(4)] == [[value] for value in expected]


# What is handed on.


class Indexed:
    """An object that a loop draws from in its own way, as slime's `get_next(keys)`."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def get_next(self, keys: list[str]) -> dict[str, int]:
        self.num_drawn += 1
        return dict.fromkeys(keys, self.num_drawn)


@pytest.mark.parametrize("make", [Indexed, lambda: counting(0), lambda: range(4)])
def test_the_loops_own_object_is_handed_on_in_order(make: Callable[[], Any]) -> None:
    given = make()
    data = StepData([given], 2, DataHabits(), keeps_order=True, group_size=1)
    for number in range(2):
        with data.of(0, number, None, NoStreams()) as handed:  # type: ignore[arg-type]
            assert handed is given


def test_of_several_chunks_what_is_no_iterator_is_handed_on() -> None:
    objects: list[Any] = [Indexed(), Indexed(), None]
    data = StepData(objects, 2, DataHabits(), keeps_order=True, group_size=2)
    for number in range(2):
        for chunk, each in enumerate(objects):
            with data.of(chunk, number, None, NoStreams()) as handed:  # type: ignore[arg-type]
                assert handed is each


def test_an_object_that_draws_from_the_loops_states_stops_where_chunks_are_not_in_order() -> None:
    data = StepData([Indexed(), Indexed()], 4, DataHabits(), keeps_order=True, group_size=2)
    with (
        pytest.raises(UsageError, match=r"chunk 0 draws .* a Indexed, have no __next__"),
        data.of(0, 0, None, NoStreams()),  # type: ignore[arg-type]
    ):
        torch.rand(())


def test_noise_beside_items_that_are_there_already_is_the_tasks() -> None:
    """Chunks that are given a range, as in Megatron's own tests, or nothing."""
    given = [range(4), None]
    data = StepData(given, 4, DataHabits(), keeps_order=True, group_size=2)
    for chunk, number in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (1, 2), (1, 3)]:
        with data.of(chunk, number, None, NoStreams()) as handed:  # type: ignore[arg-type]
            assert handed is given[chunk]
            torch.rand(())


# Errors that can be detected only during a step.


def test_more_than_one_item_a_microbatch_cannot_be_viewed_out_of_order() -> None:
    data = StepData([counting(0)], 4, DataHabits(), keeps_order=False, group_size=1)
    with pytest.raises(UsageError, match="asked for another item for microbatch 3"):
        run_step(data, [(0, 3)], lambda _: 2)


def test_a_chunk_that_was_assumed_to_draw_and_does_not() -> None:
    data = StepData([from_torch(0), from_torch(1)], 4, DataHabits(), keeps_order=True, group_size=2)
    run_step(data, [(0, 0), (0, 1), (0, 2)], lambda _: 1)
    with pytest.raises(UsageError, match=r"took 0 of the 1 items .* microbatch 0 of chunk 1"):
        run_step(data, [(1, 0)], lambda _: 0)


@pytest.mark.parametrize("in_order", [True, False])
def test_an_iterator_that_ends_too_early(in_order: bool) -> None:
    data = StepData([iter(range(2))], 4, DataHabits(), keeps_order=in_order, group_size=1)
    with pytest.raises(UsageError, match="ended after 2 microbatches of this step"):
        run_step(data, [(0, number) for number in range(4)], lambda _: 1)


# Items that are weighed before any is used.


def test_items_are_seen_before_any_is_used() -> None:
    data = StepData([counting(0)], 4, DataHabits(), keeps_order=False, group_size=1)
    assert data.first(0, 4) == [(0, number) for number in range(4)]
    found = run_step(data, [(0, number) for number in (3, 0, 1, 2)], lambda _: 1)
    assert found == {(0, number): [(0, number)] for number in range(4)}
    with pytest.raises(UsageError, match="ended after 5 microbatches of this step"):
        StepData([iter(range(5))], 6, DataHabits(), keeps_order=False, group_size=1).first(0, 6)


def test_draws_are_made_as_far_as_they_are_needed() -> None:
    iterator = counting(0)
    data = StepData([iterator], 6, DataHabits(), keeps_order=False, group_size=1)
    run_step(data, [(0, 2), (0, 0)], lambda _: 1)
    assert next(iterator) == (0, 3)


# A training loop's own data under our schedule: random draws of the forward step, and objects that
# are no iterators. test_learns_the_same.py shows that microbatches get Megatron's data.


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
    # A loader cannot be saved during an epoch; one that only has the random states can.
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
    """The results of steps with random masks: Megatron's own, rrfp's in order and out of order, and
    the second step again from a checkpoint."""
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


class IndexedSamples:
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

    expected = run(native(), indexed_step, IndexedSamples(rig))
    expected_twice = run(native(), twice_step, twice())
    for hint in ("bf", "bfw", "f-first", "1f1b"):
        schedule = ours(hint=hint)
        given = IndexedSamples(rig)
        handed.clear()
        assert run(schedule, indexed_step, [given]) == expected
        assert handed == {id(given)}
        assert run(schedule, twice_step, twice()) == expected_twice
        schedule.close()
    for settings_, sentence in (
        (
            {"hint": reverse},
            r"a IndexedSamples, has no __next__, and .*reverse.csv takes microbatches in another "
            r"order .*\(bf, fb, b-first, f-first, bfw, bf-deep, bfw-deep, 1f1b, gpipe, zb-h1\)",
        ),
        ({"admit": "pyramid"}, "has no __next__, and admit 'pyramid' .*; leave it out"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run(ours(**settings_), never_called, IndexedSamples(rig))
    # An evaluation admits no other order.
    schedule = ours(admit="pyramid")
    with torch.no_grad():
        looked = run(schedule, indexed_step, IndexedSamples(rig), forward_only=True)
    assert looked.losses == expected.losses
    schedule.close()
    return True


def never_called(*_: object) -> None:
    raise AssertionError("a task has begun")


# What an item of a step weighs, and what is said of one that has no weight.


TEXT = {"tokens": torch.zeros(2, 7, dtype=torch.int64)}
PICTURES = {"tokens": torch.zeros(1, 10, dtype=torch.int64), "patches": torch.zeros(4, 192)}
NO_PICTURE = {"tokens": torch.zeros(1, 3, dtype=torch.int64), "patches": torch.zeros(0, 192)}


@pytest.mark.parametrize(
    ("name", "weights"),
    [(None, [14, 14, 3]), ("work", [14, 14, 3]), ("tokens", [14, 6, 3])],
)
def test_names(name: str | None, weights: list[float]) -> None:
    assert resolve_cost(name).weigh([TEXT, PICTURES, NO_PICTURE]) == weights


def test_patches_are_those_of_images() -> None:
    assert resolve_cost("patches").weigh([PICTURES, NO_PICTURE]) == [4, 0]
    with pytest.raises(UsageError, match="a dict, has no 'patches' to count; choose another"):
        resolve_cost("patches").weigh([TEXT])


@pytest.mark.parametrize("key", ["tokens", "input_ids", "text"])
def test_items_of_other_loops(key: str) -> None:
    assert resolve_cost("work").weigh([{key: np.zeros((3, 4)), "other": None}]) == [12]


@pytest.mark.parametrize("item", [torch.zeros(3), (TEXT,), {}, {"labels": torch.zeros(3)}, None, 7])
def test_other_items_ask_for_a_function(item: Any) -> None:
    with pytest.raises(UsageError, match="set admit_cost to a function that takes an item and"):
        resolve_cost("work").weigh([item])


@pytest.mark.parametrize(
    "number", [3, 3.0, True, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor([3.0])]
)
def test_a_function_gives_any_number(number: Any) -> None:
    (weight,) = resolve_cost(lambda _: number).weigh([None])
    assert weight == float(number)
    assert type(weight) is float


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (float("nan"), "is nan; give a finite number"),
        (float("-inf"), "is -inf"),
        (torch.tensor(float("inf")), "is inf"),
        (10**400, "is 1000"),
        ("3", "is a str; give a finite number"),
        (None, "is a NoneType"),
        (3j, "is a complex"),
        ([3], "is a list"),
        (torch.zeros(2), "raised RuntimeError: "),
    ],
)
def test_what_is_no_number_is_refused(found: Any, told: str) -> None:
    def weigh(item: Any) -> Any:
        return found if item else 1

    with pytest.raises(UsageError, match=f"the cost weigh of microbatch 2 {told}") as error:
        resolve_cost(weigh).weigh([False, False, True])
    assert len(str(error.value)) < 200


def test_a_failure_of_the_function_is_raised() -> None:
    class Heavy:
        def __call__(self, item: Any) -> float:
            raise ValueError("no\nsuch luck")

    with pytest.raises(
        UsageError,
        match="the cost Heavy of microbatch 0 raised ValueError: no; correct the function",
    ):
        resolve_cost(Heavy()).weigh([TEXT])


def test_a_function_of_a_module_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scales.py").write_text("def weigh(item):\n    return 7\n\nweight = 3\n")
    assert resolve_cost("scales:weigh").weigh([TEXT]) == [7]
    assert resolve_cost("operator:length_hint").weigh([[1, 2]]) == [2]
    Path("ends.py").write_text("import sys\n\nsys.exit('usage: ends FILE')\n")
    Path("fails.py").write_text("def weigh(item:\n")
    for cost, told in (
        ("weigh", "'weigh' is not a microbatch's cost; choose work, tokens, patches, or MODULE:"),
        ("scales:weigh:item", "is not a microbatch's cost"),
        ("scales.py", "'scales.py' is not a microbatch's cost"),
        ("scales:height", "scales has no function 'height'; name one that takes an item"),
        ("scales:weight", "scales has no function 'weight'"),
        ("none:weigh", "cannot be imported: ModuleNotFoundError: No module named 'none'"),
        (".:weigh", "cannot be imported: "),
        ("ends:weigh", "cannot be imported: SystemExit: usage: ends FILE"),
        ("fails:weigh", "cannot be imported: SyntaxError: "),
    ):
        with pytest.raises(UsageError, match=re.escape(told)) as error:
            resolve_cost(cost)
        assert "\n" not in str(error.value)
