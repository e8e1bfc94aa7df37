"""What steers a terminal, or makes a spreadsheet calculate, is shown and not done."""

import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from rich.text import Text

from rrfp.cli.progress import progress
from rrfp.cli.tables import console, csv_of, harmless
from rrfp.cli.terminal import guarded, shown
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from tests.recordings import make_recording
from tests.trained import rrfp_here

ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
STEERING = set(ESCAPE) - set("]0;owned[2J31m")


def test_text_that_steers_nothing_stays() -> None:
    text = "a\tb\nwärmt 🚀 → █ \\x1b"
    assert shown(text) == text
    assert shown(ESCAPE) == SHOWN
    assert shown("\ud800\u2028") == r"\ud800\u2028"


def test_a_guarded_stream_is_that_stream_to_everybody_else() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    print(ESCAPE, file=guarded(stream))
    guarded(stream).writelines([ESCAPE, "\n"])
    stream.flush()
    assert stream.buffer.getvalue().decode() == f"{SHOWN}\n" * 2
    assert guarded(stream).buffer is stream.buffer


def test_rich_draws_its_colours_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    drawn = console()
    drawn.file = stream = io.StringIO()
    drawn.print(Text("a\x1b[2J\u202e", style="bold"), soft_wrap=True)
    assert stream.getvalue() == "\x1b[1ma\\x1b[2J\\u202e\x1b[0m\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_redrawn_steers_and_what_is_said_meanwhile_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", guarded(terminal))
    monkeypatch.setenv("TERM", "xterm")
    with progress("Simulating", 3) as more:
        more(1)
        sys.stderr.write(f"{ESCAPE} said\n")
    drawn = terminal.getvalue()
    assert "\x1b[2KSimulating" in drawn
    assert r"\x1b[2K" not in drawn
    assert "said" in drawn
    assert not set("\x07\x9b\u202e") & set(drawn)


def hostile() -> Recording:
    """A run that has it wherever a trace has text."""
    made = make_recording(2, 3, 3)
    made.settings |= {"settings": {"hint": ESCAPE, ESCAPE: 1}, ESCAPE: ESCAPE}
    for records in made.ranks:
        records.info = replace(records.info, host=ESCAPE)
        records.waits[:] = [wait._replace(cause=ESCAPE) for wait in records.waits]
        records.sends[:] = [send._replace(plane=ESCAPE) for send in records.sends]
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "check", "run"),
        ("analyze", "run"),
        ("analyze", "bubbles", "run"),
        ("analyze", "bubbles", "run", "--format", "csv"),
        ("analyze", "bubbles", "run", "--format", "md"),
        ("analyze", "critical-path", "run"),
        ("analyze", "whatif", "run"),
        ("analyze", "compare", "run", "run"),
        ("runs", "."),
        ("runs", ".", "--format", "csv"),
        ("watch", "--once", "run"),
        ("watch", "--once", "run", "--format", "json"),
        ("trace", "check", ESCAPE),
    ],
    ids=" ".join,
)
def test_no_command_lets_a_trace_steer_the_terminal(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    made = hostile()
    write_trace(run.trace, made)
    run.run_json.write_text(json.dumps(made.settings))
    run.outcome.write_text(json.dumps({"outcome": "failed", "error": ESCAPE}))
    done = rrfp_here(tmp_path, *arguments)
    assert done.stdout + done.stderr
    assert not STEERING & set(done.stdout + done.stderr)
    assert "this is a bug" not in done.stderr


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("-2.5e-3", "-2.5e-3"),
        (-2, -2),
        (-0.5, -0.5),
        (None, None),
        ("bf", "bf"),
        ("a=b", "a=b"),
    ],
)
def test_a_cell_is_no_formula(cell: object, told: object) -> None:
    assert harmless(cell) == told


def test_tables_as_csv_have_no_formulas(tmp_path: Path) -> None:
    formula = "=HYPERLINK(1)"
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.run_json.write_text(json.dumps({"settings": {"hint": formula, "steps": 2}}))
    run.outcome.write_text(json.dumps({"outcome": "failed", "error": formula}))
    (row,) = csv.DictReader(io.StringIO(rrfp_here(tmp_path, "runs", ".", "--format", "csv").stdout))
    assert (row["hint"], row["error"]) == (f"'{formula}", f"'{formula}")


def test_reports_as_csv_have_no_formulas() -> None:
    report = pl.DataFrame({"kind": ["=1+1", "F"], "n": [-1, 2]})
    assert csv_of(report) == "kind,n\n'=1+1,-1\nF,2\n"


def test_every_sign_has_a_form_in_the_encoding_of_the_locale() -> None:
    """Without a locale a machine prints ASCII, and what commands print has signs beyond it."""
    traces = Path(__file__).parent.parent / "traces"
    a, b = traces / "gpt-pp4-bf.pftrace", traces / "gpt-pp4-megatron.pftrace"
    done = subprocess.run(
        (sys.executable, "-m", "rrfp", "analyze", "compare", a, b),
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"^ more than noise" in done.stdout
