"""`rrfp runs`: what each run was and how it ended, from its small files alone."""

import csv
import io
import json
import os
import re
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rrfp.cli import app, main
from rrfp.cli.errors import run_app
from rrfp.errors import RrfpError, StoppedError
from rrfp.trace.outcome import (
    Ending,
    FaultOrigin,
    FoundBy,
    Outcome,
    RunFailedError,
    is_running,
    noting_outcome,
    read_ending,
)
from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir, create_run_dir
from rrfp.trace.spill import SpillWriter

CULPRIT = FaultOrigin(FoundBy.LINK, link=(0, 1))
SETTINGS = {"hint": "bfw", "dispatch": "ready", "pp": 4, "tp": 2, "dp": 1, "chunks": 1, "steps": 3}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(name: str, num_steps: int = 3, **described: Any) -> RunDir:
    """A run of three steps with `num_steps` finished."""
    run = create_run_dir(Path("runs", name), False, "")
    run.run_json.write_text(json.dumps({"settings": SETTINGS} | described))
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(num_steps)))
    return run


def _listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["rrfp", "runs", *arguments])
    assert main.main() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def _as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, Any]]:
    listed = json.loads(_listed(monkeypatch, capsys, "--format", "json"))["runs"]
    return {each["run"]: each for each in listed}


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, Ending(Outcome.FINISHED)),
        (RrfpError("rank 2 is gone"), Ending(Outcome.FAILED, "rank 2 is gone")),
        (RunFailedError("a link", CULPRIT), Ending(Outcome.FAILED, "a link", CULPRIT)),
        (StoppedError("by SIGTERM"), Ending(Outcome.STOPPED, "by SIGTERM")),
        (KeyboardInterrupt(), Ending(Outcome.INTERRUPTED)),
        (ValueError("a bug"), Ending(Outcome.FAILED, "ValueError: a bug")),
        (SystemExit(), Ending(Outcome.STOPPED)),
    ],
)
def test_the_outcome_is_noted(error: BaseException | None, ending: Ending) -> None:
    run = _run("one")
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, noting_outcome(run):
        assert is_running(run)
        if error is not None:
            raise error
    assert not is_running(run)
    assert read_ending(run) == ending


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "null", "[]", '["outcome"]', '"outcome"', "{}", "{"),
        '{"outcome": ["failed"], "error": null}',
        '{"outcome": "failed", "error": 5}',
        *(
            f'{{"outcome": "failed", "error": null, "culprit": {culprit}}}'
            for culprit in (
                "5",
                '{"found_by": "rank", "rank": "0", "link": null}',
                '{"found_by": "link", "rank": null, "link": [1]}',
                '{"found_by": "link", "rank": null, "link": [1e999, 1]}',
                '{"found_by": "link", "rank": null, "link": {"a": 0, "b": 1}}',
            )
        ),
    ],
)
def test_a_damaged_outcome_is_ignored(text: str) -> None:
    run = _run("one")
    run.outcome.write_text(text)
    assert read_ending(run) == Ending(Outcome.KILLED)


def test_a_disk_that_takes_no_note_changes_nothing() -> None:
    run = _run("one")
    run.outcome.mkdir()
    with noting_outcome(run):
        pass


def test_each_outcome_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("finished", "earlier", "without"):
        _run(name)
    with noting_outcome(RunDir(Path("runs/finished"))):
        pass
    with noting_outcome(RunDir(Path("runs/without"))):
        pass
    for name in ("finished", "earlier"):
        Path("runs", name, "trace.pftrace").write_bytes(b"x" * 1000)
    failed = _run("failed", 1)
    with pytest.raises(RrfpError), noting_outcome(failed):
        raise RrfpError("rank 1 failed")
    _run("killed", 2).outcome.touch()
    _run("cut off", 0)
    _run("simulated", 0, simulated=True, settings={"hint": "bf", "pp": 2, "seeds": 20})
    _run("odd", 0, simulated=True, settings={"hint": "bf", "pp": True, "seeds": True})
    imported = _run("imported", 0, imported={}, settings={"hint": "as recorded", "pp": 2})
    job = _run("job", 0, settings={"script": "train.py", "pp": 2})
    for each in (imported, job):
        each.trace.write_bytes(b"x")
    damaged = _run("damaged")
    damaged.run_json.write_text("{")
    damaged.metrics.write_text("no JSON")
    recording = _run("recording", 0, settings={"script": "train.py", "pp": 2})
    writer = SpillWriter(recording.rank_records(0), RankInfo(0, 0, 0, 0, (0,), "node", 1))
    with noting_outcome(_run("going", 2)):
        listed = _as_json(monkeypatch, capsys)
        table = _listed(monkeypatch, capsys)
    writer.close()
    told = {name: (each["steps"], each["outcome"]) for name, each in listed.items()}
    assert told == {
        "finished": (3, "finished"),
        "earlier": (3, "finished"),
        "without": (3, "finished"),
        "failed": (1, "failed"),
        "killed": (2, "killed"),
        "cut off": (0, "killed"),
        "simulated": (20, "finished"),
        "odd": (None, "finished"),
        "imported": (None, "recorded"),
        "job": (None, "recorded"),
        "damaged": (None, "killed"),
        "recording": (None, "running"),
        "going": (2, "running"),
    }
    assert listed["failed"]["error"] == "rank 1 failed"
    assert "run.json cannot be read" in listed["damaged"]["error"]
    assert not listed["without"]["has_trace"]
    rows = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert rows["without"].rstrip().endswith("no trace")
    assert re.search(r" 1/3 .* failed *$", rows["failed"])


