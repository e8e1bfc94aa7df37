"""The screen of each command on a terminal of 80 columns and 24 lines, for the traces in traces/.

The screens are in tests/golden/screens: notes of stderr first, trailing spaces left out. Every
command has its help there, which may be longer than 24 lines, as that of `train` is; `train`, `run`
and `verify`, which train, and `trace view`, which serves until Ctrl-C, have nothing else. The page
of `watch` is made in tests/analyze/test_watch.py.
"""

import fcntl
import json
import os
import pickle
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.core import TyperGroup

from rrfp.analyze.colors import KIND_COLORS
from rrfp.cli import app
from rrfp.cli import main as cli
from rrfp.cli.analyze.findings import Part, fitted
from rrfp.doctor.checks import Check, State, absent
from rrfp.errors import RrfpError
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.run_dir import RunDir, create_run_dir
from tests.interchange.made_profiles import DONE, STARTED, WORLD, dump
from tests.products.races import MadeUp, turn

ROOT = Path(__file__).parents[2]
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
    "tune": (
        *("tune", "multimodal", "--pp", "4", "--microbatches", "8", "--layers", "16"),
        *("--simulations", "200", "--seeds", "4", "--best", "2"),
    ),
    "hint-show": ("hint", "show", "1f1b", "--pp", "4", "--microbatches", "4"),
    "hint-check": ("hint", "check", "1f1b", "--pp", "4", "--microbatches", "4"),
}
SCROLLING = {"compare", "tune"}
"""Screens of more than 24 lines."""
WRITING = {
    "report": ("analyze", "report", "run.pftrace", "-o", "report.html"),
    "chart": ("analyze", "chart", "gantt", "run.pftrace", "-o", "gantt.svg"),
    "export-chrome": ("trace", "export", "run.pftrace", "-o", "run.json"),
    "export-parquet": ("trace", "export", "run.pftrace", "-o", "tables"),
    "import": ("trace", "import", "profiles", "-o", "runs/other"),
    "import-hang": ("trace", "import", "--flight-recorder", "dumps"),
}
"""Commands that write files or read files made by tests; each runs in its own folder."""


