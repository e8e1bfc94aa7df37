"""`rrfp bench`: what is planned, how it is run and gone on with, and what is made of the turns."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.bench.modelled import Modelled, model_entries
from rrfp.bench.plan import Asked, Plan, make_plan, read_bound
from rrfp.bench.presets import PRESETS, SCALES, preset_named
from rrfp.bench.results import ResultRow, results
from rrfp.bench.runner import BenchDir, Hosts, check, race, time_left_s
from rrfp.bench.systems import SYSTEMS
from rrfp.cli import main as cli
from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.megatron.peers import PEERS
from rrfp.megatron.settings import DispatchMode, TrainSettings
from rrfp.megatron.turns import Entry, Failure, RaceFiles, Turn, rounds
from rrfp.schedule.admission import Admit
from tests.effort import examples
from tests.races import MadeUp, tiny_plan, turn

Run = Callable[..., tuple[int, str, str]]


# What is planned.


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_its_systems_against_megatron(name: str, scale: str) -> None:
    plan = make_plan([preset_named(name, SCALES[scale])], SCALES[scale], Asked())
    assert {row.system.name for row in plan.rows} > {"megatron-1f1b"}
    for row in plan.rows:
        assert {row.entry, row.megatron} <= plan.entries.keys()
        assert row.against is None or row.against in plan.entries
        settings = plan.entries[row.entry].settings
        assert settings.layers % (settings.pp * settings.chunks) == 0
        assert settings.limit is None or settings.hold is None


def test_the_first_preset_has_all_that_people_use() -> None:
    plan = make_plan([preset_named("rq1", SCALES["laptop"])], SCALES["laptop"], Asked())
    rows = {(row.case.profile, row.system.name, row.bound, row.admit) for row in plan.rows}
    for profile in ("language", "language+lognormal:0.5", "multimodal"):
        for name, bound in [
            *((name, "") for name in ("megatron-1f1b", "megatron-interleaved", "fixed-1f1b")),
            *((f"torch-{peer}", "") for peer in PEERS),
            ("fixed-zb-h1", ""),
            *(
                (name, bound)
                for name in ("bf", "bfw", "bf-deep", "bfw-deep", "zb-v")
                for bound in ("limit 32", "hold 8", "hold 12", "hold 16")
            ),
        ]:
            assert (profile, name, bound, Admit.GIVEN) in rows
            is_sorted = (profile, name, bound, Admit.PYRAMID) in rows
            # Microbatches that cost the same have no order to choose.
            assert is_sorted == (profile == "multimodal" and bound != "")


def test_presets_share_what_they_both_run() -> None:
    both = tiny_plan("rq1", "rq6", profiles=("multimodal",))
    alone = [tiny_plan(name, profiles=("multimodal",)) for name in ("rq1", "rq6")]
    assert both.entries.keys() == alone[0].entries.keys() | alone[1].entries.keys()
    assert len(both.entries) < sum(len(plan.entries) for plan in alone)
    assert len(both.rows) == sum(len(plan.rows) for plan in alone)


def test_torchs_systems_are_laid_out_as_they_are_driven() -> None:
    peers = {system.peer: system for system in SYSTEMS.values() if system.peer}
    assert peers.keys() == PEERS.keys()
    for name, peer in PEERS.items():
        assert (peers[name].chunks, peers[name].placement) == (peer.chunks, peer.placement)


def test_what_is_asked_for_narrows_the_presets() -> None:
    plan = tiny_plan("rq1", systems=("bfw",), profiles=("language+J2",), holds=("paper", "hold 5"))
    assert [(row.system.name, row.bound) for row in plan.rows] == [
        ("megatron-1f1b", ""),
        ("bfw", "limit 32"),
        ("bfw", "hold 5"),
    ]
    assert {entry.settings.jitter for entry in plan.entries.values()} == {"J2"}


def test_a_plan_of_megatron_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="choose another --system"):
        tiny_plan("rq3", systems=("megatron-1f1b",))


@pytest.mark.parametrize(("name", "peers"), [("fb", True), ("torch-zbv", False)])
def test_a_system_without_a_row_is_named(name: str, peers: bool) -> None:
    with pytest.raises(UsageError, match=f"--system {name} makes no row"):
        tiny_plan("rq1", systems=("bf", name), peers=peers)


def test_the_length_of_tasks_is_that_of_presets_alone(tmp_path: Path) -> None:
    costs = tmp_path / "a+b.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    for profile, jitter in ((f"{costs}", "none"), (f"{costs}+J2", "J2")):
        plan = tiny_plan("rq1", systems=("bf",), profiles=(profile,))
        for entry in plan.entries.values():
            assert (entry.settings.pace, entry.settings.jitter) == (str(costs), jitter)
            assert entry.time_factor == 1.0
        with pytest.raises(UsageError, match="leave --task-ms out"):
            tiny_plan("rq1", systems=("bf",), profiles=(profile,), task_ms=5.0)
    plan = tiny_plan("rq1", systems=("bf",), profiles=("language",), task_ms=5.0)
    assert {entry.time_factor for entry in plan.entries.values()} == {0.25}


@pytest.mark.parametrize(
    ("text", "pp", "bound"),
    [
        ("paper", 8, (32, None)),
        ("limit 4", 8, (4, None)),
        ("hold 8", 4, (None, 8)),
        ("hold 1.5x", 8, (None, 12)),
        ("hold 1.5x", 3, (None, 5)),
    ],
)
def test_bounds(text: str, pp: int, bound: tuple[int | None, int | None]) -> None:
    assert read_bound(text, pp) == bound


@pytest.mark.parametrize("text", ["hold 0", "hold 0x", "hold -1", "hold many", "hold 1.5", "hold "])
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--hold takes a number"):
        read_bound(text, 8)


def test_costs_with_slow_messages_are_torchs_too(tmp_path: Path) -> None:
    costs = tmp_path / "slow.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n[links]\nlatency_s = 1e-3\n")
    plan = tiny_plan("rq1", profiles=(str(costs),))
    assert any(entry.peer for entry in plan.entries.values())
    check(plan, Hosts(), tmp_path)


# In which order turns are taken.


def entries_of(num: int, steps: int) -> list[Entry]:
    return [Entry(str(index), TrainSettings(steps=steps)) for index in range(num)]


@examples(quick=30, thorough=300)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_turn_is_taken_once_and_rounds_stay_together(
    num: int, steps: int, data: st.DataObject
) -> None:
    entries = entries_of(num, steps)
    every = [(entry.name, number) for number, entry in rounds(entries, ())]
    assert sorted(every) == sorted((str(i), number) for i in range(num) for number in range(steps))
    assert [number for _, number in every] == sorted(number for _, number in every)
    ended = data.draw(st.sets(st.sampled_from(every)))
    left = [(entry.name, number) for number, entry in rounds(entries, ended)]
    assert left == [each for each in every if each not in ended]


def test_no_entry_always_goes_first_or_after_the_same_one() -> None:
    orders = ["", "", "", ""]
    for number, entry in rounds(entries_of(4, 4), ()):
        orders[number] += entry.name
    assert len({order[0] for order in orders}) > 1
    assert len({order[order.index("0") - 1] for order in orders}) > 1


# How it is run.


def run_race(plan: Plan, out: Path, launch: MadeUp, *, retry: bool = False) -> list[Failure]:
    failures: list[Failure] = []
    bench = BenchDir(out)
    with bench.prepare(plan, force=False):
        race(plan, bench, Hosts(), launch, failures.append, retry=retry)
    return failures


def test_a_launch_runs_all_entries_of_as_many_ranks(tmp_path: Path) -> None:
    launch = MadeUp()
    plan = tiny_plan("rq1", "rq2", "rq5")
    run_race(plan, tmp_path / "o", launch)
    assert launch.launched == [(3, 1), (2, 2)]
    assert len(launch.taken) == len(set(launch.taken)) == 2 * len(plan.entries)


def test_an_interrupted_race_goes_on(tmp_path: Path) -> None:
    plan = tiny_plan("rq3")
    stop_round, stop_entry = list(rounds(list(plan.entries.values()), ()))[5]

    def stop(entry: Entry, number: int) -> KeyboardInterrupt | None:
        is_there = (number, entry.name) == (stop_round, stop_entry.name)
        return KeyboardInterrupt() if is_there else None

    first, second, third = MadeUp(stop), MadeUp(), MadeUp()
    with pytest.raises(KeyboardInterrupt):
        run_race(plan, tmp_path / "o", first)
    bench = BenchDir(tmp_path / "o")
    models = dict.fromkeys(plan.entries, Modelled((1.0,) * 2, (1.0,) * 2, None))
    assert time_left_s(plan, bench, models) > 0
    run_race(plan, tmp_path / "o", second)
    assert len(first.taken) == 5
    assert not set(first.taken) & set(second.taken)
    assert len(first.taken) + len(second.taken) == 2 * len(plan.entries)
    assert time_left_s(plan, bench, models) == 0
    run_race(plan, tmp_path / "o", third)
    assert third.launched == []


def test_half_a_line_and_what_is_no_turn_are_left_out(tmp_path: Path) -> None:
    files = RaceFiles(tmp_path)
    files.append(turn("a", 0))
    with files.turns.open("a") as file:
        file.write('[]\n{}\nnull\n{"entry": "a", "error": ""}\n{"entry": "a", "rou')
    assert files.ended() == {("a", 0)}
    files.append(turn("a", 1))
    assert files.ended() == {("a", 0), ("a", 1)}


def test_a_signal_stops_the_race_and_is_no_failure(tmp_path: Path) -> None:
    plan = tiny_plan("rq3")
    bad = next(row.entry for row in plan.rows if row.system.name == "bfw")

    def stop(entry: Entry, _: int) -> RrfpError | None:
        return StoppedError("the run was stopped by SIGTERM") if entry.name == bad else None

    with pytest.raises(StoppedError):
        run_race(plan, tmp_path / "o", MadeUp(stop))
    assert all(isinstance(each, Turn) for each in BenchDir(tmp_path / "o").ended(plan))


def test_one_command_at_a_time(tmp_path: Path) -> None:
    plan, bench = tiny_plan("rq3"), BenchDir(tmp_path / "o")
    with (
        bench.prepare(plan, force=False),
        pytest.raises(UsageError, match="another command races in"),
    ):
        bench.prepare(plan, force=True)
    bench.prepare(plan, force=False).close()


def test_other_costs_in_the_same_file_are_another_race(tmp_path: Path) -> None:
    costs, bench = tmp_path / "mine.toml", BenchDir(tmp_path / "o")
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    plan = tiny_plan("rq1", systems=("bf",), profiles=(str(costs),))
    bench.prepare(plan, force=False).close()
    bench.prepare(plan, force=False).close()
    costs.write_text("seconds = { F = 1, B = 1, W = 2 }\n")
    with pytest.raises(UsageError, match="holds another race"):
        bench.prepare(plan, force=False)


def test_an_entry_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    plan = tiny_plan("rq3")
    bad = next(row.entry for row in plan.rows if row.system.name == "bfw")

    def fail(entry: Entry, number: int) -> RrfpError | None:
        return RrfpError("rank 1 stalled\nwith a grid") if entry.name == bad and number else None

    launch = MadeUp(fail)
    failures = run_race(plan, tmp_path / "o", launch)
    assert failures == [Failure(bad, 1, "rank 1 stalled")]
    assert len(launch.taken) == 2 * len(plan.entries) - 1
    rows = rows_of(plan, BenchDir(tmp_path / "o").ended(plan))
    assert [row.error for row in rows if row.planned.entry == bad] == ["rank 1 stalled"]
    # The same command leaves it at that, and --retry tries it once more.
    same, again = MadeUp(), MadeUp()
    run_race(plan, tmp_path / "o", same)
    assert same.taken == []
    run_race(plan, tmp_path / "o", again, retry=True)
    assert again.taken == [(bad, 1)]
    assert all(row.error is None for row in rows_of(plan, BenchDir(tmp_path / "o").ended(plan)))


def test_the_logs_of_a_failure_are_kept(tmp_path: Path) -> None:
    plan = tiny_plan("rq3", systems=("bf",))
    logs = BenchDir(tmp_path / "o").race(3, 1).path / "logs"

    def fail(entry: Entry, number: int) -> RrfpError | None:
        logs.mkdir(exist_ok=True)
        (logs / "rank-1.log").write_text(f"{entry.name} {number}")
        is_bad = entry.settings.dispatch == DispatchMode.READY and entry.settings.jitter == "J1"
        return RrfpError(f"rank 1 failed: it did (see {logs}/rank-1.log)") if is_bad else None

    (failure,) = run_race(plan, tmp_path / "o", MadeUp(fail))
    log = Path(failure.error.partition("(see ")[2].removesuffix(")"))
    assert log != logs / "rank-1.log"
    assert log.read_text() == f"{failure.entry} {failure.round}"


def test_on_several_hosts_the_next_command_leaves_out_what_failed(tmp_path: Path) -> None:
    plan, bench = tiny_plan("rq3"), BenchDir(tmp_path / "o")
    bad = next(row.entry for row in plan.rows if row.system.name == "bfw")

    def fail(entry: Entry, _: int) -> RrfpError | None:
        return RrfpError("rank 1 stalled") if entry.name == bad else None

    hosts = Hosts(2, 0, "127.0.0.1:1")
    with bench.prepare(plan, force=False), pytest.raises(RrfpError, match="rank 1 stalled"):
        race(plan, bench, hosts, MadeUp(fail), lambda _: None)
    with bench.prepare(plan, force=False):
        race(plan, bench, hosts, MadeUp(fail), lambda _: None)
    ended = {each.entry for each in bench.ended(plan) if isinstance(each, Turn)}
    assert ended == plan.entries.keys() - {bad}


def test_without_megatron_there_is_no_race(tmp_path: Path) -> None:
    plan = tiny_plan("rq3")

    def fail(entry: Entry, _: int) -> RrfpError | None:
        is_native = entry.settings.dispatch == DispatchMode.MEGATRON
        return RrfpError("no memory") if is_native else None

    with pytest.raises(RrfpError, match="no memory"):
        run_race(plan, tmp_path / "o", MadeUp(fail))


def test_another_race_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    out = tmp_path / "o"
    run_race(tiny_plan("rq3"), out, MadeUp())
    bench, other = BenchDir(out), tiny_plan("rq3", steps=3)
    with pytest.raises(UsageError, match="holds another race"):
        bench.prepare(other, force=False)
    bench.prepare(other, force=True).close()
    assert bench.ended(other) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="something else than a race"):
        BenchDir(tmp_path / "mine").prepare(other, force=True)


# What is made of the turns.


def rows_of(plan: Plan, ended: list[Turn | Failure]) -> list[ResultRow]:
    models = dict.fromkeys(plan.entries, Modelled((0.5,) * 4, (0.25,) * 4, (0.8,) * 4))
    return results(plan, ended, models)


def by_system(rows: list[ResultRow]) -> dict[str, ResultRow]:
    return {row.planned.system.name: row for row in rows}


def test_ratios_are_those_of_the_same_rounds() -> None:
    plan = tiny_plan("rq1", systems=("bf",), profiles=("language",), steps=3)
    native, ours = (row.entry for row in plan.rows)
    times = {native: (2.0, 6.0, 9.0), ours: (1.0, 4.0, 3.0)}
    ended: list[Turn | Failure] = [
        turn(entry, number, seconds)
        for entry, of in times.items()
        for number, seconds in enumerate(of)
    ]
    found = by_system(rows_of(plan, ended))["bf"]
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
    plan = tiny_plan("rq1", systems=("bf", "torch-1f1b"), profiles=("language",), steps=1)
    difference = {"bf": 2e-5, "torch-1f1b": 9e-6, "megatron-1f1b": 0.0}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, difference=difference[row.system.name]) for row in plan.rows
    ]
    rows = by_system(rows_of(plan, ended))
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
    plan = tiny_plan("rq1", systems=("bf",), profiles=("language",), steps=2)
    native, ours = (row.entry for row in plan.rows)
    ended = [turn(native, 0), turn(native, 1), turn(ours, 1), turn("of nobody", 0)]
    row = by_system(rows_of(plan, [*ended]))["bf"]
    assert row.gradients_agree is None
    assert row.step_time_s is not None
    assert set(row.ratios.values()) == {None}


def test_a_void_reference_leaves_nothing_to_be_held_against() -> None:
    plan = tiny_plan("rq1", systems=("bf",), profiles=("language",), steps=1)
    native, ours = (row.entry for row in plan.rows)
    rows = by_system(rows_of(plan, [turn(native, 0, difference=1.0), turn(ours, 0)]))
    assert rows["bf"].ratio_to_megatron is None
    assert rows["bf"].ratio_to_floor is not None


def test_a_slowdown_is_against_the_same_system_without_jitter() -> None:
    plan = tiny_plan("rq3", systems=("bf",), steps=1)
    seconds = {"J0": 1.0, "J1": 1.1, "J2": 1.2, "J3": 1.5}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, seconds[row.case.jitter] * (3 if row.system.name == "bf" else 1))
        for row in plan.rows
    ]
    for row in rows_of(plan, ended):
        assert row.slowdown is not None
        assert row.slowdown.median == pytest.approx(seconds[row.planned.case.jitter] - 1)


def test_hints_are_held_against_bf_under_the_same_bound() -> None:
    plan = tiny_plan("rq4", profiles=("multimodal",), steps=1)
    seconds = {"bf": 2.0, "fb": 2.5}
    ended: list[Turn | Failure] = [
        turn(row.entry, 0, seconds.get(row.system.name, 1.0)) for row in plan.rows
    ]
    rows = by_system(rows_of(plan, ended))
    assert rows["fb"].slowdown is not None
    assert rows["fb"].slowdown.median == pytest.approx(0.25)
    assert rows["megatron-1f1b"].slowdown is None


def test_models_are_those_of_the_same_steps_and_are_kept(tmp_path: Path) -> None:
    plan = tiny_plan("rq1", systems=("bf", "torch-zbv"), profiles=("multimodal",))
    models = model_entries(plan.entries.values(), tmp_path / "models.jsonl")
    for row in plan.rows:
        model = models[row.entry]
        assert len(model.floor_s) == plan.entries[row.entry].settings.num_steps
        assert (model.simulated_s is None) == (row.system.peer is not None)
        if model.simulated_s is not None:
            pairs = zip(model.floor_s, model.simulated_s, strict=True)
            assert all(floor_s <= simulated_s for floor_s, simulated_s in pairs)
        assert all(load <= floor for load, floor in zip(model.load_s, model.floor_s, strict=True))
    with (tmp_path / "models.jsonl").open("a") as file:
        file.write("null\n{}\n")
    finished: list[None] = []
    again = model_entries(
        plan.entries.values(), tmp_path / "models.jsonl", lambda: finished.append(None)
    )
    assert again.keys() == models.keys()
    assert len(finished) == len(plan.entries)
    assert len((tmp_path / "models.jsonl").read_text().splitlines()) == len(plan.entries) + 2


def test_times_scale_with_the_length_of_a_task(tmp_path: Path) -> None:
    plan = tiny_plan("rq1", systems=("bf",), profiles=("multimodal",), steps=1)
    twice = [replace(each, time_factor=2 * each.time_factor) for each in plan.entries.values()]
    once = model_entries(plan.entries.values(), tmp_path / "once.jsonl")
    doubled = model_entries(twice, tmp_path / "twice.jsonl")
    for name, model in once.items():
        assert doubled[name].load_s == pytest.approx([2 * each for each in model.load_s], rel=1e-6)


# The command.


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "bench", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    launch = MadeUp(turned=partial(turn, over=3))
    monkeypatch.setattr("rrfp.cli.bench._launch", launch)
    return launch


@pytest.fixture
def no_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.cli.bench._draw", lambda *_: None)


NARROW = ("--scale=tiny", "--steps=2", "--out=o", "--system=bfw")
LONG_NAMES = ("--system=torch-interleaved-zb", "--system=bfw-deep", "--system=fixed-1f1b")


def test_the_json_that_others_rely_on(run: Run, made_up: MadeUp) -> None:
    code, out, err = run("rq1", *NARROW, "--profile=multimodal", "--format=json")
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    first = rows[0]
    assert first["system"] == "megatron-1f1b"
    assert (first["hint"], first["dispatch"], first["profile"]) == (
        "1f1b",
        "megatron",
        "multimodal",
    )
    assert first["step_time_s"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (first["ratio_to_megatron"], first["peak_held"]) == (1.0, 3.0)
    assert first["ratio_to_floor"] > 0
    assert first["gradients_agree"] is True
    assert {(row["hold"], row["limit"], row["admit"]) for row in rows[1:]} == {
        (hold, limit, admit)
        for hold, limit in ((None, 32), (3, None), (5, None), (6, None))
        for admit in ("given", "pyramid")
    }
    assert made_up.launched == [(3, 1)]
    assert {path.name for path in Path("o").iterdir()} >= {"rq1.svg", "rq1.png", "plan.json"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.usefixtures("made_up", "no_chart")
def test_tables_fit_80_columns(name: str, run: Run) -> None:
    long_names = LONG_NAMES if name in ("rq1", "rq6") else ()
    code, out, err = run(name, *NARROW, *long_names, "--hold=1.5x")
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert "how many times as fast as" in " ".join(out.split())


@pytest.mark.usefixtures("no_chart")
@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_work_that_did_not_fit_is_told_in_all_formats(form: str, run: Run, made_up: MadeUp) -> None:
    _, _, err = run("rq4", *NARROW, f"--format={form}")
    assert "more than 2% of the tasks took longer than its model, 3.0% in language" in err


@pytest.mark.usefixtures("no_chart")
def test_json_has_no_infinity(run: Run, made_up: MadeUp) -> None:
    made_up.turned = partial(turn, difference=float("inf"))
    code, out, err = run("rq4", *NARROW, "--format=json")
    assert code == 0, err
    assert "Infinity" not in out
    assert {row["gradient_difference"] for row in json.loads(out)["rows"]} == {None}


@pytest.mark.usefixtures("no_chart")
def test_a_stopped_race_says_how_to_go_on(run: Run, made_up: MadeUp) -> None:
    made_up.fails = lambda *_: StoppedError("the run was stopped by SIGTERM")
    code, out, err = run("rq4", *NARROW)
    assert (code, out) == (1, "")
    assert "the same command goes on" in err
    assert "stopped by SIGTERM" in err


@pytest.mark.usefixtures("made_up", "no_chart")
def test_csv_has_a_line_a_row(run: Run) -> None:
    code, out, _ = run("rq3", *NARROW, "--format=csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert {row["profile"] for row in rows} == {f"language+J{level}" for level in range(4)}
    assert all(float(row["slowdown"]) == 0 and row["step_time_s_low"] for row in rows)


@pytest.mark.usefixtures("no_chart")
def test_what_is_there_is_printed_again_without_a_race(run: Run, made_up: MadeUp) -> None:
    once, again = (run("rq4", *NARROW, "--format=json") for _ in range(2))
    assert once[1] == again[1]
    assert "are in o already" in again[2]
    assert len(made_up.launched) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("rq7",), "'rq7' is not a preset"),
        (("rq1", "--system=fast"), "'fast' is not a system"),
        (("rq1", "--profile=nothing"), "is not costs"),
        (("rq1", "--profile=language+wind:3"), "wind"),
        (("rq1", "--hold=none"), "--hold takes a number"),
        (("rq1", "--hold=banana", "--system=torch-zbv"), "--hold takes a number"),
        (("rq1", "--out=/proc/race"), "directory /proc/race cannot be made"),
        (("rq1", "--nnodes=2", "--out=o"), "--rdzv-endpoint"),
        (("rq1", "--nnodes=2", "--rdzv-endpoint=a:1"), "several hosts need --out DIR"),
        (("rq1", "--nnodes=2", "--rdzv-endpoint=a:1", "--out=o", "--force"), "remove o instead"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    arguments: tuple[str, ...], sentence: str, run: Run, made_up: MadeUp
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert list(Path.cwd().iterdir()) == []
    assert made_up.launched == []


COLUMNS = "kind,pp_rank,chunk,microbatch,seconds"


def test_costs_that_some_systems_lack_are_refused_with_the_system(
    tmp_path: Path, run: Run, made_up: MadeUp
) -> None:
    rows = [
        f"{kind},{rank},0,{microbatch},0.01"
        for kind in "FB"
        for rank in range(3)
        for microbatch in range(3)
    ]
    Path("mine.csv").write_text("\n".join((COLUMNS, *rows)))
    code, _, err = run("rq1", *NARROW, "--profile=mine.csv")
    assert code == 2
    assert "bfw limit 32 cannot race" in " ".join(err.split())
    assert "or choose others with --system" in " ".join(err.split())
    assert not Path("o").exists()
    assert made_up.launched == []


@pytest.mark.usefixtures("made_up", "no_chart")
def test_a_file_of_costs_may_be_called_like_markup(run: Run) -> None:
    rows = [
        f"{kind},{rank},0,{microbatch},0.01"
        for kind in "FB"
        for rank in range(3)
        for microbatch in range(3)
    ]
    Path("a[old].csv").write_text("\n".join((COLUMNS, *rows)))
    code, out, err = run("rq3", "--scale=tiny", "--out=o", "--system=bf", "--profile=a[old].csv")
    assert code == 0, err
    assert "a[old].csv+J1, PP 3" in out


@pytest.mark.timeout(300)
def test_every_preset_runs_at_tiny_scale(tmp_path: Path) -> None:
    """Real ranks: seven processes in two launches, which all presets share."""
    flags = ("--scale=tiny", "--steps=2", "--hold=1x", "--profile=multimodal", "--format=json")
    systems = ("megatron-interleaved", "torch-zbv", "bf", "bfw", "zb-v")
    done = subprocess.run(
        [sys.executable, "-m", "rrfp", "bench", *PRESETS, *flags, "--out=o"]
        + [f"--system={name}" for name in systems],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert {row["preset"] for row in rows} == set(PRESETS)
    assert {row["tp"] for row in rows} == {1, 2}
    assert {row["steps"] for row in rows} == {1, 2}
    for row in rows:
        assert row["error"] is None
        assert row["gradients_agree"] is True
        assert row["step_time_s"]["median"] > 0
        assert row["peak_held"] >= 1
        # No torch system, and no other admission order, adds in Megatron's order.
        is_exact = row["dispatch"] != "torch" and row["admit"] == "given"
        assert row["gradients_same"] is True or not is_exact
