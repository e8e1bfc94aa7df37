"""A race of many turns: whose turn it is, how it is run, interrupted and gone on with."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.race import rank as ranks_of_race
from rrfp.race.entries import Entry, Failure, RaceFiles, Turn, rounds
from rrfp.race.lineup import Lineup, RaceOptions, line_up, read_bound
from rrfp.race.presets import PRESETS, SCALES
from rrfp.race.results import ResultRow
from rrfp.race.runner import BenchDir, Hosts, ModeledTimes, check, model_entries, race, time_left_s
from rrfp.race.systems import PEERS, SYSTEMS, Project
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import Bytes, Dispatch, Hold, ShareOf1F1B
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.trace.run_dir import RunDir
from rrfp.train.settings import TrainSettings
from tests.products.races import MadeUp, rows_of, tiny_lineup, turn
from tests.properties.cases import examples


def entries_of(num: int, steps: int) -> list[Entry]:
    return [Entry(str(index), TrainSettings(steps=steps)) for index in range(num)]


@examples(quick=30, thorough=300)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_turn_runs_once_and_rounds_stay_together(
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


def test_a_rank_that_is_done_waits_for_the_last_one() -> None:
    """Time after the last task counts like time before a rank's own entry."""
    ns = torch.tensor(
        [[0, 8, 5, 1, 0, 3, 10, 0, 70], [1, 10, 6, 2, 1, 4, 10, 1, 50]], dtype=torch.float64
    ) * torch.tensor([10**9] * 5 + [1] * 4)
    (entry,) = entries_of(1, 1)
    assert ranks_of_race.turn_of(entry, 0, ns) == Turn(
        "0",
        0,
        10.0,
        5.5,
        (1 + 2 + 2 + 1) / 2,
        0.5,
        4.0,
        num_tasks=20,
        num_over=1,
        peak_held_bytes=70,
    )


# How it is run.


def run_race(lineup: Lineup, out: Path, launch: MadeUp, *, retry: bool = False) -> list[Failure]:
    failures: list[Failure] = []
    bench = BenchDir(out)
    with bench.prepare(lineup, force=False):
        race(lineup, bench, Hosts(), launch, failures.append, retry=retry)
    return failures


def test_a_launch_runs_all_entries_of_as_many_ranks(tmp_path: Path) -> None:
    launch = MadeUp()
    lineup = tiny_lineup("rq1", "rq2", "rq5")
    run_race(lineup, tmp_path / "o", launch)
    assert launch.launched == [(3, 1), (2, 2)]
    assert len(launch.taken) == len(set(launch.taken)) == 2 * len(lineup.entries)


