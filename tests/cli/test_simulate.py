"""`rrfp simulate`: its rows, their forms, and the run that it leaves."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import order_by_costs
from tests.train.trained import Run, run

__all__ = ["run"]

SMALL = ("--pp", "3", "--microbatches", "6")
NOISY = (*SMALL, "--jitter", "lognormal:0.5")
METHODS = (
    *("--row", "hint=1f1b dispatch=fixed links=blocking"),
    *("--row", "hint=1f1b dispatch=fixed"),
    *("--row", "hint=zb-h1 dispatch=fixed"),
    *("--row", "hint=interleaved chunks=2 dispatch=fixed"),
    *("--row", "hint=bf"),
    *("--row", "hint=bfw hold=3"),
)


def rows_of(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run("simulate", "--format", "json", *arguments)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["rows"]
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_an_order_of_admission_from_a_file(run: Run, tmp_path: Path) -> None:
    """A line of it is a seed's step; what the pyramid finds for two of them, written down."""
    shape, costs = Shape(3, 6), resolve_costs("multimodal")
    lines = [order_by_costs(costs.step(shape, seed, 0), Admit.PYRAMID, 0) for seed in (1234, 1235)]
    text = "\n".join(",".join(map(str, line)) for line in lines)
    (tmp_path / "orders.csv").write_text(text, encoding="utf-8")
    flags = (*SMALL, "--costs", "multimodal", "--seeds", "2")
    pyramid, listed, given = rows_of(run, *flags, "--sweep", "admit=pyramid,orders.csv,given")
    assert listed["admit"] == "orders.csv"
    assert listed["makespan_s"] == pyramid["makespan_s"] != given["makespan_s"]
    code, out, err = run("simulate", *flags, "--admit", "orders.csv", "--row", "microbatches=4")
    assert (code, out) == (2, "")
    assert "in the row microbatches=4: orders.csv, line 1: " in err


def test_the_defaults(run: Run) -> None:
    (row,) = rows_of(run, *SMALL)
    said = {
        "hint": "bf",
        "dispatch": "ready",
        "links": "async",
        "pp": 3,
        "microbatches": 6,
        "chunks": 1,
        "placement": "loop",
        "tp": 1,
        "dp": 1,
        "limit": 32,
        "hold": None,
        "w": "idle",
        "agreement": "intersection",
        "patience": "0",
        "admit": "given",
        "admit_across": "none",
        "costs": "uniform",
        "jitter": "none",
        "chosen": None,
    }
    assert {name: row.pop(name) for name in said} == said
    # 20 ms each of F, B and W: BF of equal times is as long as 1F1B.
    total_s, work_s = 0.06 * (6 + 2), 0.06 * 6
    assert row.pop("makespan_s") == {
        name: pytest.approx(total_s, abs=1e-12) for name in ("mean", "min", "max")
    }
    assert row.pop("floor_s") == pytest.approx(total_s)
    assert row.pop("load_s") == pytest.approx(work_s)
    assert row.pop("ratio_to_load") == pytest.approx(total_s / work_s)
    assert row.pop("bubble_fraction") == pytest.approx(1 - work_s / total_s)
    # The preset's microbatches keep 1 GB on each rank.
    held = row.pop("peak_held")
    assert len(held) == 3
    assert row.pop("peak_held_bytes") == [10**9 * each for each in held]
    assert row.pop("bound_s") == pytest.approx(total_s)
    assert row == {"ratio_to_floor": 1, "ratio_to_first": 1, "spread": 0}


