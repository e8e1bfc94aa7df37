"""Tests of balancing a global batch over replicas: the algorithm, its files, and balanced costs."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rrfp.cli.simulate.row_options import parse_rows
from rrfp.cli.simulate.rows import settings_of
from rrfp.errors import UsageError
from rrfp.inputs import resolve_balancing
from rrfp.megatron.settings import DispatchSettings
from rrfp.planning.modeled_costs import BalancedCosts, ModeledSteps, times_by_rank
from rrfp.planning.trials import Setting, run_settings, with_budget
from rrfp.schedule.admission import (
    Admit,
    AdmitAcross,
    Times,
    balance_batch,
    equal_times,
    format_step,
    parse_assignments,
)
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.jitter import NO_JITTER, parse_jitter
from rrfp.train.checks import check_settings
from rrfp.train.pacing import make_pace
from rrfp.train.settings import TrainSettings


def items_of(seed: int, num: int, num_ranks: int) -> list[Times]:
    """Draw items with two lengths: one is the time of the first rank, the other of all others."""
    drawn = random.Random(seed)
    lengths = [(drawn.lognormvariate(0, 1), drawn.lognormvariate(0, 0.5)) for _ in range(num)]
    return [[images] + [text] * (num_ranks - 1) for images, text in lengths]


def score(items: list[Times]) -> float:
    """Return twice the estimated time of a replica: its load plus half of its heaviest item."""
    return 2 * max(map(sum, zip(*items, strict=True))) + max(map(sum, items))


def worst(items: list[Times], shares: list[list[int]]) -> float:
    return max(score([items[number] for number in share]) for share in shares)


def best_of_two(items: list[Times]) -> float:
    numbers = range(len(items))
    return min(
        worst(items, [list(share), [each for each in numbers if each not in share]])
        for share in combinations(numbers, len(items) // 2)
    )


def best_of_three(items: list[Times]) -> float:
    numbers = set(range(len(items)))
    num = len(items) // 3
    return min(
        worst(items, [list(one), list(two), sorted(numbers - {*one} - {*two})])
        for one in combinations(sorted(numbers), num)
        for two in combinations(sorted(numbers - {*one}), num)
    )


def test_every_item_is_assigned_once_in_equal_numbers() -> None:
    for seed in range(20):
        items = items_of(seed, 24, 3)
        for num_replicas in (1, 2, 3, 4, 8, 24):
            shares = balance_batch(items, num_replicas)
            assert sorted(number for share in shares for number in share) == list(range(24))
            assert {len(share) for share in shares} == {24 // num_replicas}
            assert all(share == sorted(share) for share in shares)
            assert balance_batch(items, num_replicas) == shares


def test_the_assignment_is_close_to_the_best() -> None:
    of_two, of_three = [], []
    for seed in range(12):
        items = items_of(seed, 10, 3)
        of_two.append(worst(items, balance_batch(items, 2)) / best_of_two(items))
        items = items_of(seed, 9, 4)
        of_three.append(worst(items, balance_batch(items, 3)) / best_of_three(items))
    for ratios in (of_two, of_three):
        assert min(ratios) == 1
        assert max(ratios) < 1.12
        assert sum(ratios) / len(ratios) < 1.03


def test_a_heavy_item_counts_in_addition_to_the_load() -> None:
    # By load only, 12 + 5 + 1 + 1 and 6 + 5 + 5 + 1 would be best.
    items = equal_times([12, 1, 1, 1, 6, 5, 5, 5], 4)
    shares = balance_batch(items, 2)
    loads = [sum(items[number][0] for number in share) for share in shares]
    with_heavy = next(replica for replica, share in enumerate(shares) if 0 in share)
    assert loads[with_heavy] < loads[1 - with_heavy]


def test_equal_items_are_divided_equally() -> None:
    assert {len(share) for share in balance_batch(equal_times([0.0] * 8, 2), 4)} == {2}
    assert {len(share) for share in balance_batch(equal_times([3.0] * 8, 2), 4)} == {2}


def test_files_are_read_back(tmp_path: Path) -> None:
    lines = [[[0, 3], [2, 1]], [[3, 2], [1, 0]]]
    path = tmp_path / "assignments.csv"
    path.write_text("".join(map(format_step, lines)) + "\n0,1;2,3\n")
    listed = resolve_balancing(str(path))
    assert not isinstance(listed, AdmitAcross)
    found = [listed.of_step(step, 2, 2) for step in range(4)]
    assert found == [
        ((0, 3), (2, 1)),
        ((3, 2), (1, 0)),
        ((0, 1), (2, 3)),
        ((0, 3), (2, 1)),
    ]
    with pytest.raises(UsageError, match="2 microbatches to each of 2 replicas, and step 1 has 4"):
        listed.of_step(1, 2, 4)
    assert resolve_balancing("replicas") is AdmitAcross.REPLICAS
    with pytest.raises(UsageError, match="'ranks' does not say how to balance a global batch"):
        resolve_balancing("ranks")
    with pytest.raises(UsageError, match="cannot read the assignment file"):
        resolve_balancing(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n \n", "mine assigns nothing; write a line of items"),
        ("0 1; 2", "mine, line 1 assigns 1 items to one replica and 2 to another"),
        ("0 1; ;", "mine, line 1 assigns 0 items to one replica and 2 to another"),
        ("0 1; 2 4", "line 1: '4' is not one of the 4 items; write their numbers, from 0 to 3"),
        ("0 1; 2 3\n0 1; 2 -1", "line 2: '-1' is not one of the 4 items"),
        ("0 1; 2 2", "line 1: 2 is assigned twice; assign each item once"),
        (f"0 {'9' * 50}", "'99999999999999999999...' is not one of the 2 items"),
    ],
)
def test_invalid_files_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_assignments(text, "mine")


V = Shape(4, 8, 2, Placement.V)


def test_balanced_costs_combine_all_replicas() -> None:
    given = preset("multimodal")
    balanced = BalancedCosts(given, 3)
    shares = balanced.assignment(V, 7)
    steps = [given.step(V, 7, replica) for replica in range(3)]
    assert {number // 8 for number in shares[0]} == {0, 1, 2}
    for replica, share in enumerate(shares):
        found = balanced.step(V, 7, replica)
        assert found.sizes is not None
        for place, number in enumerate(share):
            own, index = steps[number // 8], number % 8
            assert own.sizes is not None
            for stage in range(8):
                assert found.times.forward[stage][place] == own.times.forward[stage][index]
                assert found.sizes.activations[stage][place] == own.sizes.activations[stage][index]
    times = [time for step in steps for time in times_by_rank(step.times, V)]
    balanced_worst = max(score([times[number] for number in share]) for share in shares)
    given_worst = max(score(times[first : first + 8]) for first in (0, 8, 16))
    assert balanced_worst < given_worst


def test_unknown_costs_cannot_be_balanced() -> None:
    class Unknown:
        def step(self, *place: object) -> object:
            return replace(preset("uniform").step(V, 0, 0), is_known=False)

    costs: Costs = BalancedCosts(Unknown(), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="balances by what is known before the step, and these"):
        costs.step(V, 0, 0)


def test_a_paced_run_has_the_assignments_of_the_simulator(tmp_path: Path) -> None:
    shape = TrainSettings(pp=4, microbatches=8, chunks=2, placement="v").shape
    costs = BalancedCosts(preset("multimodal"), 2, None, 100)
    first, second = (
        ModeledSteps(costs, NO_JITTER, Admit.PYRAMID, 100, shape, replica) for replica in range(2)
    )
    shares = [first.assignment(step) for step in range(3)]
    assert shares == [second.assignment(step) for step in range(3)]
    for step, of_step in enumerate(shares):
        for own, asked in zip(of_step, costs.assignment(shape, 100 + step), strict=True):
            assert sorted(own) == list(asked)
            assert own != sorted(own)
    listed = parse_assignments("".join(map(format_step, shares)), "file")
    again = BalancedCosts(preset("multimodal"), 2, listed, 100)
    repeated = make_pace(again, NO_JITTER, Admit.GIVEN, 100, shape, 1, 1)
    assert repeated is not None
    assert repeated.modeled is not None
    assert [repeated.modeled.assignment(step) for step in range(3)] == shares


def rows_of(num_replicas: int, seeds: range) -> list[float]:
    """Return the mean step times in seconds of given and of balanced items, both with a pyramid."""
    policy = Policy(HINTS["zb-v"], None, Dispatch.READY, None, Fraction(8))
    policy, shape = fitted(policy, Shape(8, 32, 2, Placement.V))
    given = preset("multimodal")
    settings = [
        Setting(
            shape=shape,
            policy=policy,
            costs=costs,
            jitter=parse_jitter("lognormal:0.1"),
            admit=Admit.PYRAMID,
            num_replicas=num_replicas,
        )
        for costs in (given, BalancedCosts(given, num_replicas))
    ]
    return [row.mean_s for row in run_settings(settings, seeds)]


def test_balancing_saves_time() -> None:
    given, balanced = rows_of(4, range(30_000, 30_006))
    assert given / balanced > 1.1


@pytest.mark.slow
def test_balancing_saves_as_much_as_documented() -> None:
    for num_replicas, least in ((4, 1.10), (8, 1.14)):
        given, balanced = rows_of(num_replicas, range(40_000, 40_020))
        assert given / balanced > least


SIZES = {"pp": 2, "layers": 4, "microbatches": 4}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "--admit-across replicas balances over data-parallel replicas and there is 1"),
        ({"dp": 2, "admit": "plan"}, "and --admit-across replicas assigns it others; choose"),
        ({"dp": 2, "admit": "mine.csv"}, "other microbatches than --admit mine.csv orders"),
        (
            {"dp": 2, "admit_across": "mine.csv", "admit": "pyramid"},
            "file of --admit-across mine.csv says in which order microbatches enter; leave",
        ),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**{**SIZES, "admit_across": "replicas", **settings}))


def test_balancing_accepts_an_admission_cost() -> None:
    settings = {"dp": 2, "admit_across": "replicas", "admit_cost": "tokens"}
    check_settings(TrainSettings(**SIZES, **settings))
    DispatchSettings(admit_across="replicas", admit_cost="tokens")


def test_dispatch_settings_refuse_the_same_combinations() -> None:
    wrong: dict[str, Any]
    for wrong, complaint in (
        ({"admit_across": 3}, "admit_across is 3; it must be a name or a path"),
        ({"admit_across": "replicas", "admit": "plan"}, "than admit 'plan' orders; choose admit"),
        ({"admit_across": "a.csv", "admit": "pyramid"}, "in which order microbatches enter; leave"),
        ({"admit_across": "a.csv", "admit_cost": "work"}, "does not sort them; choose admit"),
    ):
        with pytest.raises(UsageError, match=complaint):
            DispatchSettings(**wrong)


def test_rows_of_the_simulator_are_balanced(tmp_path: Path) -> None:
    listed = tmp_path / "mine.csv"
    listed.write_text("7 6 5 4 3 2 1 0\n")
    flags = {"pp": "4", "microbatches": "8", "costs": "multimodal", "hint": "bfw"}
    asked = parse_rows(
        flags, ["dp=4 admit=pyramid", "dp=4 admit=pyramid admit-across=replicas"], []
    )
    assert [each.label for each in asked] == [
        "dp 4 pyramid",
        "dp 4 pyramid admit-across replicas",
    ]
    assert asked[1].described()["admit_across"] == "replicas"
    given, balanced = run_settings(settings_of(asked, recorded=False), range(1, 9))
    assert given.mean_s > balanced.mean_s
    # The same multiple of 1F1B's peak gives both rows the same memory.
    rows = [f"dp=4 hold=1.0x admit-across={across}" for across in AdmitAcross]
    settings = settings_of(parse_rows(flags, rows, []), recorded=False)
    given_hold, balanced_hold = (with_budget(each, range(5)).policy.hold for each in settings)
    assert given_hold == balanced_hold
    for row, complaint in (
        ("dp=1", "in the row dp=1: --admit-across replicas balances over data-parallel replicas"),
        (f"dp=2 admit={listed}", "mine.csv lists microbatches as the data give them, and"),
    ):
        with pytest.raises(UsageError, match=complaint):
            settings_of(
                parse_rows({**flags, "admit-across": "replicas"}, [row], []), recorded=False
            )