def test_an_interrupted_race_goes_on(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq3")
    stop_round, stop_entry = list(rounds(list(lineup.entries.values()), ()))[5]

    def stop(entry: Entry, number: int) -> KeyboardInterrupt | None:
        is_there = (number, entry.name) == (stop_round, stop_entry.name)
        return KeyboardInterrupt() if is_there else None

    first, second, third = MadeUp(stop), MadeUp(), MadeUp()
    with pytest.raises(KeyboardInterrupt):
        run_race(lineup, tmp_path / "o", first)
    bench = BenchDir(tmp_path / "o")
    models = dict.fromkeys(lineup.entries, ModeledTimes((1.0,) * 2, (1.0,) * 2, None))
    assert time_left_s(lineup, bench, models) > 0
    run_race(lineup, tmp_path / "o", second)
    assert len(first.taken) == 5
    assert not set(first.taken) & set(second.taken)
    assert len(first.taken) + len(second.taken) == 2 * len(lineup.entries)
    assert time_left_s(lineup, bench, models) == 0
    run_race(lineup, tmp_path / "o", third)
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
    lineup = tiny_lineup("rq3")
    bad = next(row.entry for row in lineup.rows if row.system.name == "bfw")

    def stop(entry: Entry, _: int) -> RrfpError | None:
        return StoppedError("the run was stopped by SIGTERM") if entry.name == bad else None

    with pytest.raises(StoppedError):
        run_race(lineup, tmp_path / "o", MadeUp(stop))
    assert all(isinstance(each, Turn) for each in BenchDir(tmp_path / "o").ended(lineup))


def test_one_command_at_a_time(tmp_path: Path) -> None:
    lineup, bench = tiny_lineup("rq3"), BenchDir(tmp_path / "o")
    with (
        bench.prepare(lineup, force=False),
        pytest.raises(UsageError, match="another command races in"),
    ):
        bench.prepare(lineup, force=True)
    bench.prepare(lineup, force=False).close()


def test_other_costs_in_the_same_file_are_another_race(tmp_path: Path) -> None:
    costs, bench = tmp_path / "mine.toml", BenchDir(tmp_path / "o")

    def prepare(seconds: int) -> None:
        costs.write_text(f"seconds = {{ F = 1, B = 1, W = {seconds} }}\n")
        lineup = tiny_lineup("rq1", systems=("bf",), profiles=(str(costs),))
        bench.prepare(lineup, force=False).close()

    prepare(1)
    prepare(1)
    with pytest.raises(UsageError, match="holds another race"):
        prepare(2)


def test_an_entry_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq3")
    bad = next(row.entry for row in lineup.rows if row.system.name == "bfw")

    def fail(entry: Entry, number: int) -> RrfpError | None:
        return RrfpError("rank 1 stalled\nwith a grid") if entry.name == bad and number else None

    launch = MadeUp(fail)
    failures = run_race(lineup, tmp_path / "o", launch)
    assert failures == [Failure(bad, 1, "rank 1 stalled")]
    assert len(launch.taken) == 2 * len(lineup.entries) - 1
    rows = rows_of(lineup, BenchDir(tmp_path / "o").ended(lineup))
    assert [row.error for row in rows if row.lineup_row.entry == bad] == ["rank 1 stalled"]
    # The same command leaves it at that, and --retry tries it once more.
    same, again = MadeUp(), MadeUp()
    run_race(lineup, tmp_path / "o", same)
    assert same.taken == []
    run_race(lineup, tmp_path / "o", again, retry=True)
    assert again.taken == [(bad, 1)]
    assert all(row.error is None for row in rows_of(lineup, BenchDir(tmp_path / "o").ended(lineup)))


def test_what_was_begun_with_other_software_is_not_mixed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineup, bench = tiny_lineup("rq3"), BenchDir(tmp_path / "o")
    bench.prepare(lineup, force=False).close()
    monkeypatch.setattr("rrfp.race.lineup.versions", lambda: {"torch": "9"})
    with pytest.raises(UsageError, match=r"begun with another software \(.*now {'torch': '9'}\)"):
        bench.prepare(lineup, force=False)


def test_the_logs_of_a_failure_remain(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq3", systems=("bf",))
    logs = BenchDir(tmp_path / "o").race(3, 1).path / "logs"

    def fail(entry: Entry, number: int) -> RrfpError | None:
        logs.mkdir(exist_ok=True)
        (logs / "rank-1.log").write_text(f"{entry.name} {number}")
        is_bad = (
            entry.settings.policy.dispatch == Dispatch.READY and entry.settings.run.jitter == "J1"
        )
        return RrfpError(f"rank 1 failed: it did (see {logs}/rank-1.log)") if is_bad else None

    (failure,) = run_race(lineup, tmp_path / "o", MadeUp(fail))
    log = Path(failure.error.partition("(see ")[2].removesuffix(")"))
    assert log != logs / "rank-1.log"
    assert log.read_text() == f"{failure.entry} {failure.round}"


def test_the_logs_of_a_failure_that_ends_the_race_stay_where_it_says(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq3", systems=("bf",))
    log = BenchDir(tmp_path / "o").race(3, 1).path / "logs" / "rank-1.log"

    def fail(entry: Entry, _: int) -> RrfpError | None:
        log.parent.mkdir(exist_ok=True)
        log.touch()
        is_native = entry.settings.policy.dispatch == Dispatch.MEGATRON
        return RrfpError(f"rank 1 failed: it did (see {log})") if is_native else None

    for _ in range(2):
        with pytest.raises(RrfpError, match=f"see {log}"):
            run_race(lineup, tmp_path / "o", MadeUp(fail))
        assert log.exists()


def test_on_several_hosts_the_next_command_leaves_out_what_failed(tmp_path: Path) -> None:
    lineup, bench = tiny_lineup("rq3"), BenchDir(tmp_path / "o")
    bad = next(row.entry for row in lineup.rows if row.system.name == "bfw")

    def fail(entry: Entry, _: int) -> RrfpError | None:
        return RrfpError("rank 1 stalled") if entry.name == bad else None

    hosts = Hosts(2, 0, "127.0.0.1:1")
    with bench.prepare(lineup, force=False), pytest.raises(RrfpError, match="rank 1 stalled"):
        race(lineup, bench, hosts, MadeUp(fail), lambda _: None)
    with bench.prepare(lineup, force=False):
        race(lineup, bench, hosts, MadeUp(fail), lambda _: None)
    ended = {each.entry for each in bench.ended(lineup) if isinstance(each, Turn)}
    assert ended == lineup.entries.keys() - {bad}


def test_without_megatron_there_is_no_race(tmp_path: Path) -> None:
    lineup = tiny_lineup("rq3")

    def fail(entry: Entry, _: int) -> RrfpError | None:
        is_native = entry.settings.policy.dispatch == Dispatch.MEGATRON
        return RrfpError("no memory") if is_native else None

    with pytest.raises(RrfpError, match="no memory"):
        run_race(lineup, tmp_path / "o", MadeUp(fail))


def test_a_reference_that_fails_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's gradients are computed before the first turn of any entry."""

    class FailingRace:
        def __init__(self, _layout: Any, entries: Sequence[Entry], _offset_ns: int) -> None:
            self._reference = entries[0]

        def missing_reference(self, _: Entry) -> Entry:
            return self._reference

        def refer_to(self, _: Entry) -> None:
            raise RrfpError("no memory")

    files, entries = RaceFiles(tmp_path), entries_of(4, 1)
    first = next(entry for _, entry in rounds(entries, ()))
    entries.sort(key=lambda entry: entry == first)
    files.write_entries(entries)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(ranks_of_race, "_Race", FailingRace)
    monkeypatch.setattr(ranks_of_race, "introduce", lambda _: SimpleNamespace(clock_offset_ns=0))
    # As on the wire: what rank 0 tells goes through JSON.
    monkeypatch.setattr(
        ranks_of_race,
        "broadcast_json",
        lambda told, decode: decode(json.loads(json.dumps(told))),
    )
    layout: Any = SimpleNamespace(rank=0)
    with pytest.raises(RrfpError, match="no memory"):
        ranks_of_race.work(RunDir(tmp_path), TrainSettings(), layout)
    assert files.read_current_turn() == (entries[0].name, 0)


def test_nothing_is_removed_that_is_no_race(tmp_path: Path) -> None:
    for content in (b"[]", b"{}", b"[", b"a lineup of mine", b"\xff\xfe"):
        (tmp_path / "plan.json").write_bytes(content)
        (tmp_path / "pp2-tp1").mkdir(exist_ok=True)
        for force in (False, True):
            with pytest.raises(UsageError, match=r"plan.json is not a lineup of a race"):
                BenchDir(tmp_path).prepare(tiny_lineup("rq3"), force=force)
        assert (tmp_path / "plan.json").read_bytes() == content
        assert (tmp_path / "pp2-tp1").exists()


def test_force_removes_the_charts_of_the_race_before(tmp_path: Path) -> None:
    bench, lineup = BenchDir(tmp_path), tiny_lineup("rq3")
    bench.prepare(lineup, force=False).close()
    for name in ("rq1.svg", "rq1.png", "notes.svg"):
        (tmp_path / name).touch()
    bench.prepare(lineup, force=True).close()
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "notes.svg"}


def test_another_race_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    out = tmp_path / "o"
    run_race(tiny_lineup("rq3"), out, MadeUp())
    bench, other = BenchDir(out), tiny_lineup("rq3", steps=3)
    with pytest.raises(UsageError, match="holds another race"):
        bench.prepare(other, force=False)
    bench.prepare(other, force=True).close()
    assert bench.ended(other) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="something other than a race"):
        BenchDir(tmp_path / "mine").prepare(other, force=True)


# What is made of the turns of a race.


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


def test_models_have_the_same_steps_and_are_cached(tmp_path: Path) -> None:
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


# What presets and flags make a race of.


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_its_systems_against_megatron(name: str, scale: str) -> None:
    lineup = line_up([PRESETS[name]], SCALES[scale], RaceOptions())
    assert {row.system.name for row in lineup.rows} > {"megatron-1f1b"}
    for row in lineup.rows:
        assert {row.entry, row.megatron} <= lineup.entries.keys()
        assert row.against is None or row.against in lineup.entries
        settings = lineup.entries[row.entry].settings
        assert settings.model.layers % (settings.layout.pp * settings.layout.chunks) == 0
        assert settings.policy.limit is None or settings.policy.hold is None


def test_the_first_preset_has_all_that_people_use() -> None:
    lineup = line_up([PRESETS["rq1"]], SCALES["laptop"], RaceOptions())
    rows = {(row.case.profile, row.system.name, row.bound, row.admit) for row in lineup.rows}
    for profile in ("language", "language+lognormal:0.5", "multimodal"):
        for name, bound in [
            *((name, "") for name in ("megatron-1f1b", "megatron-interleaved", "fixed-1f1b")),
            *((name, "") for name, peer in PEERS.items() if peer.project.is_installed),
            ("fixed-zb-h1", ""),
            *(
                (name, bound)
                for name in ("bf", "bfw", "bf-deep", "bfw-deep", "zb-v")
                for bound in ("limit 32", "hold 1.0x", "hold 1.5x", "hold 2.0x")
            ),
        ]:
            assert (profile, name, bound, Admit.GIVEN) in rows
            is_sorted = (profile, name, bound, Admit.PYRAMID) in rows
            # Microbatches that cost the same have no order to choose.
            assert is_sorted == (profile == "multimodal" and bound != "")


def test_presets_share_what_they_both_run() -> None:
    both = tiny_lineup("rq1", "rq6", profiles=("multimodal",))
    alone = [tiny_lineup(name, profiles=("multimodal",)) for name in ("rq1", "rq6")]
    assert both.entries.keys() == alone[0].entries.keys() | alone[1].entries.keys()
    assert len(both.entries) < sum(len(lineup.entries) for lineup in alone)
    assert len(both.rows) == sum(len(lineup.rows) for lineup in alone)


def test_torchs_systems_are_laid_out_as_they_are_driven() -> None:
    peers = {system.peer: system for system in SYSTEMS.values() if system.peer}
    assert peers.keys() == PEERS.keys()
    for name, peer in PEERS.items():
        assert (peers[name].chunks, peers[name].placement) == (peer.chunks, peer.placement)


def test_what_is_asked_for_narrows_the_presets() -> None:
    lineup = tiny_lineup(
        "rq1", systems=("bfw",), profiles=("language+J2",), holds=("paper", "hold 5")
    )
    assert [(row.system.name, row.bound) for row in lineup.rows] == [
        ("megatron-1f1b", ""),
        ("bfw", "limit 32"),
        ("bfw", "hold 5"),
    ]
    assert {entry.settings.run.jitter for entry in lineup.entries.values()} == {"J2"}


def test_a_plan_of_megatron_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="choose another --system"):
        tiny_lineup("rq3", systems=("megatron-1f1b",))