def test_methods_as_rows(run: Run) -> None:
    rows = rows_of(run, *NOISY, "--seeds", "3", *METHODS)
    assert [(row["hint"], row["dispatch"], row["links"]) for row in rows] == [
        ("1f1b", "fixed", "blocking"),
        ("1f1b", "fixed", "async"),
        ("zb-h1", "fixed", "async"),
        ("interleaved", "fixed", "async"),
        ("bf", "ready", "async"),
        ("bfw", "ready", "async"),
    ]
    assert [row["limit"] for row in rows] == [None, None, None, None, 32, None]
    assert [row["hold"] for row in rows] == [None, None, None, None, None, 3]
    # A rank holds as much as 1F1B does by its place, in whole microbatches with chunks, too.
    assert rows[1]["peak_held"] == [3, 2, 1]
    assert max(rows[5]["peak_held"]) == 3
    for row in rows:
        assert row["makespan_s"]["min"] < row["makespan_s"]["mean"] < row["makespan_s"]["max"]
        mean_s = row["makespan_s"]["mean"]
        assert row["ratio_to_floor"] == mean_s / row["floor_s"] >= 1
        assert row["ratio_to_first"] == mean_s / rows[0]["makespan_s"]["mean"]
        assert row["load_s"] <= row["floor_s"]


def test_sweeps_are_combined_the_first_one_slowest(run: Run) -> None:
    rows = rows_of(
        *(run, *SMALL, "--sweep", "limit=3,4", "--sweep", "dispatch=ready,fixed"),
        *("--row", "hint=1f1b", "--row", "hint=zb-h1"),
    )
    assert [(row["limit"], row["dispatch"], row["hint"]) for row in rows] == [
        (limit, dispatch, hint)
        for limit in (3, 4)
        for dispatch in ("ready", "fixed")
        for hint in ("1f1b", "zb-h1")
    ]


def test_every_setting_can_be_swept(run: Run) -> None:
    for sweep, name, values in (
        ("pp=2,3", "pp", [2, 3]),
        ("microbatches=4,8", "microbatches", [4, 8]),
        ("chunks=1,2", "chunks", [1, 2]),
        ("tp=1,2", "tp", [1, 2]),
        ("dp=1,2", "dp", [1, 2]),
        ("limit=none,2", "limit", [None, 2]),
        ("hold=none,2", "hold", [None, 2]),
        ("agreement=unanimous,intersection", "agreement", ["unanimous", "intersection"]),
        ("patience=auto,5ms,0", "patience", ["auto", "5ms", "0"]),
        ("admit=pyramid,given", "admit", ["pyramid", "given"]),
        ("costs=language,multimodal", "costs", ["language", "multimodal"]),
        ("jitter=J1,J3", "jitter", ["J1", "J3"]),
        ("hint=bfw-deep,gpipe", "hint", ["bfw-deep", "gpipe"]),
        ("placement=v,loop", "placement", ["v", "loop"]),
        ("w=ranked,idle", "w", ["ranked", "idle"]),
        ("links=blocking,async", "links", ["blocking", "async"]),
    ):
        base = {"pp": "3", "microbatches": "6"}
        base |= {
            "placement": {"chunks": "2"},
            "w": {"hint": "zb-h1"},
            "links": {"dispatch": "fixed"},
            "agreement": {"tp": "2"},
        }.get(name, {})
        base.pop(name, None)
        flags = [word for flag, text in base.items() for word in (f"--{flag}", text)]
        assert [row[name] for row in rows_of(run, *flags, "--sweep", sweep)] == values


def test_a_row_goes_before_the_flags_and_may_have_commas(run: Run) -> None:
    first, second = rows_of(
        *(run, *SMALL, "--limit", "4", "--jitter", "J3"),
        *("--row", "limit=none 'jitter=lognormal:0.5@0-1,2'", "--row", "  "),
    )
    assert (first["limit"], first["jitter"]) == (None, "lognormal:0.5@0-1,2")
    assert (second["limit"], second["jitter"]) == (4, "J3")


def test_settings_meet_the_same_draws_whatever_else_is_asked(run: Run) -> None:
    together = rows_of(run, *NOISY, "--seeds", "4", "--sweep", "hint=bf,bfw,1f1b")
    for row in together:
        (alone,) = rows_of(run, *NOISY, "--seeds", "4", "--hint", row["hint"])
        assert alone == row | {"ratio_to_first": 1}
    assert len({row["load_s"] for row in together}) == 1


