"""What each command shows in a terminal of 80 columns and 24 lines, on the traces that are here.

The screens are in tests/golden/screens: notes of stderr first, trailing spaces left out.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rrfp.cli import main as cli
from rrfp.cli.analyze.screen import Part, fitted

ROOT = Path(__file__).parent.parent
TRACES = {name: f"traces/gpt-pp4-{name}.pftrace" for name in ("bf", "megatron")}
COLUMNS, LINES = 80, 24

REPORTS = ("bubbles", "whatif", "deviations", "misalignment", "critical-path")
SCREENS = {
    **{f"{trace}-findings": ("analyze", path) for trace, path in TRACES.items()},
    **{
        f"{trace}-{report}": ("analyze", report, path)
        for trace, path in TRACES.items()
        for report in REPORTS
    },
    **{f"{trace}-check": ("trace", "check", path) for trace, path in TRACES.items()},
    "compare": ("analyze", "compare", *TRACES.values()),
    "simulate": ("simulate", "--pp", "4", "--microbatches", "8"),
    "simulate-sweep": (
        *("simulate", "--pp", "4", "--microbatches", "8", "--jitter", "lognormal:0.5"),
        *("--seeds", "4", "--sweep", "hint=bf,bfw", "--sweep", "dispatch=fixed,ready"),
    ),
    "hint-show": ("hint", "show", "1f1b", "--pp", "4", "--microbatches", "4"),
}

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The notes and the screen of a command that is run in the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))

    def rrfp(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        assert cli.main() == 0
        captured = capsys.readouterr()
        return captured.err, captured.out

    return rrfp


def num_rows(screen: str) -> int:
    """How many lines of a terminal a text takes."""
    return sum(max(1, -(-len(line.rstrip()) // COLUMNS)) for line in screen.splitlines())


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_as_it_was(run: Run, golden: Callable[[str, str], None], name: str) -> None:
    notes, screen = run(*SCREENS[name])
    lines = [line.rstrip() for line in (notes + screen).splitlines()]
    golden(f"screens/{name}.txt", "\n".join(lines) + "\n")
    # A sentence without a table, and a command to be copied, are the terminal's to break.
    wide = [line for line in lines if len(line) > COLUMNS and "rrfp " not in line]
    assert wide == [] or name.endswith("check")


@pytest.mark.parametrize("trace", TRACES)
def test_the_first_look_fits_a_screen(run: Run, trace: str) -> None:
    notes, screen = run("analyze", TRACES[trace])
    # The prompt takes a line, too.
    assert num_rows(notes + screen) < LINES


@pytest.mark.parametrize("num_letters", [30, 120, 400])
@pytest.mark.parametrize("trace", TRACES)
def test_advice_gives_way_to_long_names_and_commands_do_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str, num_letters: int
) -> None:
    folder = tmp_path.joinpath(*["n" * 60] * (num_letters // 60))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'n' * 30}.pftrace"
    shutil.copy(ROOT / TRACES[trace], path)
    monkeypatch.chdir(tmp_path)
    name = str(path.relative_to(tmp_path))
    notes, screen = run("analyze", name)
    assert num_rows(notes + screen) < LINES
    lines = screen.splitlines()
    commands = [line for line in lines if line.startswith("   rrfp ")]
    assert commands
    assert all(name in command for command in commands)
    assert lines[-1] == f"Next: rrfp analyze report {name} -o report.html"


def test_in_a_real_terminal_it_fits_as_well() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    with subprocess.Popen(
        [sys.executable, "-m", "rrfp", "analyze", TRACES["bf"]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment | {"TERM": "xterm"},
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while octets := os.read(ours, 1 << 16):
                seen += octets
        except OSError:
            # So a terminal ends on Linux.
            pass
        assert process.wait(60) == 0
    os.close(ours)
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r\n", "\n")
    assert "1. Stage 3 has more work than the median stage" in screen
    assert num_rows(screen) < LINES


def test_a_title_that_wraps_is_indented() -> None:
    part = Part("1. " + "word " * 30 + "end", "Advice.", "rrfp analyze")
    lines = fitted(Console(width=COLUMNS), "Lead.", [part], [])
    title = lines[2 : lines.index("   Advice.")]
    assert len(title) > 1
    assert all(re.match("   [we]", line) and len(line) <= COLUMNS for line in title[1:])
    assert " ".join(" ".join(title).split()) == part.title
