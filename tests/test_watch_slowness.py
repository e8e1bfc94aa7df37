"""Who became slow: the statistics alone, and simulated runs with one cause or none."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp.schedule.shape import Shape
from rrfp.watch.alarms import Kind
from rrfp.watch.figures import extra_work
from rrfp.watch.slowness import WINDOW, Against, Changes, Detector, Where
from tests.watched import (
    Setting,
    alerts_in,
    clean,
    figures_of,
    first_alert,
    planted,
    record,
)

EVEN = Setting(Shape(4, 8), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)


Grid = tuple[int, int, int]


def taken(
    detector: Detector, shape: Grid, shifts: dict[int, float], where: Grid, num_steps: int
) -> list[Changes]:
    """What a detector says of samples that scatter by 1%, where one place is shifted from some
    steps on."""
    rng = np.random.default_rng(3)
    found, shift = [], 0.0
    for step in range(num_steps):
        shift = shifts.get(step, shift)
        sample = rng.normal(0, 0.01, shape)
        sample[where] += np.log1p(shift)
        found.append(detector.take(step, sample, np.full(shape, 0.6)))
    return found


def test_a_slow_place_is_told_once_with_its_rise_and_its_first_step() -> None:
    changes = taken(Detector(1, 4, 1), (1, 4, 1), {20: 0.5}, (0, 2, 0), 60)
    told = [(step, slow) for step, each in enumerate(changes) for slow in each.slow]
    assert len(told) == 1
    step, slow = told[0]
    assert 20 + 8 <= step + 1 <= 20 + WINDOW
    assert (slow.where, slow.against, slow.since) == (Where(None, 2), Against.PAST, 20)
    assert slow.rise == pytest.approx(0.5, abs=0.03)


def test_what_recovers_is_told_and_may_become_slow_again() -> None:
    detector = Detector(1, 4, 1)
    changes = taken(detector, (1, 4, 1), {20: 0.5, 40: 0.0, 60: 0.4}, (0, 1, 0), 75)
    events = [
        (step, "slow" if each.slow else "recovered")
        for step, each in enumerate(changes)
        if each.slow or each.recovered
    ]
    assert [name for _, name in events] == ["slow", "recovered", "slow"]
    assert 40 + 8 <= events[1][0] + 1 <= 40 + WINDOW
    assert 60 + 8 <= events[2][0] + 1 <= 60 + WINDOW
    assert [slow.since for slow in detector.active] == [60]


def test_it_stays_slow_for_as_long_as_it_is() -> None:
    """What is usual does not come to be what is slow."""
    detector = Detector(1, 4, 1)
    changes = taken(detector, (1, 4, 1), {20: 0.3}, (0, 1, 0), 300)
    assert sum(len(each.slow) + len(each.recovered) for each in changes) == 1
    assert detector.active


@pytest.mark.parametrize("num_slow", [1, 5])
def test_a_few_long_steps_are_no_slowness(num_slow: int) -> None:
    changes = taken(Detector(3, 4, 2), (3, 4, 2), {20: 2.0, 20 + num_slow: 0.0}, (1, 2, 0), 60)
    assert not any(each.slow for each in changes)


def test_a_member_is_told_from_its_tensor_parallel_peers() -> None:
    changes = taken(Detector(2, 2, 4), (2, 2, 4), {0: 0.2}, (1, 0, 3), 12)
    (slow,) = [slow for each in changes for slow in each.slow]
    assert (slow.where, slow.against) == (Where(1, 0, 3), Against.MEMBERS)


def test_peers_tell_what_was_slow_from_the_first_step() -> None:
    changes = taken(Detector(3, 4, 1), (3, 4, 1), {0: 0.3}, (2, 1, 0), 12)
    (slow,) = [slow for each in changes for slow in each.slow]
    assert (slow.where, slow.against, slow.since) == (Where(2, 1), Against.PEERS, 0)


def test_longer_data_are_no_place_s_fault() -> None:
    """From step 20 on everything takes twice as long, and in one replica of two lengths scatter."""
    rng = np.random.default_rng(5)
    detector = Detector(2, 4, 1)
    for step in range(80):
        sample = rng.normal(0, 0.01, (2, 4, 1)) + (np.log(2) if step >= 20 else 0.0)
        sample[1] += rng.normal(0, 0.2)
        changes = detector.take(step, sample, np.full((2, 4, 1), 0.6))
        assert not changes.slow


def test_what_costs_nothing_is_not_told() -> None:
    detector = Detector(1, 4, 1)
    for step in range(40):
        sample = np.zeros((1, 4, 1))
        sample[0, 1] += 1.0 if step >= 20 else 0.0
        assert not detector.take(step, sample, np.full((1, 4, 1), 0.01)).slow
    assert detector.leading is not None


def test_a_place_that_is_missing_counts_as_its_peers() -> None:
    detector = Detector(2, 3, 1)
    for step in range(40):
        sample = np.zeros((2, 3, 1))
        sample[1, 2] = np.nan
        assert detector.take(step, sample, np.full((2, 3, 1), 0.5)) == Changes()


def test_a_single_rank_has_nobody_to_be_compared_with() -> None:
    detector = Detector(1, 1, 1)
    for step in range(40):
        sample = np.full((1, 1, 1), float(step > 20))
        assert detector.take(step, sample, np.ones((1, 1, 1))) == Changes()


@pytest.mark.parametrize(
    "setting",
    [
        replace(EVEN, cause=Kind.RANK, stage=2, times=1.3),
        replace(EVEN, cause=Kind.RANK, stage=0, replica=1, times=1.15, replicas=2),
        replace(EVEN, cause=Kind.STAGE, stage=3, times=1.5, replicas=3),
        replace(EVEN, cause=Kind.REPLICA, replica=1, times=1.2, replicas=2),
        replace(EVEN, cause=Kind.LINK, link=(2, 1), times=2, message_ns=5_000),
    ],
    ids=lambda setting: f"{setting.cause}-{setting.replicas}",
)
def test_a_cause_is_named_within_ten_steps(setting: Setting) -> None:
    alert = first_alert(setting)
    assert alert is not None
    assert setting.is_named(alert), alert.text
    assert setting.onset <= alert.step < setting.onset + WINDOW
    assert abs(alert.alarm.since_step - setting.onset) <= 1
    assert alert.alarm.rise == pytest.approx(setting.times - 1, abs=0.1)


def test_a_tensor_parallel_group_is_named_as_one() -> None:
    """Its ranks run each other's tasks, so nobody can tell which of them is slow."""
    setting = replace(EVEN, cause=Kind.RANK, stage=1, times=1.5, replicas=2, members=2)
    alert = first_alert(setting)
    assert alert is not None
    assert alert.alarm.place == "ranks 4, 5 (stage 1, replica 0, on simulated)"
    told = alert.alarm.text.removeprefix(alert.alarm.place)
    assert told == " take 48% longer than their peers in other replicas, since step 12"