def test_seeds_follow_the_first(run: Run) -> None:
    singles = [rows_of(run, *NOISY, "--seed", str(seed))[0] for seed in (7, 8, 9)]
    (row,) = rows_of(run, *NOISY, "--seed", "7", "--seeds", "3")
    times_s = [single["makespan_s"]["mean"] for single in singles]
    assert len(set(times_s)) == 3
    assert (row["makespan_s"]["min"], row["makespan_s"]["max"]) == (min(times_s), max(times_s))


def test_an_order_file_is_a_hint(run: Run) -> None:
    _, order, _ = run("hint", "show", "zb-h1", *SMALL)
    Path("mine.csv").write_text(order)
    own, named = rows_of(run, *NOISY, "--dispatch", "fixed", "--sweep", "hint=mine.csv,zb-h1")
    assert own | {"hint": "zb-h1"} == named


def test_costs_from_a_file(run: Run) -> None:
    header = "kind,pp_rank,chunk,microbatch,seconds\n"
    lines = [f"{kind},{rank},,,0.0{rank + 1}" for kind in "FBW" for rank in range(3)]
    Path("costs.csv").write_text(header + "\n".join(lines) + "\n")
    one, two = rows_of(run, *SMALL, "--costs", "costs.csv", "--sweep", "chunks=1,2")
    # The last rank has most to do, and there is work of 10 and 20 ms before and after it.
    assert one["load_s"] == two["load_s"] == pytest.approx(6 * 3 * 0.03)
    assert one["floor_s"] == pytest.approx(6 * 3 * 0.03 + 0.03 + 2 * 0.03)


def test_csv_says_the_same(run: Run) -> None:
    arguments = (*NOISY, "--seeds", "2", "--sweep", "hint=bf,bfw")
    rows = rows_of(run, *arguments)
    code, out, err = run("simulate", *arguments, "--format", "csv")
    assert (code, err) == (0, "")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert len(lines) == 2
    for line, row in zip(lines, rows, strict=True):
        for name in ("peak_held", "peak_held_bytes"):
            assert [float(part) for part in line.pop(name).split()] == row.pop(name)
        for name, value in row.pop("makespan_s").items():
            assert float(line.pop(f"{name}_s")) == value
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}


def test_the_table(run: Run, golden: Callable[[str, str], None]) -> None:
    code, out, err = run("simulate", *NOISY, "--seeds", "3", *METHODS, "--sweep", "costs=language")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    golden("simulate-methods.txt", out)


def test_the_table_of_one_step(run: Run, golden: Callable[[str, str], None]) -> None:
    code, out, err = run("simulate", *SMALL)
    assert (code, err) == (0, "")
    golden("simulate-one.txt", out)


