"""What is made of the turns of a race."""

from dataclasses import replace
from pathlib import Path

import pytest

from rrfp.race.entries import Failure, Turn
from rrfp.race.results import ResultRow
from rrfp.race.runner import model_entries
from tests.races import rows_of, tiny_lineup, turn


def by_system(rows: list[ResultRow]) -> dict[str, ResultRow]:
    return {row.lineup_row.system.name: row for row in rows}


def test_ratios_are_those_of_the_same_rounds() -> None:
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("language",), steps=3)
    native, ours = (row.entry for row in lineup.rows)
    times = {native: (2.0, 6.0, 9.0), ours: (1.0, 4.0, 3.0)}
    ended: list[Turn | Failure] = [
        turn(entry, number, seconds)
        for entry, of in times.items()
        for number, seconds in enumerate(of)
    ]
    found = by_system(rows_of(lineup, ended))["bf"]
    assert found.step_time_s is not None
    assert found.step_time_s.median == 3.0
    # The medians of 2, 1.5 and 3, of 2, 8 and 6, and so on; 6 / 3 would be that of the medians.
    medians = {name: each.median for name, each in found.ratios.items() if each is not None}
    assert medians == pytest.approx(
        {
            "ratio_to_megatron": 2.0,
            "ratio_to_floor": 6.0,
            "ratio_to_load": 12.0,
            "ratio_to_simulated": 3.75,
        }
    )
    ratio = found.ratio_to_megatron
    assert ratio is not None
    assert (ratio.low, ratio.high) == (1.5, 3.0)


def test_a_row_whose_gradients_differ_is_void() -> None:
    lineup = tiny_lineup("rq1", systems=("bf", "torch-1f1b"), profiles=("language",), steps=1)
    difference = {"bf": 2e-5, "torch-1f1b": 9e-6, "megatron-1f1b": 0.0}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, difference=difference[row.system.name]) for row in lineup.rows
    ]
    rows = by_system(rows_of(lineup, ended))
    assert {name: row.gradients_agree for name, row in rows.items()} == {
        "megatron-1f1b": True,
        "torch-1f1b": True,
        "bf": False,
    }
    assert set(rows["bf"].ratios.values()) == {None}
    assert rows["bf"].as_json()["ratio_to_megatron"] is None
    assert rows["torch-1f1b"].ratio_to_megatron is not None
    assert rows["torch-1f1b"].gradients_same is False


def test_a_row_without_its_first_round_shows_no_ratio() -> None:
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("language",), steps=2)
    native, ours = (row.entry for row in lineup.rows)
    ended = [turn(native, 0), turn(native, 1), turn(ours, 1), turn("of nobody", 0)]
    row = by_system(rows_of(lineup, [*ended]))["bf"]
    assert row.gradients_agree is None
    assert row.step_time_s is not None
    assert set(row.ratios.values()) == {None}


def test_a_void_reference_leaves_nothing_to_be_held_against() -> None:
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("language",), steps=1)
    native, ours = (row.entry for row in lineup.rows)
    rows = by_system(rows_of(lineup, [turn(native, 0, difference=1.0), turn(ours, 0)]))
    assert rows["bf"].ratio_to_megatron is None
    assert rows["bf"].ratio_to_floor is not None


def test_a_slowdown_is_against_the_same_system_without_jitter() -> None:
    lineup = tiny_lineup("rq3", systems=("bf",), steps=1)
    seconds = {"J0": 1.0, "J1": 1.1, "J2": 1.2, "J3": 1.5}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, seconds[row.case.jitter] * (3 if row.system.name == "bf" else 1))
        for row in lineup.rows
    ]
    for row in rows_of(lineup, ended):
        assert row.slowdown is not None
        assert row.slowdown.median == pytest.approx(seconds[row.lineup_row.case.jitter] - 1)


def test_hints_are_held_against_bf_under_the_same_bound() -> None:
    lineup = tiny_lineup("rq4", profiles=("multimodal",), steps=1)
    seconds = {"bf": 2.0, "fb": 2.5}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, seconds.get(row.system.name, 1.0)) for row in lineup.rows
    ]
    rows = by_system(rows_of(lineup, ended))
    assert rows["fb"].slowdown is not None
    assert rows["fb"].slowdown.median == pytest.approx(0.25)
    assert rows["megatron-1f1b"].slowdown is None


def test_models_are_those_of_the_same_steps_and_are_kept(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq1", systems=("bf", "torch-zbv"), profiles=("multimodal",))
    models = model_entries(lineup.entries.values(), tmp_path / "models.jsonl")
    for row in lineup.rows:
        model = models[row.entry]
        assert len(model.floor_s) == lineup.entries[row.entry].settings.num_steps
        assert (model.simulated_s is None) == (row.system.peer is not None)
        if model.simulated_s is not None:
            pairs = zip(model.floor_s, model.simulated_s, strict=True)
            assert all(floor_s <= simulated_s for floor_s, simulated_s in pairs)
        assert all(load <= floor for load, floor in zip(model.load_s, model.floor_s, strict=True))
    with (tmp_path / "models.jsonl").open("a") as file:
        file.write("null\n{}\n")
    finished: list[None] = []
    again = model_entries(
        lineup.entries.values(), tmp_path / "models.jsonl", lambda: finished.append(None)
    )
    assert again.keys() == models.keys()
    assert len(finished) == len(lineup.entries)
    assert len((tmp_path / "models.jsonl").read_text().splitlines()) == len(lineup.entries) + 2


def test_times_scale_with_the_length_of_a_task(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("multimodal",), steps=1)
    twice = [replace(each, time_factor=2 * each.time_factor) for each in lineup.entries.values()]
    once = model_entries(lineup.entries.values(), tmp_path / "once.jsonl")
    doubled = model_entries(twice, tmp_path / "twice.jsonl")
    for name, model in once.items():
        assert doubled[name].load_s == pytest.approx([2 * each for each in model.load_s], rel=1e-6)