@pytest.mark.parametrize(("name", "peers"), [("fb", tuple(Project)), ("torch-zbv", ())])
def test_a_system_without_a_row_is_named(name: str, peers: tuple[Project, ...]) -> None:
    with pytest.raises(UsageError, match=f"--system {name} makes no row"):
        tiny_lineup("rq1", systems=("bf", name), peers=peers)


def test_the_length_of_tasks_is_that_of_presets_alone(tmp_path: Path) -> None:
    costs = tmp_path / "a+b.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    for profile, jitter in ((f"{costs}", "none"), (f"{costs}+J2", "J2")):
        lineup = tiny_lineup("rq1", systems=("bf",), profiles=(profile,))
        for entry in lineup.entries.values():
            assert (entry.settings.run.pace, entry.settings.run.jitter) == (str(costs), jitter)
            assert entry.time_factor == 1.0
        with pytest.raises(UsageError, match="leave --task-ms out"):
            tiny_lineup("rq1", systems=("bf",), profiles=(profile,), task_ms=5.0)
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("language",), task_ms=5.0)
    assert {entry.time_factor for entry in lineup.entries.values()} == {0.25}


def test_tasks_of_another_length_are_another_case() -> None:
    short, long = (
        tiny_lineup("rq1", systems=("bf",), profiles=("language",), task_ms=task_ms)
        for task_ms in (5.0, 60.0)
    )
    assert not short.entries.keys() & long.entries.keys()
    assert all("seed 1234, 60 ms a task: " in name for name in long.entries)


