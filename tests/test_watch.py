"""`rrfp watch` on the command line: its page, its lines, and what an alert runs."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from tests.followed import SETTING, SLOW, Live
from tests.trained import rrfp_here
from tests.watched import record

ROOT = Path(__file__).parent.parent


def _write_run(path: Path, recording: Recording) -> None:
    path.mkdir()
    write_run_files(RunDir(path), recording)


def test_a_run_without_records_shows_its_metrics(tmp_path: Path) -> None:
    line = {"step": 4, "loss": 2.5, "step_time_s": 0.5, "tokens": 100, "busy_fraction": [0.5, 0.25]}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "outcome.json").write_text('{"outcome": "finished", "error": null}\n')
    shown = rrfp_here(tmp_path, "watch", str(tmp_path), "--once")
    assert "loss 2.5000  500 ms a step  200 tokens/s" in shown.stdout
    assert "There are no records" in shown.stdout
    lines = rrfp_here(tmp_path, "watch", str(tmp_path))
    assert lines.stdout.splitlines()[0].startswith("step 4  loss 2.5")


def test_the_page_names_what_is_slow_in_24_lines(
    tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _write_run(tmp_path / "run", record(SLOW, 30))
    shown = rrfp_here(tmp_path, "watch", "run", "--once")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, shown.stderr) == (0, "")
    page = "".join(f"{line.rstrip()}\n" for line in lines)
    golden("screens/watch.txt", page)
    assert page in (ROOT / "docs" / "guide" / "watch.md").read_text()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    told = " ".join(shown.stdout.split())
    assert "Slow: rank 2 (stage 2, replica 0, on simulated) takes" in told
    assert "longer than before, since step 12" in told


def test_lines_and_json_tell_each_step_and_alert_once(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    lines = rrfp_here(tmp_path, "watch", "run").stdout.splitlines()
    assert [line for line in lines if line.startswith("step 7  ")]
    assert len(lines) == 1 + 30 + 1
    told = [json.loads(line) for line in _stdout(tmp_path, "watch", "run", "--format", "json")]
    assert [each["step"] for each in told if each["event"] == "step"] == [*range(30)]
    (slow,) = [each for each in told if each["event"] == "slow"]
    assert (slow["kind"], slow["ranks"], slow["since_step"]) == ("rank", [2], 12)
    last = next(each for each in reversed(told) if each["event"] == "step")
    assert last["slow"]["rank_2"] == pytest.approx(0.5, abs=0.1)
    assert 0 < last["bubble_fraction"] < 1


def test_alert_says_nothing_of_a_clean_run(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SETTING, 30))
    assert _stdout(tmp_path, "watch", "run", "--alert") == ["run: recorded, and over"]


def test_an_alert_runs_the_command(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    command = 'echo "$RRFP_ALERT $RRFP_ALERT_KIND $RRFP_ALERT_RANKS $RRFP_ALERT_SINCE_STEP" >> told'
    done = rrfp_here(tmp_path, "watch", "run", "--alert", "--alert-command", command)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == "slow rank 2 12\n"
    failed = rrfp_here(tmp_path, "watch", "run", "--alert", "--alert-command", "echo no; exit 4")
    assert failed.stderr == "note: the alert command ended with 4: no\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nowhere",), 1, "there is no run or trace at nowhere"),
        (("run.json",), 2, "run.json is not the directory of a run"),
        ((".", "--alert", "--once"), 2, "--alert waits for steps to come"),
        ((".", "--export", "prometeus:x"), 2, "did you mean 'prometheus'?"),
        ((".", "--export", "wandb"), 2, "--export wandb needs a directory"),
        ((), 1, "there is no run yet in runs"),
    ],
)
def test_what_cannot_be_watched_is_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = rrfp_here(tmp_path, "watch", *arguments)
    assert done.returncode == code
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_live_page_draws_and_leaves_with_the_run(tmp_path: Path) -> None:
    """In a terminal of 80 x 24, on a run that goes on meanwhile; then Ctrl-C on another one."""
    live = Live(tmp_path / "run", record(SLOW, 30))
    with noting_outcome(live.run):
        live.write(*range(10))
        screen = _Screen(tmp_path, "watch", "run")
        assert screen.shows("10 of 30 steps")
        live.write(*range(10, 30))
        assert screen.shows("30 of 30 steps")
        assert screen.shows("Slow: rank 2")
        live.end()
    assert screen.shows("finished")
    assert screen.ended() == 0
    (tmp_path / "other").mkdir()
    screen = _Screen(tmp_path, "watch", "other")
    assert screen.shows("nothing is recorded yet")
    screen.interrupt()
    assert screen.ended() == 130


def _stdout(directory: Path, *arguments: str) -> list[str]:
    return rrfp_here(directory, *arguments).stdout.splitlines()


class _Screen:
    """A command in a terminal."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._master, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rrfp", *arguments],
            cwd=directory,
            env={**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self._shown = b""

    def shows(self, text: str, within_s: float = 60.0) -> bool:
        """Whether it comes to show this."""
        deadline_s = time.monotonic() + within_s
        while text.encode() not in self._shown:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{text!r} is not in {self._shown[-2000:].decode()}")
            self._read()
        return True

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        deadline_s = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline_s:
            self._read()
        self._process.kill()
        os.close(self._master)
        assert rb"\x1b" not in self._shown, "what moves the cursor is shown as text"
        return self._process.wait()

    def _read(self) -> None:
        ready, _, _ = select.select([self._master], [], [], 0.1)
        if ready:
            with suppress(OSError):
                self._shown += os.read(self._master, 65536)
