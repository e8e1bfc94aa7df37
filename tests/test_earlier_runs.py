"""Runs and traces of earlier versions open in every command.

`tests/fixtures/earlier` holds runs of commit dfdaafa, whose descriptions state no policy:
`rrfp train --hint bf` and `--dispatch megatron` on two ranks (`--layers 2 --hidden 32 --seq-length
16 --microbatches 4 --steps 2`), and `rrfp simulate --pp 2 --microbatches 4 --hint bfw --limit none
--seeds 2`.
"""

import json
import shutil
from pathlib import Path

import pytest

from rrfp.cli import app
from rrfp.cli.errors import run

EARLIER = Path(__file__).parent / "fixtures" / "earlier"
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
        assert run(app.app, [*command, str(path), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_other_commands_take_an_earlier_run(
    earlier: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(earlier / name)
    assert run(app.app, ["trace", "check", where]) == 0
    assert "is whole" in capsys.readouterr().out
    assert run(app.app, ["trace", "export", where, "-o", str(tmp_path / "run.json")]) == 0
    assert run(app.app, ["trace", "export", where, "-o", str(tmp_path / "tables")]) == 0
    assert run(app.app, ["analyze", "compare", where, where]) == 0
    assert run(app.app, ["analyze", "report", where, "-o", str(tmp_path / "report.html")]) == 0
    chart = ["analyze", "chart", "gantt", where, "-o", str(tmp_path / "gantt.svg")]
    assert run(app.app, chart) == 0
    costs = ["simulate", "--pp", "2", "--microbatches", "4", "--costs", where]
    assert run(app.app, costs) == 0


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
    assert run(app.app, command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["dispatch"], row["limit"], row["hold"]) == (dispatch, limit, None)