def test_a_table_of_many_settings_keeps_to_80_columns(run: Run) -> None:
    code, out, err = run(
        *("simulate", *SMALL, "--seeds", "2", "--chunks", "2"),
        *("--row", "hint=zb-v placement=v dispatch=fixed dp=2 jitter=lognormal:0.5@0-1+J3"),
        *("--row", "hint=bfw-deep hold=4 admit=pyramid tp=2 costs=multimodal"),
        *("--row", "hint=interleaved links=blocking dispatch=fixed limit=none"),
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80


def test_out_leaves_a_run_that_every_reader_takes(run: Run) -> None:
    code, plain, _ = run("simulate", *NOISY, "--seeds", "3", "--format", "json")
    code, out, err = run("simulate", *NOISY, "--seeds", "3", "--format", "json", "--out", "sim")
    assert (code, err) == (0, "The trace is sim/trace.pftrace\n")
    assert out == plain
    code, checked, _ = run("trace", "check", "sim")
    assert code == 0
    assert "is whole" in checked
    code, found, _ = run("analyze", "bubbles", "sim", "--format", "json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    # Over all steps together, where the row has the mean of the steps.
    assert json.loads(found)["bubble_fraction"] == pytest.approx(row["bubble_fraction"], rel=0.02)
    described = json.loads(Path("sim/run.json").read_text())
    assert described["simulated"] is True
    assert described["world"] == 3
    expected = {"hint": "bf", "limit": 32, "jitter": "lognormal:0.5", "seed": 1234, "seeds": 3}
    assert expected.items() <= described["settings"].items()


def test_out_of_several_rows_has_a_directory_each(run: Run) -> None:
    arguments = ("simulate", *SMALL, "--sweep", "hint=bf,bfw", "--sweep", "limit=2,none")
    code, _, err = run(*arguments, "--out", "sim")
    assert (code, err) == (0, "The traces are below sim\n")
    rows = [(hint, limit) for hint in ("bf", "bfw") for limit in ("2", "none")]
    names = [f"{n}-{hint}-limit-{limit}" for n, (hint, limit) in enumerate(rows, start=1)]
    assert sorted(path.name for path in Path("sim").iterdir()) == names
    for name in names:
        assert run("trace", "check", f"sim/{name}")[0] == 0
    assert run(*arguments, "--out", "sim")[0] == 2
    assert run(*arguments, "--out", "sim", "--force")[0] == 0


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--dp", "2"), ("--chunks", "2")])
def test_out_of_every_layout_is_whole(run: Run, layout: tuple[str, ...]) -> None:
    assert run("simulate", *NOISY, *layout, "--seeds", "2", "--out", "sim")[0] == 0
    code, out, _ = run("trace", "check", "sim")
    assert code == 0
    assert "is whole" in out


@pytest.mark.parametrize("hint", ["1f1b", "zb-h1"])
def test_out_of_blocking_links_is_whole(run: Run, hint: str) -> None:
    fixed = ("--hint", hint, "--dispatch", "fixed", "--links", "blocking")
    assert run("simulate", *NOISY, *fixed, "--costs", "multimodal", "--out", "sim")[0] == 0
    code, out, _ = run("trace", "check", "sim")
    assert code == 0
    assert "is whole" in out


def test_force_leaves_nothing_of_an_earlier_sweep(run: Run) -> None:
    assert run("simulate", *SMALL, "--sweep", "hint=bf,bfw", "--out", "sim")[0] == 0
    Path("sim/1-bf/mine.txt").write_text("kept")
    assert run("simulate", *SMALL, "--out", "sim", "--force")[0] == 0
    left = sorted(str(path) for path in Path("sim").rglob("*") if path.is_file())
    assert left == ["sim/1-bf/mine.txt", "sim/run.json", "sim/trace.pftrace"]
    assert not Path("sim/2-bfw").exists()


def test_an_order_that_deadlocks_where_ranks_meet_is_refused_before_anything(run: Run) -> None:
    Path("crossed.csv").write_text("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    code, _, told = run(
        *("simulate", "--pp", "2", "--microbatches", "2", "--dispatch", "fixed", "--out", "sim"),
        *("--row", "hint=1f1b", "--row", "hint=crossed.csv links=blocking"),
    )
    assert code == 1
    assert told.startswith("rrfp: in the row hint=crossed.csv links=blocking: the step is stuck")
    assert not Path("sim").exists()


def test_two_runs_are_the_same_to_the_byte(tmp_path: Path) -> None:
    def files_and_out(name: str, hash_seed: str) -> dict[str, bytes]:
        directory = tmp_path / name
        directory.mkdir()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "rrfp", "simulate", *SMALL, "--tp", "2", "--dp", "2"),
                *("--jitter", "lognormal:0.5+J2", "--costs", "multimodal", "--seeds", "2"),
                *("--out", "sim", "--format", "json", "--sweep", "hint=bf,bfw"),
            ],
            cwd=directory,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=100,
            check=True,
        )
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        found = {str(path.relative_to(directory)): path.read_bytes() for path in files}
        return found | {"stdout": done.stdout}

    first = files_and_out("first", "1")
    assert len(first) == 5
    assert first == files_and_out("second", "2")