@pytest.mark.parametrize("heavy", ["F", "B", "W"])
def test_whatever_differs_between_microbatches_is_something_to_sort_by(
    heavy: str, tmp_path: Path
) -> None:
    def admits(varied: str) -> set[Admit]:
        rows = [
            f"{kind},{rank},0,{microbatch},{0.01 * (1 + microbatch * (kind == varied))}"
            for kind in "FBW"
            for rank in range(3)
            for microbatch in range(3)
        ]
        costs = tmp_path / "mine.csv"
        costs.write_text("\n".join(("kind,pp_rank,chunk,microbatch,seconds", *rows)))
        lineup = tiny_lineup("rq1", systems=("bfw",), profiles=(str(costs),))
        return {row.admit for row in lineup.rows}

    assert admits("") == {Admit.GIVEN}
    assert admits(heavy) == {Admit.GIVEN, Admit.PYRAMID}


def test_costs_of_chunks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    costs = tmp_path / "mine.toml"
    costs.write_text(
        "seconds = { F = 1, B = 1, W = 1 }\n"
        '[[ranks]]\npp_ranks = "0"\nchunk = 1\nseconds = { F = 2 }\n'
    )
    with pytest.raises(UsageError, match=r"cannot race: .*chunk 1.*--profile or --scale"):
        tiny_lineup("rq1", systems=("zb-v",), profiles=(str(costs),))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("paper", (32, None)),
        ("limit 4", (4, None)),
        ("hold 8", (None, 8)),
        ("hold 40GiB", (None, Bytes(40 * 2**30))),
        ("hold 1.5x", (None, ShareOf1F1B(Fraction(3, 2)))),
    ],
)
def test_bounds(text: str, bound: tuple[int | None, Hold | None]) -> None:
    assert read_bound(text) == bound


