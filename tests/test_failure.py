"""What a failing rank tells its launcher."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.trace.outcome import Culprit, FoundBy, RunFailedError
from rrfp.trace.run_dir import RunDir
from rrfp.train.launch import rank_process as process
from rrfp.train.launch.failure import ERROR_FILE, FailureReport
from rrfp.train.launch.launcher import _first_failure
from rrfp.train.launch.processes import Failure
from rrfp.train.launch.watchdog import Standstill, Why

REPORT = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)


def nobody() -> None:
    """No other host says why ranks of this one have lost its ranks."""


def test_a_report_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    REPORT.write()
    written = json.loads((tmp_path / "error.json").read_text())
    assert FailureReport.read(written) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_stalls_grid_is_told_below_the_sentence(tmp_path: Path) -> None:
    grid = "rank  waits\n1     2.0 s"
    report = FailureReport("rank 1 waited", 1, False, False, detail=grid)
    failure, run = Failure(7, 1, 0.0, report), RunDir(tmp_path)
    told = str(_first_failure({1: failure}, run, nobody))
    assert told == f"rank 1 failed: rank 1 waited (see {run.rank_log(1)})\n{grid}"


LOST = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)
OWN = FailureReport("no memory", 1, is_consequence=False, is_silence=False)
SILENT = FailureReport("rank 2 was silent", 1, is_consequence=False, is_silence=True)
REFUSED = FailureReport("--lr is -1", 2, is_consequence=False, is_silence=False)
OWN_FAULT, OF_LINK = Culprit(FoundBy.RANK, 1), Culprit(FoundBy.LINK, link=(0, 1))
ENDED, KILLED = -signal.SIGTERM - 100, -signal.SIGKILL - 100
"""Exit codes by a signal of the launcher's own."""


@pytest.mark.parametrize(
    ("failures", "elsewhere", "told"),
    [
        ({0: (1, LOST), 1: (-signal.SIGSEGV, None)}, "", "rank 1 (pid 7) was killed by SIGSEGV"),
        ({0: (1, LOST), 1: (1, OWN), 2: (ENDED, None)}, "", "rank 1 failed: no memory"),
        ({0: (1, LOST), 2: (-signal.SIGTERM, None)}, "", "rank 2 (pid 7) was killed by SIGTERM"),
        ({0: (1, OWN), 1: (1, REFUSED)}, "", "rank 0 failed: no memory"),
        ({1: (1, REFUSED)}, "", "--lr is -1"),
        ({0: (1, SILENT), 2: (KILLED, None)}, "", "rank 2 (pid 7) did not answer and was"),
        ({0: (1, LOST)}, "", "rank 0 failed: rank 1 was lost (see "),
        ({0: (1, LOST)}, "host 1 (b): rank 2 failed", "host 1 (b): rank 2 failed"),
        ({0: (1, SILENT)}, "host 1 (b) was silent", "host 1 (b) was silent"),
        ({0: (1, OWN)}, "host 1 (b) was silent", "rank 0 failed: no memory"),
        ({3: (9, None)}, "", "rank 3 exited with code 9; see "),
        ({3: (-40, None)}, "", "rank 3 (pid 7) was killed by signal 40; "),
    ],
)
def test_the_failure_that_the_others_follow_from_is_told(
    failures: dict[int, tuple[int, FailureReport | None]],
    elsewhere: str,
    told: str,
    tmp_path: Path,
) -> None:
    """Each a second after the one before."""
    ended = {
        rank: Failure(7, code + 100 * was_ended, float(rank), report, was_ended)
        for rank, (code, report) in failures.items()
        for was_ended in [code < -100]
    }
    error = _first_failure(
        ended, RunDir(tmp_path), lambda: RrfpError(elsewhere) if elsewhere else None
    )
    assert str(error).startswith(told)
    assert error.exit_code == (2 if told == "--lr is -1" else 1)


STOPPED = Standstill(Why.STOPPED, 15.2, "in step 7", "a.py:1 in f", [0, 3])
DUMP = 'Current thread 0x1 (most recent call first):\n  File "/b.py", line 2 in g\n'


@pytest.mark.parametrize(
    ("stacks", "at", "where"),
    [
        ("", "a.py:1 in f", "its output"),
        (DUMP, "/b.py:2 in g", "its stack"),
    ],
)
def test_a_rank_that_stood_still_is_told_with_its_place(
    tmp_path: Path, stacks: str, at: str, where: str
) -> None:
    run = RunDir(tmp_path)
    failures = {
        0: Failure(6, 1, 1.0, LOST),
        1: Failure(7, -signal.SIGKILL, 2.0, None, True, STOPPED, stacks),
        2: Failure(8, 1, 1.0, SILENT),
    }
    assert str(_first_failure(failures, run, nobody)) == (
        f"rank 1 (pid 7) stood still in step 7 for 15 s, at {at}, and was killed: a signal had "
        f"stopped it, while ranks 0, 3 waited; {where} is in {run.rank_log(1)}, and see who stops "
        "it"
    )


def test_ranks_that_all_waited_for_another_are_told_once(tmp_path: Path) -> None:
    deadlock = Standstill(Why.DEADLOCK, 150.2, "in close", "a.py:1 in f", [1, 2])
    failures = {0: Failure(6, -signal.SIGKILL, 2.0, None, True, deadlock)}
    assert "killed: every rank of the run waited for another; its output" in str(
        _first_failure(failures, RunDir(tmp_path), nobody)
    )


def test_a_failure_of_its_own_is_told_before_one_that_was_stopped(tmp_path: Path) -> None:
    failures = {
        0: Failure(6, 1, 1.0, OWN),
        1: Failure(7, -signal.SIGKILL, 0.5, None, True, STOPPED),
    }
    told = str(_first_failure(failures, RunDir(tmp_path), nobody))
    assert told.startswith("rank 0 failed: no memory")


def test_a_rank_ends_even_if_its_report_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: FailureReport) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(FailureReport, "write", full)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        process._fail(UsageError("no memory"))
    assert ended.value.code == UsageError.exit_code


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


@pytest.mark.parametrize(
    ("failure", "culprit"),
    [
        (Failure(7, -signal.SIGSEGV, 1.0, None), Culprit(FoundBy.LAUNCHER, 1)),
        (Failure(7, -9, 1.0, None, True, STOPPED), Culprit(FoundBy.LAUNCHER, 1)),
        (Failure(7, 9, 1.0, None), Culprit(FoundBy.LAUNCHER, 1)),
        (Failure(7, 1, 1.0, replace(OWN, culprit=OWN_FAULT)), OWN_FAULT),
        (Failure(7, 1, 1.0, replace(LOST, culprit=OF_LINK)), OF_LINK),
        (Failure(7, 1, 1.0, LOST), Culprit(FoundBy.COLLECTIVE)),
    ],
)
def test_the_error_says_who_is_to_blame(failure: Failure, culprit: Culprit, tmp_path: Path) -> None:
    error = _first_failure({1: failure}, RunDir(tmp_path), nobody)
    assert isinstance(error, RunFailedError)
    assert error.culprit == culprit


def test_a_report_says_who_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    for culprit in (None, OF_LINK, OWN_FAULT):
        report = replace(REPORT, culprit=culprit)
        report.write()
        assert FailureReport.read(json.loads(path.read_bytes())) == report
