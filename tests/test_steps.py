"""Whole random steps: nothing stalls, every bound holds, and every decision is the right one."""

from collections import Counter

import pytest
from hypothesis import given

from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import AgreementRule, Dispatch
from rrfp.schedule.shape import Placement
from tests.cases import (
    MAX_CHUNKS,
    MAX_MEMBERS,
    MAX_MICROBATCHES,
    MAX_RANKS,
    Case,
    cases,
    connected,
    random_case,
)
from tests.effort import examples
from tests.invariants import check_step
from tests.virtual_time import History


def check(case: Case, history: History) -> None:
    check_step(history, limit=case.bound_on_depth, hold=case.bound_on_held)


@pytest.mark.timeout(1800)
@examples(quick=200, thorough=20_000)
@given(cases())
def test_no_step_stalls_and_every_bound_holds(case: Case) -> None:
    check(case, case.play(case.dispatchers()))


@pytest.mark.timeout(1800)
@examples(quick=60, thorough=2_000)
@given(cases())
def test_every_answer_is_the_specification_s(case: Case) -> None:
    check(case, case.play(case.checked_dispatchers()))


@examples(quick=25, thorough=250)
@given(cases())
def test_the_same_stimuli_give_the_same_step(case: Case) -> None:
    first, second = (case.play(case.dispatchers()) for _ in range(2))
    assert first == second


def test_random_steps_are_of_every_kind() -> None:
    drawn = [random_case(seed) for seed in range(3000)]
    seen = Counter(
        kind
        for case in drawn
        for kind in (
            case.hint.name,
            case.dispatch,
            case.w,
            case.rule,
            case.shape.placement,
            ("ranks", case.shape.num_ranks),
            ("chunks", case.shape.num_chunks),
            ("members", case.num_members),
            ("groups", len(case.groups)),
            ("limit", case.bound_on_depth),
            ("spare slots", (case.bound_on_held or 0) - case.shape.num_chunks),
        )
    )
    assert {*HINTS, "random"} <= seen.keys()
    assert {
        Dispatch.READY,
        Dispatch.FIXED,
        *WeightGradients,
        *AgreementRule,
        *Placement,
    } <= seen.keys()
    assert {("limit", 1), ("limit", 2), ("spare slots", 0), ("spare slots", 1)} <= seen.keys()
    assert {("groups", number) for number in range(1, MAX_MEMBERS + 1)} <= seen.keys()
    largest = {"ranks": MAX_RANKS, "chunks": MAX_CHUNKS, "members": MAX_MEMBERS}
    for name, most in largest.items():
        numbers = {kind[1] for kind in seen if kind[0] == name}
        assert numbers == set(range(1, most + 1))
    assert max(case.shape.num_microbatches for case in drawn) == MAX_MICROBATCHES
    # Replicas that are coupled on some stages only.
    assert any(len({str(sets) for sets in case.collectives}) > 1 for case in drawn)


def test_who_shares_a_collective_anywhere_is_in_one_group() -> None:
    assert connected(3, []) == [[0], [1], [2]]
    assert connected(4, [[[0, 1], [2, 3]]]) == [[0, 1], [2, 3]]
    assert connected(4, [[[0, 1], [2], [3]], [[0], [1, 3], [2]]]) == [[0, 1, 3], [2]]
    assert connected(4, [[[0], [1], [2, 3]], [[0, 1], [2], [3]], [[0], [1, 2], [3]]]) == [
        [0, 1, 2, 3]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_the_largest_size_is_right(seed: int) -> None:
    case = random_case(seed, is_largest=True)
    check(case, case.play(case.dispatchers()))
