"""`rrfp bench`: what it prints, what it refuses, and every preset on real ranks."""

import csv
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import StoppedError
from rrfp.race.presets import PRESETS
from tests.products.races import MadeUp, turn
from tests.train.trained import Run
from tests.train.trained import run as called

__all__ = ["called"]


@pytest.fixture
def run(called: Run) -> Run:
    return partial(called, "bench")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    launch = MadeUp(turned=partial(turn, over=3))
    monkeypatch.setattr("rrfp.cli.bench._launch", launch)
    return launch


@pytest.fixture
def no_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.cli.bench.draw_charts", lambda *_: None)


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
        for hold, limit in ((None, 32), ("1.0x", None), ("1.5x", None), ("2.0x", None))
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
    assert "speedup over megatron-1f1b" in " ".join(out.split())


@pytest.mark.usefixtures("no_chart")
@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_work_that_did_not_fit_is_reported_in_all_formats(
    form: str, run: Run, made_up: MadeUp
) -> None:
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
        (("rq1", "--hold=none"), "; write 12 (microbatches)"),
        (("rq1", "--task-ms=nan"), "--task-ms is 'nan'"),
        (("rq1", "--hold=banana", "--system=torch-zbv"), "; write 12 (microbatches)"),
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
@pytest.mark.parametrize(
    ("presets", "systems"),
    [
        (("rq1",), ("torch-zbv", "bfw")),
        pytest.param(
            *(tuple(PRESETS), ("megatron-interleaved", "torch-zbv", "bf", "bfw", "zb-v")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=("one", "all"),
)
def test_presets_run_at_tiny_scale(
    presets: tuple[str, ...], systems: tuple[str, ...], tmp_path: Path
) -> None:
    """Real ranks; presets of one layout share a launch."""
    flags = ("--scale=tiny", "--steps=2", "--hold=1x", "--profile=multimodal", "--format=json")
    done = subprocess.run(
        [sys.executable, "-m", "rrfp", "bench", *presets, *flags, "--out=o"]
        + [f"--system={name}" for name in systems],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert {row["preset"] for row in rows} == set(presets)
    if presets == tuple(PRESETS):
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
