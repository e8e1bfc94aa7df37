"""Runs with one planted cause, and clean ones."""

import pytest

from tests.planted import alarms, clean, planted

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    "number", [15, pytest.param(500, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
def test_a_planted_cause_comes_first(number: int) -> None:
    missed = [seed for seed in range(number) if not planted(seed).is_found()]
    assert len(missed) <= 0.05 * number, missed


@pytest.mark.parametrize(
    "number", [10, pytest.param(100, marks=pytest.mark.slow)], ids=lambda number: f"{number}"
)
def test_nothing_is_wrong_with_a_clean_run(number: int) -> None:
    assert [seed for seed in range(number) if alarms(clean(seed))] == []
