"""Tables for people: figures add up, times have units, and Markdown is what GitHub has."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from rrfp.analyze.compare import Comparison, Estimate, comparison_tables
from rrfp.analyze.table import (
    NAME,
    TEXT,
    Column,
    Table,
    Times,
    apportioned,
    csv_of_frame,
    format_time,
    outliers,
    without_formula,
)
from rrfp.cli import main as cli
from rrfp.cli.console import console, print_table
from rrfp.cli.progress import progress
from rrfp.cli.terminal import escape_controls, guard
from rrfp.replay.bottlenecks import BubbleParts
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import StepConditions
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import MEGATRONS, OURS, equal_times, policy_of, simulated_run
from tests.train.trained import rrfp_here


@given(st.lists(st.integers(0, 10**9), max_size=12), st.integers(0, 10_000))
def test_rounded_parts_sum_to_the_whole(parts: list[int], total: int) -> None:
    found = apportioned(parts, total)
    whole = sum(parts)
    assert len(found) == len(parts)
    assert sum(found) == (total if whole else 0)
    for part, rounded in zip(parts, found, strict=True):
        exact = part * total / whole if whole else 0
        assert exact - 1 < rounded < exact + 1


def test_the_largest_remainders_are_rounded_up() -> None:
    assert apportioned([1, 1, 1], 1000) == [334, 333, 333]
    assert apportioned([2, 1, 0], 1000) == [667, 333, 0]


@pytest.mark.parametrize(
    ("longest_ns", "ns", "told"),
    [
        (133_000_000, 604_800, "0.6 ms"),
        (133_000_000, 133_000_000, "133.0 ms"),
        (133_000_000, 40_000, "<0.1 ms"),
        (133_000_000, 0, "0"),
        (1_234_000_000, 1_234_000_000, "1234.0 ms"),
        (12_340_000_000, 12_340_000_000, "12.3 s"),
        (300, 7, "7.0 ns"),
        (12_000, 7_000, "7.0 µs"),
    ],
)
def test_times_have_the_unit_of_the_longest(longest_ns: int, ns: int, told: str) -> None:
    assert Times([longest_ns, ns]).format(ns) == told


_UNITS_NS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


@given(st.integers(1, 10**12))
@example(99_960_000)
@example(999_600_000)
@example(999_960)
@example(999_500)
def test_a_time_has_three_digits_in_the_unit_that_it_reaches(ns: int) -> None:
    number, unit = format_time(ns).split()
    value = float(number)
    assert value * _UNITS_NS[unit] == pytest.approx(ns, rel=0.00501)
    assert number[-1] != "."
    assert 1 <= value < 1000 or unit == "s"
    assert value >= 1000 or len(number.replace(".", "")) == 3
    assert format_time(-ns) == f"-{format_time(ns)}"


@given(st.floats(0, 1), st.floats(0, 1))
@example(0.374, 0.336)
def test_the_percents_of_a_bubble_add_up(fraction: float, structural: float) -> None:
    description = BubbleParts(structural, fraction - structural).description
    whole, left, *jitter = map(int, re.findall(r"(\d+)%", description))
    excess = sum(jitter) * (-1 if "took off" in description else 1)
    assert whole == left + excess
    assert ("changed nothing" in description) == (not excess)


@pytest.mark.parametrize("ratio", [1.0, 1.2])
@pytest.mark.parametrize("cause_s", [0.0, 1e-6, 0.05])
def test_marks_of_a_comparison_are_reported_once(ratio: float, cause_s: float) -> None:
    clear, cause = (Estimate(each, each, each) for each in (ratio, cause_s))
    noise = Estimate(0.0, -0.01, 0.01)
    report = Comparison((3, 3), (1.0, ratio), clear, clear, clear, {"a": cause, "b": noise}, 3)
    out = io.StringIO()
    for table in comparison_tables(report, ["Told."]):
        print_table(table, Console(file=out, width=80))
    is_marked = ratio != 1 or cause_s != 0
    assert out.getvalue().count("▲ significant") == is_marked
    assert "mean over the ranks that hold stage 3" in out.getvalue()
    assert re.search(r"[+-][<0]\.?[^.]", out.getvalue()) is None


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ((10, 11, 9, 10, 40), {4}),
        ((10, 10, 10, 10.5), set()),
        ((10, 10, 10, 12), {3}),
        ((46.5, 50.4, 31.0, 28.9), set()),
        ((1, 9), set()),
        ((0, 0, 0, 0), set()),
        ((), set()),
    ],
)
def test_outliers_lie_far_above_the_others(values: tuple[float, ...], places: set[int]) -> None:
    assert outliers(values) == places


def test_a_table_in_markdown_is_one_whatever_it_holds() -> None:
    table = Table(
        "A | B",
        [
            Column("what", ["a|b", "*x*\nnext"], TEXT, total="all"),
            Column("over-\nhead\nms", ["1.0", "22.5"], marked={1}, total="23.5"),
        ],
        ["", "1 < 2"],
        has_total=True,
    )
    assert table.markdown() == (
        "**A \\| B**\n\n"
        "| what | overhead ms |\n"
        "| :-- | --: |\n"
        "| a\\|b | 1.0 |\n"
        "| \\*x\\* next | 22.5▲ |\n"
        "| **all** | **23.5** |\n\n"
        "▲ far above the others\n\n"
        "1 \\< 2\n"
    )


def test_a_wide_sheet_goes_on_below_itself() -> None:
    columns = [
        Column("rank", ["0", "1"]),
        *(Column(f"cause-{n:02}", ["1.0"] * 2) for n in range(14)),
    ]
    out = io.StringIO()
    print_table(Table("Wide", columns), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("rank" in line for line in lines) == 2
    assert all(f"cause-{n:02}" in out.getvalue() for n in range(14))


def test_no_figures_stand_alone_below_a_wide_table() -> None:
    columns = [Column("rank", ["0"]), *(Column(f"cause-{n:02}", ["1.0"]) for n in range(8))]
    out = io.StringIO()
    print_table(Table("Wide", columns), Console(file=out, width=80))
    heads = [line.split() for line in out.getvalue().splitlines() if "rank" in line]
    assert heads == [
        ["rank", *(f"cause-{n:02}" for n in range(6))],
        ["rank", "cause-06", "cause-07"],
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("num_letters", [10, 30, 40, 70, 200])
def test_names_keep_their_end_and_columns_give_way(width: int, num_letters: int) -> None:
    name = "n" * (num_letters - 3) + "END"
    columns = (
        Column("run", [name], NAME),
        Column("began", ["11-20 10:00"]),
        Column("what", ["interleaved pp 4 tp 2 cp 2"], TEXT),
        Column("size", ["123 kB"]),
    )
    out = io.StringIO()
    table = Table("", columns, num_names=len(columns), dispensable=("size", "began"))
    print_table(table, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(re.findall(r"^ ([nEND]+)(?= |$)", out.getvalue(), re.M)) == name
    assert "began" in out.getvalue() or "size" not in out.getvalue()
    assert name in out.getvalue() or num_letters + 20 > width
    assert "size" in out.getvalue() or num_letters + 42 > width


def test_terminals_show_the_colors_of_charts() -> None:
    out = io.StringIO()
    table = Table("", [Column("stage", ["0"], TEXT), Column("F", ["1.0"], color="#56B4E9")])
    print_table(table, Console(file=out, width=80, force_terminal=True, color_system="truecolor"))
    assert "38;2;86;180;233m■" in out.getvalue()
    plain = io.StringIO()
    print_table(table, Console(file=plain, width=80, color_system=None))
    assert "■" not in plain.getvalue()


Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        assert cli.main() == 0
        return capsys.readouterr().out

    return rrfp


SMALL = ("simulate", "--pp", "2", "--microbatches", "4")
COMMANDS = [
    *(
        ("analyze", name, str(OURS))
        for name in ("findings", "bubbles", "deviations", "misalignment", "critical-path", "whatif")
    ),
    ("analyze", "compare", str(OURS), str(MEGATRONS)),
    SMALL,
    (*SMALL, "--sweep", "hint=bf,bfw"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_every_table_is_there_as_markdown(run: Run, command: tuple[str, ...]) -> None:
    told = run(*command, "--format", "md")
    assert "─" not in told
    if "findings" in command:
        assert told.count("```sh") == 4
        assert re.search(r"^1\. \*\*Stage 3 ", told, re.MULTILINE)
        return
    assert re.match(r"\*\*.+\*\*\n\n\| ", told)
    blocks = [block.splitlines() for block in told.split("\n\n") if block.startswith("|")]
    assert blocks
    for head, rule, *rows in blocks:
        widths = {line.replace("\\|", "").count("|") for line in (head, rule, *rows)}
        assert len(widths) == 1
        assert re.fullmatch(r"\|( :--| --:| \|)+", rule)
        assert rows


def _rows(markdown: str) -> list[dict[str, str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" *▲") for cell in line.strip("|").split("|")] for line in lines]
    head, _, *rows = cells
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("trace", [OURS, MEGATRONS], ids=["ours", "megatrons"])
def test_shares_of_a_stage_sum_to_its_time(run: Run, trace: Path) -> None:
    for by in ("stage", "rank"):
        for row in _rows(run("analyze", "bubbles", str(trace), "--by", by, "--format", "md")):
            causes = [float(value) for name, value in row.items() if name not in _NOT_CAUSES]
            assert float(row["work"]) + float(row["bubble"]) == pytest.approx(100)
            assert sum(causes) == pytest.approx(float(row["bubble"]))


_NOT_CAUSES = ("rank", "stage", "work", "bubble")


@pytest.mark.parametrize("trace", [OURS, MEGATRONS], ids=["ours", "megatrons"])
def test_owners_of_a_path_sum_to_the_step(run: Run, trace: Path) -> None:
    rows = _rows(run("analyze", "critical-path", str(trace), "--format", "md"))
    found = json.loads(run("analyze", "critical-path", str(trace), "--format", "json"))
    kinds = [name for name in rows[0] if name not in ("stage", "sum", "%")]
    for row in rows:
        assert sum(float(row[kind] or 0) for kind in kinds) == pytest.approx(float(row["sum"]))
    *stages, whole = rows
    assert whole["%"] == "100.0"
    assert float(whole["sum"]) == pytest.approx(1000 * found["length_s"], abs=0.0501)
    for name in (*kinds, "sum", "%"):
        of_stages = sum(float(row[name] or 0) for row in stages)
        assert of_stages == pytest.approx(float(whole[name]))


@pytest.fixture
def replicas(tmp_path: Path) -> str:
    """A run of two replicas of two stages, each with two tensor-parallel ranks."""
    policy, shape = policy_of("bf", Shape(2, 4))
    fast = StepConditions(equal_times(shape, 10, 8, 7), num_members=2, transfer=lambda *_: 3)
    slow = StepConditions(equal_times(shape, 20, 16, 14), num_members=2, transfer=lambda *_: 3)
    path = tmp_path / "trace.pftrace"
    write_trace(path, simulated_run(policy, shape, [fast, slow], num_steps=2))
    return str(path)


@pytest.mark.parametrize(
    ("command", "num_stages", "num_ranks"),
    [("bubbles", 3, 9), ("deviations", 2, 4), ("misalignment", 2, 8)],
)
def test_a_row_a_stage_unless_ranks_are_asked_for(
    run: Run, replicas: str, command: str, num_stages: int, num_ranks: int
) -> None:
    by_stage = _rows(run("analyze", command, replicas, "--format", "md"))
    by_rank = _rows(run("analyze", command, replicas, "--by", "rank", "--format", "md"))
    assert (len(by_stage), len(by_rank)) == (num_stages, num_ranks)
    assert not any(name.startswith("rank") for name in by_stage[0])
    assert any(name.startswith("rank") for name in by_rank[0])
    if command == "bubbles":
        for row in by_stage[:-1]:
            of_stage = [float(each["work"]) for each in by_rank if each["stage"] == row["stage"]]
            mean = sum(of_stage) / len(of_stage)
            assert float(row["work"]) == pytest.approx(mean, abs=0.11)
        assert by_stage[-1]["work"] == by_rank[-1]["work"]


def test_findings_are_rows_too(run: Run) -> None:
    found = json.loads(run("analyze", str(OURS), "--format", "json"))
    rows = list(csv.DictReader(io.StringIO(run("analyze", str(OURS), "--format", "csv"))))
    listed = sorted(
        found["findings"] + found["owned"],
        key=lambda each: -(each["saving_fraction"] or each["share_fraction"]),
    )
    assert [row["kind"] for row in rows] == [each["kind"] for each in listed]
    assert [row["command"] for row in rows] == [each["command"] for each in listed]


# What steers a terminal, or makes a spreadsheet calculate, is shown and not done.


ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
STEERING = set(ESCAPE) - set("]0;owned[2J31m")


def test_text_that_steers_nothing_stays() -> None:
    text = "a\tb\nwärmt 🚀 → █ \\x1b"
    assert escape_controls(text) == text
    assert escape_controls(ESCAPE) == SHOWN
    assert escape_controls("\ud800\u2028") == r"\ud800\u2028"


def test_a_guarded_stream_is_that_stream_to_everybody_else() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    print(ESCAPE, file=guard(stream))
    guard(stream).writelines([ESCAPE, "\n"])
    stream.flush()
    assert stream.buffer.getvalue().decode() == f"{SHOWN}\n" * 2
    assert guard(stream).buffer is stream.buffer


def test_rich_draws_its_colors_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(sys, "stderr", guard(terminal))
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
    assert without_formula(cell) == told


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
    assert csv_of_frame(report) == "kind,n\n'=1+1,-1\nF,2\n"


def test_every_sign_has_a_form_in_the_encoding_of_the_locale() -> None:
    """Without a locale a machine prints ASCII, and what commands print has signs beyond it."""
    traces = Path(__file__).parents[2] / "traces"
    a, b = traces / "gpt-pp4-bf.pftrace", traces / "gpt-pp4-megatron.pftrace"
    done = subprocess.run(
        (sys.executable, "-m", "rrfp", "analyze", "compare", a, b),
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"^ significant" in done.stdout
