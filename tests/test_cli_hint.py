"""`rrfp hint`: what it prints, where, and how it exits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rrfp.cli import main as cli
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.order import parse_order
from rrfp.schedule.rehearsal import format_grid, order_of, rehearse
from rrfp.schedule.shape import Placement, Shape

Run = Callable[..., tuple[int, str, str]]

DEADLOCKS = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("show", "bf", ...)` gives the exit code and both outputs, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "hint", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return rrfp


def sizes(num_ranks: int, num_microbatches: int) -> list[str]:
    return ["--pp", str(num_ranks), "--microbatches", str(num_microbatches)]


V = ["--chunks", "2", "--placement", "v"]


def test_show_gives_the_order_on_stdout_and_the_grid_on_stderr(
    run: Run, golden: Callable[[str, str], None]
) -> None:
    code, out, err = run("show", "1f1b", *sizes(4, 8))
    assert code == 0
    golden("1f1b-4x8.csv", out)
    golden("hint-show-1f1b-4x8.txt", err)
    assert max(map(len, err.splitlines())) <= 80


@pytest.mark.parametrize("name", HINTS)
def test_what_show_prints_is_an_order_file_that_can_bind(run: Run, name: str) -> None:
    flags = {"zb-v": V, "v-half": V, "v-min": V, "interleaved": ["--chunks", "2"]}.get(name, [])
    code, out, _ = run("show", name, *sizes(3, 6), *flags)
    assert code == 0
    Path("order.csv").write_text(out)
    code, out, err = run("check", "order.csv", *sizes(3, 6), *flags)
    assert (code, err) == (0, "")
    assert "As a fixed order it runs to its end" in out
    # As a hint, the file shows itself again.
    code, again, _ = run("show", "order.csv", *sizes(3, 6), *flags)
    assert (code, again) == (0, Path("order.csv").read_text())


def test_show_of_a_file_that_deadlocks_tells_so(run: Run) -> None:
    Path("mine.csv").write_text(DEADLOCKS)
    code, out, err = run("show", "mine.csv", *sizes(2, 2))
    assert (code, out) == (0, DEADLOCKS)
    assert "mine.csv deadlocks after 2 units of time, 50% idle" in err
    assert "rank 1 stands at 1F1, lacks 0F1 of rank 0" in err


def test_check_tells_the_memory_of_an_order_that_runs(
    run: Run, golden: Callable[[str, str], None]
) -> None:
    code, out, err = run("check", "zb-v", *sizes(4, 8), *V)
    assert (code, err) == (0, "")
    golden("hint-check-zb-v-4x8.txt", out)


def test_check_tells_where_an_order_deadlocks(run: Run, golden: Callable[[str, str], None]) -> None:
    text = run("show", "1f1b", *sizes(3, 4))[1]
    # The last rank wants a microbatch that the first starts only once its gradients come back.
    Path("mine.csv").write_text(text.replace("2F3,", "").replace("2B0", "2F3,2B0"))
    code, out, err = run("check", "mine.csv", *sizes(3, 4))
    assert code == 1
    golden("hint-check-deadlock.txt", out)
    assert err.startswith("rrfp: order mine.csv deadlocks as a fixed order, with rank 0 at ")
    assert err.count("\n") == 1


def test_a_task_that_waits_for_one_of_its_own_row_is_told(run: Run) -> None:
    Path("mine.csv").write_text("0F0,0W0,0I0\n")
    code, out, _ = run("check", "mine.csv", *sizes(1, 1))
    assert code == 1
    assert "rank 0 stands at 0W0, lacks 0I0 of its own, further on in the row" in out


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.csv", *sizes(2, 2)], "cannot read the order file none.csv: No such file"),
        (["zigzag", *sizes(2, 2)], "'zigzag' is neither a hint ("),
        (["bad.csv", *sizes(2, 2)], "bad.csv, line 2: 1B1 is missing; add it to the line"),
        (["good.csv", *sizes(3, 2)], "good.csv has 2 lines for 3 pipeline ranks"),
        (["zb-v", *sizes(2, 2)], "order zb-v needs 2 chunks per rank in placement v, not "),
        (["bf", *sizes(2, 2), "--placement", "v"], "placement v takes 2 chunks per rank, not 1"),
        (["bf", *sizes(0, 2)], "--pp is '0'; it takes at least 1"),
        (["bf", *sizes(2, 0)], "--microbatches is '0'; it takes at least 1"),
        (["bf", "--pp", "2"], "Missing option '--microbatches'"),
        (["bf", *sizes(2, 2), "--placement", "w"], "Invalid value for '--placement'"),
    ],
)
def test_wrong_usage_exits_with_2(
    run: Run, command: str, arguments: list[str], sentence: str
) -> None:
    Path("good.csv").write_text(DEADLOCKS)
    Path("bad.csv").write_text(DEADLOCKS.replace(",1B1", ""))
    code, out, err = run(command, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"rrfp: {sentence}")
    assert err.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from rrfp.cli.main import main\n"
        "sys.argv = ['rrfp', 'hint', 'show', '--help']\n"
        "assert main() == 0\n"
        "print('loaded:', [name for name in ('torch', 'polars') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rrfp hint show 1f1b --pp 4" in done.stdout
    assert "loaded: []" in done.stdout


# The grid alone.


def test_a_grid_folds_where_the_width_ends() -> None:
    rehearsal = rehearse(parse_order("0F0,0B0\n1F0,1B0\n", Shape(2, 1), "mine"))
    whole = "time     0   1   2   3\nrank 0 0F0   .   . 0B0\nrank 1   . 1F0 1B0   ."
    assert format_grid(rehearsal, len("rank 0 0F0   .   . 0B0")) == whole
    assert format_grid(rehearsal, len("rank 0 0F0   .   . 0B0") - 1) == (
        "time     0   1   2\nrank 0 0F0   .   .\nrank 1   . 1F0 1B0\n"
        "\n"
        "time     3\nrank 0 0B0\nrank 1   ."
    )
    # However narrow, there is a column in every block.
    assert format_grid(rehearsal, 1).count("time") == 4


def test_a_grid_has_every_task_in_the_column_of_its_time() -> None:
    shape = Shape(4, 9, 2, Placement.V)
    rehearsal = rehearse(order_of(hint_named("zb-v").on(shape), shape))
    lines = format_grid(rehearsal, 80).split("\n")
    assert max(map(len, lines)) <= 80
    cells: dict[str, list[str]] = {}
    for line in filter(None, lines):
        label = line[:6].strip()
        cells.setdefault(label, []).extend(line[6:].split())
    assert cells["time"] == [str(unit) for unit in range(rehearsal.num_units)]
    for rank, row in enumerate(rehearsal.timeline):
        assert [cell.replace("I", "B") for cell in cells[f"rank {rank}"]] == [
            "." if task is None else str(task) for task in row
        ]


def test_an_order_that_cannot_start_has_a_grid_of_its_blocked_ranks() -> None:
    rehearsal = rehearse(parse_order("0B0,0F0\n1B0,1F0\n", Shape(2, 1), "mine"))
    assert format_grid(rehearsal, 80) == "time      0\nrank 0 !0B0\nrank 1 !1B0"