def test_a_share_of_1f1bs_bytes_is_the_same_number_for_all_systems() -> None:
    lineup = tiny_lineup("rq1", profiles=("multimodal",))
    holds = {
        entry.settings.policy.hold
        for row in lineup.rows
        for entry in [lineup.entries[row.entry]]
        if row.bound == "hold 1.0x"
    }
    (hold,) = holds
    assert isinstance(hold, Bytes)
    shape = Shape(lineup.rows[0].case.pp, lineup.rows[0].case.microbatches)
    settings = next(iter(lineup.entries.values())).settings
    peaks = []
    for number in range(settings.num_steps):
        sizes = preset("multimodal").step(shape, settings.run.seed + number, 0).sizes
        assert sizes is not None
        for rank, row in enumerate(sizes.activations):
            width = shape.num_ranks - rank
            peaks += [sum(row[first : first + width]) for first in range(len(row))]
    assert hold.num == max(peaks)


def test_costs_without_bytes_hold_microbatches_of_one_size(tmp_path: Path) -> None:
    costs = tmp_path / "even.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    lineup = tiny_lineup("rq1", profiles=(str(costs),))
    holds = {lineup.entries[row.entry].settings.policy.hold for row in lineup.rows}
    assert holds == {None, lineup.rows[0].case.pp}


@pytest.mark.parametrize("text", ["hold 0", "hold 0x", "hold -1", "hold many", "hold 1.5", "hold "])
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--hold is '.*'; write 12 \(microbatches\)"):
        read_bound(text)


@pytest.mark.parametrize("text", ["foo 8", "limit 8GiB", "limit 0", "8", " hold 8", "papers", ""])
def test_bounds_of_another_form(text: str) -> None:
    with pytest.raises(UsageError, match=f"^the memory bound is '{text}'; write paper, "):
        read_bound(text)


def test_costs_with_slow_messages_are_torchs_too(tmp_path: Path) -> None:
    costs = tmp_path / "slow.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n[links]\nlatency_s = 1e-3\n")
    lineup = tiny_lineup("rq1", profiles=(str(costs),))
    assert any(entry.peer for entry in lineup.entries.values())
    check(lineup, Hosts(), tmp_path)
