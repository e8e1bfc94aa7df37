"""A race of many turns: whose turn it is, how it is run, interrupted and gone on with."""

import json
from collections.abc import Sequence
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
from rrfp.race.lineup import Lineup
from rrfp.race.runner import BenchDir, Hosts, Modelled, race, time_left_s
from rrfp.schedule.policy import Dispatch
from rrfp.trace.run_dir import RunDir
from rrfp.train.settings import TrainSettings
from tests.effort import examples
from tests.races import MadeUp, rows_of, tiny_lineup, turn


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


def test_a_rank_that_is_done_waits_for_the_last_one() -> None:
    """As it does before its own call, when another rank has been called already."""
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
    models = dict.fromkeys(lineup.entries, Modelled((1.0,) * 2, (1.0,) * 2, None))
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


def test_the_logs_of_a_failure_are_kept(tmp_path: Path) -> None:
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
    """Its gradients are had before the first turn, whosever that is."""

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
    assert files.read_under_way() == (entries[0].name, 0)


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
