"""What each microbatch of a step draws: what Megatron's own schedule would have drawn for it,
whatever runs first. Megatron's schedule is simulated here by a loop over its order of forwards."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.megatron.step.microbatch_data import CallersStates, DataHabits, StepData

Slot = tuple[int, int]
"""A chunk and the number of a microbatch."""


class NoStreams:
    """Stands for a task's random streams, of which nothing is asked here but to be there."""

    def inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def inside_calls_of(self, model: Any) -> AbstractContextManager[None]:
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
    """What each slot draws in each step, one slot after the other."""
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
    states = CallersStates()
    seed_all()
    given, habits = iterators(kind, num_chunks), DataHabits()
    for step, order in enumerate(steps):
        data = StepData(
            given, num_microbatches, habits, keeps_order=in_order, group_size=group_size
        )
        assert run_step(data, order, draws) == expected[step]
    if kind != "shuffled":
        assert CallersStates() == states


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


# What cannot be told in advance, and ends with a sentence.


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
