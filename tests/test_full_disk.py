"""A run whose disk is full, or whose directory is removed: it trains on where it can, says what it
could not write, and leaves nothing half-written."""

import errno
import json
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from rrfp.cli.train import _encode_what_is_there
from rrfp.trace import locate
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints.directory import CheckpointDir
from tests.small_disks import fill, small_disk
from tests.trained import Training, read_metrics, rrfp_here

STEPS = 60
LONG = ("--pp", "2", "--steps", str(STEPS))


@pytest.mark.slow
def test_a_full_disk_costs_the_records_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24) as disk, Training(disk / "run", *LONG) as training:
        training.await_steps(2)
        filler = fill(disk)
        training.await_that(
            lambda: (
                training.said().count("recording is switched off") == 2
                and "its lines wait in memory" in training.said()
            ),
            "warning",
        )
        filler.unlink()
        code, _, said = training.ended()
        assert code == 0, said
        # The metrics have every step, and the trace says from where on it lacks the records.
        assert [line["step"] for line in read_metrics(training.run)] == [*range(STEPS)]
        assert f"{training.run}/metrics.jsonl is written again" in said
        off = read_trace(training.run / "trace.pftrace").settings["recording_off"]
        assert isinstance(off, list)
        for each in off:
            assert f"{training.run}/records/rank-{each['rank']}.jsonl: No space left" in said
            assert each["reason"] in said
        assert json.loads((training.run / "run.json").read_text())["recording_off"] == off
        # Once when it happens, and again at the end.
        assert said.count("rank 0: recording is switched off") == 2
        checked = rrfp_here(tmp_path, "trace", "check", str(training.run))
        assert checked.returncode == 1
        assert "is whole" not in checked.stdout
        assert "switched recording off" in checked.stdout


@pytest.mark.slow
def test_a_run_without_its_directory_ends_unless_it_saves(tmp_path: Path) -> None:
    with Training(tmp_path / "run", *LONG) as training:
        training.await_steps(2)
        shutil.rmtree(training.run)
        code, _, said = training.ended()
    assert code == 1
    assert f"the run's directory {training.run} was removed or moved away" in said
    assert "Traceback" not in said
    with Training(tmp_path / "saved", *LONG, "--save", str(tmp_path / "ck")) as training:
        training.await_steps(2)
        shutil.rmtree(training.run)
        code, _, said = training.ended()
    assert code == 1
    assert f"{STEPS} steps are trained and saved in {tmp_path / 'ck'}" in said
    assert "Traceback" not in said
    found = CheckpointDir(tmp_path / "ck").newest()
    assert found is not None
    assert found.step == STEPS
    lines = (found.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(STEPS)]


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), ValueError()])
def test_a_trace_that_cannot_be_made_does_not_hide_why_a_run_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """It is told after what is left of the run has become a trace, or has not."""

    def refuse(_: Path) -> NoReturn:
        raise error

    run = RunDir(tmp_path)
    run.records.mkdir()
    run.rank_records(0).touch()
    monkeypatch.setattr(locate, "resolve_session", refuse)
    _encode_what_is_there(run)
    assert "No trace was made: " in capsys.readouterr().err
