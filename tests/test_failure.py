"""What a failing rank tells its launcher."""

import json
from pathlib import Path

import pytest

from rrfp.megatron.failure import FailureReport, first_line

REPORT = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)


def test_a_report_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    REPORT.write()
    written = json.loads((tmp_path / "error.json").read_text())
    assert FailureReport.read(written) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


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