def test_several_chunks_a_rank_are_no_stages() -> None:
    shape = Shape(2, 4, num_chunks=2)
    setting = replace(EVEN, shape=shape, hint="bf-deep", cause=Kind.RANK, stage=1, times=1.5)
    alert = first_alert(setting)
    assert alert is not None
    assert alert.alarm.place == "rank 1 (pipeline rank 1, replica 0, on simulated)"


def test_uneven_layers_are_told_as_work_and_never_as_slow() -> None:
    recording = record(replace(EVEN, layers=(2, 2, 3, 2)), 30)
    assert alerts_in(recording) == []
    extra = extra_work(figures_of(recording)[-WINDOW:])
    assert max(extra, key=lambda stage: extra[stage]) == 2
    assert extra[2] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_run_raises_no_alarm(seed: int) -> None:
    assert alerts_in(record(clean(seed), 40)) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_500_causes_are_named_within_ten_steps() -> None:
    missed = []
    for seed in range(500):
        setting = planted(seed)
        alert = first_alert(setting)
        if alert is None or not setting.is_named(alert) or alert.step < setting.onset:
            missed.append((seed, setting, alert))
    assert len(missed) <= 25, missed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_100_clean_runs_raise_no_alarm() -> None:
    found = [(seed, told) for seed in range(100) if (told := alerts_in(record(clean(seed), 60)))]
    assert found == []