def _commands(command: object, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command, those of groups too."""
    yield words
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from _commands(each, *words, name)


HELP = {"-".join(("help", *words)): words for words in _commands(typer.main.get_command(app.app))}

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


Held = Callable[..., None]


@pytest.fixture
def held(golden: Callable[[str, str], None]) -> Held:
    """`held(name, notes, screen)` holds a screen against its golden one, and its lines to 80
    columns and, unless it scrolls, to the terminal's rows."""

    def hold(name: str, notes: str, screen: str, scrolls: bool = False) -> None:
        lines = [line.rstrip() for line in (notes + screen).splitlines()]
        text = "\n".join(lines) + "\n"
        golden(f"screens/{name}.txt", text)
        # A sentence without a table, and a command to be copied, are the terminal's to break.
        wide = [line for line in lines if len(line) > COLUMNS and "rrfp " not in line]
        assert wide == []
        # The prompt takes a line, too.
        assert scrolls or num_rows(text) < LINES

    return hold


def num_rows(screen: str) -> int:
    """How many lines of a terminal a text takes."""
    return sum(max(1, -(-len(line.rstrip()) // COLUMNS)) for line in screen.splitlines())


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_as_it_was(run: Run, held: Held, name: str) -> None:
    held(name, *run(*SCREENS[name]), scrolls=name in SCROLLING)


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_every_command(run: Run, held: Held, name: str) -> None:
    notes, screen = run(*HELP[name], "--help")
    assert notes == ""
    held(name, notes, screen, scrolls=True)
    assert "…" not in screen
    # A choice that is broken in the middle of a word: `<table|csv|parque` and `t>`.
    assert not re.search(r"<[a-z-]+\|[a-z|-]* ", screen)
    # A line of a docstring that is wider than a screen.
    paragraphs = screen.split("╭")[0].split("\n\n")
    assert not re.search(r"\n [^ ]+ *\n [a-z]", paragraphs[-1])


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written_is_named(
    run: Run, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Takes seconds, and tests/analyze/test_report.py looks at the page.
    monkeypatch.setattr("rrfp.analyze.report.report_on", lambda *_: "<html></html>")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / TRACES["bf"], "run.pftrace")
    shutil.copytree(ROOT / "tests" / "fixtures" / "pipelining-1f1b", "profiles")
    Path("dumps").mkdir()
    for rank in range(4):
        reduced = ("all_reduce", WORLD, 1, DONE)
        entries = [reduced] if rank == 2 else [reduced, ("all_reduce", WORLD, 2, STARTED)]
        Path(f"dumps/nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(entries)))  # pyright: ignore[reportArgumentType]
    held(name, *run(*WRITING[name]))


def _made(name: str, num_steps: int, trace: bytes = b"", **described: object) -> RunDir:
    """A run of May 2025, each a day before the one made last."""
    made = create_run_dir(Path("runs", name), False, "")
    settings = {"hint": "bfw", "dispatch": "ready", "pp": 4, "tp": 2, "dp": 1, "steps": 20}
    made.run_json.write_text(json.dumps({"settings": settings} | described))
    made.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(num_steps)))
    if trace:
        made.trace.write_bytes(trace)
    noon = datetime(2025, 5, 32 - len(list(Path("runs").iterdir())), 12, tzinfo=UTC).timestamp()
    os.utime(made.run_json, (noon, noon))
    return made


def test_the_runs_of_a_folder(
    run: Run, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    going = _made("20250531-115500-bfw", 7)
    for name, num_steps, error in (
        ("20250530-081200-bfw", 20, None),
        ("20250529-172045-bfw", 3, RrfpError("rank 1 is gone")),
        ("one-more-try", 1, KeyboardInterrupt()),
    ):
        made = _made(name, num_steps, b"x" * 1_200_000 * num_steps)
        with suppress(RrfpError, KeyboardInterrupt), noting_outcome(made):
            if error is not None:
                raise error
    _made("20250527-090000-bfw", 12)
    _made("what-if", 0, b"x" * 48_000, simulated=True, settings={"hint": "bf", "pp": 8, "seeds": 1})
    theirs = {"hint": "1f1b", "dispatch": "fixed", "pp": 4}
    _made("theirs", 0, b"x" * 350_000, imported={}, settings=theirs)
    _made("job", 0, b"x" * 900, settings={"script": "pretrain_gpt.py", "pp": 8, "dp": 2})
    with noting_outcome(going):
        held("runs", *run("runs"))


def test_a_race(run: Run, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {"megatron-1f1b": 0.9, "torch-1f1b": 0.88, "bfw limit 32": 0.7}
    launch = MadeUp(
        turned=lambda entry, number: turn(
            entry, number, times_s.get(entry.rpartition(": ")[2], 0.75) + 0.01 * (number % 3)
        )
    )
    monkeypatch.setattr("rrfp.cli.bench._launch", launch)
    monkeypatch.setattr("rrfp.cli.bench.draw_charts", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    asked = ("--scale=tiny", "--steps=6", "--profile=multimodal", "--hold=paper", "--hold=1.5x")
    held("bench", *run("bench", "rq1", *asked, "--system=torch-1f1b", "--system=bfw"))


def test_a_machine_that_was_tried_out(
    run: Run, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "this machine has no NVIDIA driver (libcuda.so.1 is not there); start containers with "
    shared = "of 8 in this machine, by the quota of the control group; 4 ranks share them by "
    checks = [
        absent("gpu", f"{told}--gpus all, or use --device cpu"),
        *(absent(name, "see gpu") for name in ("gpu-clock", "peer-access", "cuda-ipc")),
        Check("pid-namespace", State.OK, 4026531836, "", "that of the host"),
        Check("nixl", State.OK, 7.2, "GB/s", "to READ 64 MiB on this host"),
        absent("fabric", "no InfiniBand, RoCE or EFA device; other hosts are reached by TCP"),
        Check("cores", State.SLOW, 2, "cores", f"{shared}default, so pace runs or take fewer"),
        Check("open-files", State.OK, 1048576, "files", "may be open in a process"),
        Check("megatron-core", State.OK, 3.1, "s", "to import megatron-core 0.16.1"),
        Check("gloo", State.OK, 98, "us", "for a sum of two ranks on 127.0.0.1"),
    ]
    monkeypatch.setattr("rrfp.doctor.diagnosis.diagnose", lambda: checks)
    held("doctor", *run("doctor"), scrolls=True)


def test_the_memory_of_a_run(run: Run, held: Held, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    asked = ("--pp", "4", "--microbatches", "16", "--costs", "multimodal", "--seeds", "2")
    run("simulate", *asked, "--hint", "bfw", "--hold", "1.0x", "--out", path)
    held("memory", *run("analyze", "memory", path))


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
    assert "1. Stage 3 is slower than the median stage" in screen
    assert num_rows(screen) < LINES


def test_the_picture_of_the_readme_has_the_colors_of_the_charts() -> None:
    picture = (ROOT / "docs" / "images" / "step.svg").read_text()
    colored = {each.upper() for each in re.findall(r'fill="(#[0-9a-fA-F]{6})"', picture)}
    greys = {each for each in colored if each[1:3] == each[3:5] == each[5:7]}
    assert colored - greys == set(KIND_COLORS.values())


def test_a_title_that_wraps_is_indented() -> None:
    part = Part("1. " + "word " * 30 + "end", "Advice.", "rrfp analyze")
    lines = fitted(Console(width=COLUMNS), "Lead.", [part], [])
    title = lines[2 : lines.index("   Advice.")]
    assert len(title) > 1
    assert all(re.match("   [we]", line) and len(line) <= COLUMNS for line in title[1:])
    assert " ".join(" ".join(title).split()) == part.title
