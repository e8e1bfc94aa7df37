"""What a failing rank tells its launcher."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rrfp.megatron.failure import FailureReport, first_line
from rrfp.megatron.launch import _first_failure
from rrfp.trace.rundir import RunDir

REPORT = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)


def test_a_report_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    REPORT.write()
    written = json.loads((tmp_path / "error.json").read_text())
    assert FailureReport.read(written) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_stalls_grid_is_told_below_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    grid = "rank  waits\n1     2.0 s"
    FailureReport("rank 1 waited", 1, is_consequence=False, is_silence=False, detail=grid).write()
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=str(path))
    run = RunDir(tmp_path)
    told = str(_first_failure({1: failure}, run, num_hosts=1))
    assert told == f"rank 1 failed: rank 1 waited (see {run.rank_log(1)})\n{grid}"


def test_without_a_launcher_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    REPORT.write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", [{}, {"message": "torch's own words"}, {"message": {}}])
def test_what_is_no_report_of_ours_is_none(found: dict[str, object]) -> None:
    assert FailureReport.read(found) is None


def test_the_first_line_that_says_something() -> None:
    assert first_line("\n  the fact \nException raised from wait") == "the fact"
    assert first_line("\n") == "no reason given"
