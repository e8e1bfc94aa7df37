"""The commands that read a trace, as a user runs them: what they print and how they exit."""

import csv
import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rrfp.analyze.bubbles import CAUSES
from rrfp.cli import main as cli
from rrfp.schedule.tasks import Cause
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import WaitRecord
from tests.analyze.recordings import make_recording


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run, which is the newest of the working directory."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    write_trace(directory / "trace.pftrace", make_recording(4, 6, 5))
    (tmp_path / "runs" / "latest").symlink_to("one")
    return directory


def _rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
    code = cli.main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_fits_and_has_a_row_a_rank_and_a_total(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = _rrfp(capsys, monkeypatch, "analyze", "bubbles")
    assert code == 0
    lines = [line for line in out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.split()[0] in ("0", "1", "2", "3", "all")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "all"]
    for row in rows:
        work, bubble, *causes = map(float, row[2 if row[0] != "all" else 1 :])
        assert work + bubble == pytest.approx(100, abs=0.11)
        assert sum(causes) == pytest.approx(bubble, abs=0.5)


def test_all_causes_fit_also_where_a_rank_has_many_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recording = make_recording(2, 2, 1)
    for records in recording.ranks:
        records.info = replace(records.info, stages=tuple(range(records.info.rank, 14, 2)))
        first, *_, last = records.tasks
        records.tasks[:] = [first, last]
        records.waits[:] = [
            WaitRecord(first.end_ns + n * 9_000, first.end_ns + (n + 1) * 9_000, 0, cause)
            for n, cause in enumerate(Cause)
        ]
    trace = tmp_path / "trace.pftrace"
    write_trace(trace, recording)
    code, out, _ = _rrfp(capsys, monkeypatch, "analyze", "bubbles", str(trace))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    rows = [line.split() for line in out.splitlines()]
    upper, lower = (row[1:] for row in rows if row[:1] == ["all"])
    _, bubble, *causes = map(float, [*upper, *lower])
    assert len(causes) == len(CAUSES)
    assert sum(causes) == pytest.approx(bubble, abs=0.6)
    for words in ("0 2 4", "1 3 5", "stage"):
        assert words in out


def test_json_is_one_object_that_adds_up(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ([], [str(run)], [str(run / "trace.pftrace")]):
        code, out, _ = _rrfp(
            capsys, monkeypatch, "analyze", "bubbles", *path, "--steps", "1:3", "--format", "json"
        )
        assert code == 0
        report = json.loads(out)
        assert report.keys() == {"bubble_fraction", "window_s", "ranks", "evaluations_left_out"}
        for number, rank in enumerate(report["ranks"]):
            assert (rank["rank"], rank["pp_rank"], rank["stages"]) == (number, number, [number])
            parts = rank["busy_s"] + sum(rank["causes"].values())
            assert parts == pytest.approx(report["window_s"], abs=1e-9)
            assert rank["bubble_fraction"] == pytest.approx(1 - rank["busy_s"] / report["window_s"])


def test_csv_has_a_row_a_rank(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = _rrfp(capsys, monkeypatch, "analyze", "bubbles", "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["rank"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        parts = [float(row[name]) for name in list(row)[list(row).index("busy_s") :]]
        assert sum(parts) == pytest.approx(float(row["window_s"]))


def test_a_bubble_above_the_bound_fails(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _rrfp(capsys, monkeypatch, "analyze", "bubbles", "--fail-above", "0.1")
    assert (code, bool(out)) == (3, True)
    assert "above the 0.1 of --fail-above" in err
    code, _, err = _rrfp(capsys, monkeypatch, "analyze", "bubbles", "--fail-above", "0.9")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "3"],
        ["--steps", "a:b"],
        ["--steps", "-1:2"],
        ["--steps", "4:4"],
        ["--steps", "100:200"],
        ["--format", "yaml"],
        ["--fail-above", "3"],
    ],
)
def test_wrong_arguments_exit_with_2(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    code, out, err = _rrfp(capsys, monkeypatch, "analyze", "bubbles", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [["analyze", "bubbles"], ["trace", "check"], ["trace", "view", "--no-browser"]]
)
def test_a_trace_that_is_not_there_exits_with_1(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ([], ["none.pftrace"]):
        code, out, err = _rrfp(capsys, monkeypatch, *command, *path)
        assert (code, out) == (1, "")
        assert "there is no run" in err


@pytest.mark.parametrize("command", [["analyze", "bubbles"], ["trace", "check"]])
def test_a_truncated_trace_exits_with_1(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    trace = run / "trace.pftrace"
    trace.write_bytes(trace.read_bytes()[:-700])
    code, out, err = _rrfp(capsys, monkeypatch, *command)
    assert (code, out) == (1, "")
    assert "is truncated" in err


def test_check_distinguishes_a_whole_trace_from_a_damaged_one(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _rrfp(capsys, monkeypatch, "trace", "check")
    assert (code, err) == (0, "")
    # Every rank of that recording states 900 ns a step; the steps of the last rank are shortest.
    recording = make_recording(4, 6, 5)
    steps_ns = [p.end_ns - p.start_ns for p in recording.ranks[3].phases if p.phase == "schedule"]
    cost = f"at most {5 * 900 / sum(steps_ns):.2%} of a rank's time in its steps"
    assert out == f"runs/one/trace.pftrace is whole\nRecording it took {cost}\n"
    damaged = make_recording(3, 4, 2)
    del damaged.ranks[1].receives[0]
    write_trace(run / "trace.pftrace", damaged)
    code, out, err = _rrfp(capsys, monkeypatch, "trace", "check")
    assert code == 1
    assert "lost: 1 message sent and never received" in out


def test_check_of_a_run_that_stated_no_cost(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = make_recording(2, 2, 1)
    for records in recording.ranks:
        records.costs.clear()
    write_trace(run / "trace.pftrace", recording)
    code, out, _ = _rrfp(capsys, monkeypatch, "trace", "check")
    assert (code, out) == (0, "runs/one/trace.pftrace is whole\n")


def _view(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start `rrfp trace view`, without a display or browser unless the variables name one."""
    chosen = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "rrfp", "trace", "view", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | variables,
    )


def test_view_serves_until_ctrl_c(run: Path) -> None:
    with _view(str(run), "--no-browser") as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            tunnel = process.stdout.readline()
            port = urlsplit(address).port
            assert address.startswith(f"http://127.0.0.1:{port}/")
            assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
            with urllib.request.urlopen(f"{address}trace.pftrace", timeout=10) as response:
                assert response.read() == (run / "trace.pftrace").read_bytes()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.fixture
def browser(tmp_path: Path) -> str:
    """A command for $BROWSER that does not return before the server has answered it."""
    script = tmp_path / "browser.py"
    script.write_text(
        "import http.client, sys, urllib.parse, urllib.request\n"
        "connection = http.client.HTTPConnection(urllib.parse.urlsplit(sys.argv[1]).netloc)\n"
        "connection.request('GET', '/')\n"
        "response = connection.getresponse()\n"
        "arguments = response.headers['Location'].partition('#!/?')[2]\n"
        "trace = urllib.parse.parse_qs(arguments)['url'][0]\n"
        "found = urllib.request.urlopen(trace, timeout=10).read()\n"
        "print('the browser got', found[:1], flush=True)\n"
    )
    return f"{sys.executable} {script} %s"


def test_view_answers_a_browser_that_it_waits_for(run: Path, browser: str) -> None:
    with _view(BROWSER=browser) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert lines[2] == "the browser got b'\\n'\n"
    assert process.returncode == 130


@pytest.mark.skipif(sys.platform != "linux", reason="only there a display has a variable")
def test_view_opens_no_browser_where_there_is_no_display(run: Path) -> None:
    with _view(str(run)) as process:
        try:
            assert process.stderr is not None
            told = [process.stderr.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert told[0] == "No display for a browser here; open the address in one yourself.\n"
    assert told[1] == "Ctrl-C ends it.\n"
    assert process.returncode == 130