def test_the_newest_comes_first_and_a_row_fits_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["20261122-154402-interleaved-2", "second", "third"]
    for age, name in enumerate(names):
        run = _run(name)
        run.trace.write_bytes(b"x" * 12_345_678)
        moment_s = time.time() - 100 * age
        os.utime(run.run_json, (moment_s, moment_s))
    Path("runs/latest").symlink_to("second")
    Path("runs/no run").mkdir()
    Path("runs/notes.txt").touch()
    assert [*_as_json(monkeypatch, capsys)] == names
    rows = list(csv.DictReader(io.StringIO(_listed(monkeypatch, capsys, "--format", "csv"))))
    assert [row["run"] for row in rows] == names
    assert 12_345_678 < int(rows[0]["size_bytes"]) < 12_346_678
    table = _listed(monkeypatch, capsys)
    assert all(f" {name} " in table for name in names)
    assert "12 MB" in table
    assert " bfw pp 4 " in table
    assert max(map(len, table.splitlines())) <= 80
    markdown = _listed(monkeypatch, capsys, "--format", "md")
    assert "| second |" in markdown


def test_another_directory_is_listed_and_none_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _listed(monkeypatch, capsys).startswith("There are no runs in runs; ")
    create_run_dir(Path("sweep/1"), False, "").run_json.write_text("{}")
    assert " 1 " in _listed(monkeypatch, capsys, "sweep")
    monkeypatch.setattr(sys, "argv", ["rrfp", "runs", "nowhere"])
    assert main.main() == 2
    assert capsys.readouterr().err == (
        "rrfp: nowhere is not a directory; give one that holds runs\n"
    )


def test_200_runs_are_listed_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(200):
        _run(f"run-{number}")
    begin_s = time.process_time()
    assert len(_as_json(monkeypatch, capsys)) == 200
    assert time.process_time() - begin_s < 2


# Runs and traces of earlier versions open in every command.
#
# `tests/fixtures/earlier` holds runs of commit dfdaafa, whose descriptions state no policy: `rrfp
# train --hint bf` and `--dispatch megatron` on two ranks (`--layers 2 --hidden 32 --seq-length 16
# --microbatches 4 --steps 2`), and `rrfp simulate --pp 2 --microbatches 4 --hint bfw --limit none
# --seeds 2`.


EARLIER = Path(__file__).parents[1] / "fixtures" / "earlier"
RUNS = ["bf", "megatron", "simulated"]

REPORTS = [
    ("analyze", "bubbles"),
    ("analyze", "whatif"),
    ("analyze", "deviations"),
    ("analyze", "misalignment"),
    ("analyze", "critical-path"),
]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy: commands keep tables beside a trace."""
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("command", REPORTS, ids=" ".join)
def test_a_report_of_an_earlier_run(
    earlier: Path, name: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, command[1]) == ("megatron", "misalignment"):
        pytest.skip("Megatron's own schedule recorded no messages then")
    for path in (earlier / name, earlier / name / "trace.pftrace"):
        assert run_app(app.app, [*command, str(path), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_other_commands_take_an_earlier_run(
    earlier: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(earlier / name)
    assert run_app(app.app, ["trace", "check", where]) == 0
    assert "is whole" in capsys.readouterr().out
    assert run_app(app.app, ["trace", "export", where, "-o", str(tmp_path / "run.json")]) == 0
    assert run_app(app.app, ["trace", "export", where, "-o", str(tmp_path / "tables")]) == 0
    assert run_app(app.app, ["analyze", "compare", where, where]) == 0
    assert run_app(app.app, ["analyze", "report", where, "-o", str(tmp_path / "report.html")]) == 0
    chart = ["analyze", "chart", "gantt", where, "-o", str(tmp_path / "gantt.svg")]
    assert run_app(app.app, chart) == 0
    costs = ["simulate", "--pp", "2", "--microbatches", "4", "--costs", where]
    assert run_app(app.app, costs) == 0


@pytest.mark.parametrize(
    ("name", "dispatch", "limit"),
    [("bf", "ready", 32), ("megatron", "fixed", None), ("simulated", "ready", None)],
)
def test_the_policy_of_an_earlier_run_is_the_one_that_was_in_effect(
    earlier: Path,
    name: str,
    dispatch: str,
    limit: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Without jitter it keeps its own policy.
    command = ["analyze", "whatif", str(earlier / name), "--without-jitter", "--format", "json"]
    assert run_app(app.app, command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["dispatch"], row["limit"], row["hold"]) == (dispatch, limit, None)
