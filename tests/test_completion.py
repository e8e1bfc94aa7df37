"""Tab: what a shell is offered, asked as typer's own scripts for shells ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp.cli import main
from rrfp.cli.declared_options import VARIABLE
from rrfp.schedule.named_hints import IN_WORDS
from rrfp.trace.run_dir import create_run_dir


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in ((10, "old"), (0, "new")):
        run = create_run_dir(Path("runs", name), False, "")
        run.run_json.write_text("{}")
        moment_s = run.run_json.stat().st_mtime - age
        os.utime(run.run_json, (moment_s, moment_s))


def _bash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> set[str]:
    """What bash is offered behind this line."""
    monkeypatch.setenv(VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setattr(sys, "argv", ["rrfp"])
    assert main.main() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return set(captured.out.splitlines())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rrfp sim", {"simulate"}),
        ("rrfp hint ", {"show", "check"}),
        ("rrfp train --hin", {"--hint"}),
        ("rrfp train --hint z", {"zb-h1", "zb-v"}),
        ("rrfp run --hint int", {"interleaved"}),
        ("rrfp simulate --hint ", {"auto", *IN_WORDS}),
        ("rrfp hint show a", set()),
        ("rrfp analyze whatif --hint gp", {"gpipe"}),
        ("rrfp hint show gp", {"gpipe"}),
        ("rrfp train --dispatch ", {"ready", "fixed", "megatron"}),
        ("rrfp simulate --dispatch ", {"ready", "fixed"}),
        ("rrfp trace check ", {"old", "new"}),
        ("rrfp trace view @", {"@-1", "@-2"}),
        ("rrfp analyze compare old n", {"new"}),
        ("rrfp simulate --costs ", {"uniform", "language", "multimodal", "old", "new"}),
        ("rrfp bench rq1 rq", {f"rq{number}" for number in range(1, 7)}),
        ("rrfp analyze bubbles runs/", set()),
    ],
)
def test_bash_is_offered(
    line: str,
    offered: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _bash(monkeypatch, capsys, line) - {""} == offered


def test_behind_analyze_stands_a_report_or_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offered = _bash(monkeypatch, capsys, "rrfp analyze ")
    assert {"bubbles", "whatif", "old", "new"} < offered
    assert "--steps" in _bash(monkeypatch, capsys, "rrfp analyze --st")


@pytest.mark.parametrize(
    ("shell", "offered"),
    [
        ("zsh", """_arguments '*: :(("zb-v":"zero bubble over a V of two chunks"))'\n"""),
        ("fish", "zb-v\tzero bubble over a V of two chunks\n"),
    ],
)
def test_other_shells_are_told_what_it_is(
    shell: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "rrfp train --hint zb-v")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert main.main() == 0
    assert capsys.readouterr() == (offered, "")


def test_a_line_that_cannot_be_read_is_answered_by_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "rrfp train ")
    monkeypatch.setenv("COMP_CWORD", "no number")
    assert main.main() == 1
    assert capsys.readouterr() == ("", "")


def test_bash_itself_completes_a_run_and_a_hint(tmp_path: Path) -> None:
    """With the script that `rrfp --show-completion` prints, in a real bash."""
    called = tmp_path / "rrfp"
    called.write_text(f'#!/bin/sh\nexec {sys.executable} -m rrfp "$@"\n')
    called.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$({VARIABLE}=source_bash rrfp)"
        ask() {{
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _rrfp_completion rrfp
            echo "${{COMPREPLY[@]}}"
        }}
        ask rrfp analyze o
        ask rrfp train --hint zb-h
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(main.__file__).parent.parent.parent)},
    )
    assert (done.stdout, done.stderr) == ("old\nzb-h1\n", "")
