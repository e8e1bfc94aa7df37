"""The command line as a whole: its help, its exit codes, its completions, and `rrfp hint`."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from rrfp import __version__
from rrfp.cli import errors, main, progress
from rrfp.cli import main as cli
from rrfp.cli import terminal as streams
from rrfp.cli.declared_options import VARIABLE
from rrfp.cli.run import OPTIONS
from rrfp.compiled import core
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.hints import parse_order
from rrfp.schedule.named_hints import HINT_DESCRIPTIONS, HINTS, hint_named
from rrfp.schedule.rehearsal import format_grid, order_of, rehearse
from rrfp.schedule.shape import Placement, Shape
from rrfp.trace.run_dir import create_run_dir
from rrfp.train.settings import DECLARED

TRACE = str(Path(__file__).parents[2] / "traces" / "gpt-pp4-bf.pftrace")
HEAVY = ("torch", "polars", "perfetto", "megatron", "altair", "numpy")


def rrfp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rrfp", *arguments], capture_output=True, text=True, timeout=60
    )


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def fail() -> NoReturn:
        raise error

    return app


@pytest.mark.parametrize(
    "arguments", [[], ["trace"], ["analyze"], ["train"], ["simulate"], ["hint", "show"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from rrfp.cli.main import main\n"
        f"sys.argv = ['rrfp', *{arguments}, '--help']\n"
        "code = main()\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: rrfp" in done.stdout
    assert "loaded: []" in done.stdout


def test_version() -> None:
    done = rrfp("--version")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"rrfp {__version__}, core {core()}\n",
        "",
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hnt"], "rrfp: No such option: --hnt"),
        (["trian"], "rrfp: No such command 'trian'"),
        (
            ["analyze", "bubbles", "--by", "rnak"],
            "rrfp: Invalid value for '--by': 'rnak' is not one of 'stage', 'rank'; did you mean "
            "'rank'? See 'rrfp analyze bubbles --help'",
        ),
        (["train", "--steps", "many"], "rrfp: --steps is 'many'; it takes a whole number"),
    ],
)
def test_wrong_usage_is_one_sentence(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
    assert main.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(sentence)
    assert captured.err.count("\n") == 1
    assert "--help'" in captured.err


def test_no_command_shows_the_help() -> None:
    done = rrfp()
    assert done.returncode == 2
    assert "Usage: rrfp" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (RrfpError("rank 2 is gone; look there"), 1, "rrfp: rank 2 is gone; look there\n"),
        (UsageError("limit is 0; give 1 or more"), 2, "rrfp: limit is 0; give 1 or more\n"),
        (KeyboardInterrupt(), 130, "rrfp: interrupted\n"),
        (typer.Abort(), 130, "rrfp: interrupted\n"),
        (OSError(28, "No space left"), 1, "rrfp: the system refused: [Errno 28] No space left\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, "rrfp: a pipe broke: [Errno 32] Broken pipe\n"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors.run_app(app_that_raises(error), []) == code
    assert capsys.readouterr() == ("", sentence)


def test_a_bug_is_reported_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_that_raises(ZeroDivisionError("by nothing"))
    assert errors.run_app(app, []) == 1
    told = capsys.readouterr().err
    assert told.startswith("rrfp: unexpected ZeroDivisionError: by nothing; this is a bug")
    assert "Traceback" not in told
    monkeypatch.setenv(errors.DEBUG_VARIABLE, "1")
    assert errors.run_app(app, []) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "CannotBeToldError"])
def test_interrupts_that_go_on_change_no_exit_code(raised: str) -> None:
    """Interrupts also arrive while an error is printed, while the first one is being handled, and
    after Python has dropped its handlers."""
    program = (
        "import os, signal, sys\n"
        "from rrfp.cli import errors\n"
        "from rrfp.errors import RrfpError\n"
        "class CannotBeToldError(RrfpError):\n"
        "    def __str__(self):\n"
        "        raise KeyboardInterrupt\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        "        kill(pid, 2)\n"
        "sys.last = Last()\n"
        "def interrupted():\n"
        f"    raise {raised}\n"
        "errors.interrupt_once()\n"
        "handler_of = signal.getsignal\n"
        "def interrupted_getsignal(number):\n"
        "    os.kill(os.getpid(), 2)\n"
        "    return handler_of(number)\n"
        "signal.getsignal = interrupted_getsignal\n"
        "sys.exit(errors.call_command(interrupted))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "rrfp: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["trian"], 2),
        (["analyze", "bubbles", TRACE, "--fail-above", "0.01"], 3),
    ],
)
def test_a_closed_pipe_changes_no_exit_code(
    arguments: list[str], code: int, unbuffered: str
) -> None:
    """Without a reader only the exit code reports a failure."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "rrfp", *arguments],
            stdout=closed,
            stderr=closed,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            timeout=60,
        )
    assert done.returncode == code


def test_a_full_disk_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rrfp", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("rrfp: the system refused: ")


def test_a_command_knows_whether_its_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with streams.tolerate_closed_streams():
            sys.stdout.write("read\n")
            sys.stdout.flush()
            assert streams.has_reader()
            os.close(reading)
            sys.stdout.write("unheard\n")
            sys.stdout.flush()
            assert not streams.has_reader()
        assert sys.stdout is stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--hnit", "bf"], "No such option: --hnit; did you mean '--hint'? See "),
        (["tran"], "No such command 'tran'; did you mean 'train', 'trace'? See 'rrfp --help'"),
        (["analyze", "bubles"], "No such command 'bubles'; did you mean 'bubbles'? See "),
        (["train", "--hint", "bffw"], "; did you mean 'bfw'?"),
        (["train", "--dispatch", "fix"], "; did you mean 'fixed'?"),
        (["simulate", "--pp", "2", "--microbatches", "2", "--hint", "1f1"], "mean '1f1b'?"),
        (["simulate", "--pp", "2", "--microbatches", "2", "--sweep", "hnt=bf"], "mean 'hint'?"),
        (["simulate", "--pp", "2", "--microbatches", "2", "--costs", "langage"], "'language'?"),
        (["bench", "rq1", "--system", "megatron1f1b"], "did you mean 'megatron-1f1b'?"),
    ],
)
def test_what_was_probably_meant_is_said(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
    assert main.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert told in captured.err


@pytest.mark.parametrize(
    ("installed", "arguments"),
    [
        ({"typer": "0.15.4", "rich": "13.9.4"}, ["analyze", "run"]),
        ({"typer": None}, ["train"]),
        ({"protobuf": "4.25.9"}, []),
        ({"perfetto": "0.0.1"}, ["--help"]),
    ],
)
def test_what_an_environment_lacks_is_reported_in_a_sentence(
    installed: dict[str, str | None],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        found = installed.get(name, real(name))
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
    assert main.main() == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    for name, found in installed.items():
        state = "not installed" if found is None else f"{found} is installed"
        assert re.search(rf"{name}>=[\d.]+,<[\d.]+ \({state}\)", told.err)
    assert told.err.count("installed)") == len(installed)
    # What runs in a job needs none of them.
    plain = ("--dispatch", "megatron", "--no-trace")
    (tmp_path / "script.py").write_text("print('ran')")
    monkeypatch.setattr(sys, "argv", ["rrfp", "run", *plain, str(tmp_path / "script.py")])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main.main() == 0
    assert capsys.readouterr().out == "ran\n"


@pytest.mark.parametrize(
    ("verb", "flag"), [("train", "--help-all"), ("run", "--help-all"), ("simulate", "--help")]
)
def test_the_help_says_what_each_hint_is_on_a_line_of_its_own(
    verb: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["rrfp", verb, flag])
    assert main.main() == 0
    shown = capsys.readouterr().out
    assert set(HINT_DESCRIPTIONS) == set(HINTS)
    for name, words in HINT_DESCRIPTIONS.items():
        assert re.search(rf" {re.escape(name)} +{re.escape(words)}( |\n)", shown)
    for panel in ("Schedule", "Memory", "Layout", "Output"):
        assert (f"\n{panel}:\n" if verb == "run" else f"─ {panel} ─") in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_short_help_of_train_is_one_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr(sys, "argv", ["rrfp", "train", flag])
        assert main.main() == 0
        shown[flag] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) <= 60
    every = {f"--{each.spelled}" for each in DECLARED.values()} | {"--config", "--help-all"}
    listed = {name: set(re.findall(r"^│ (--[a-z-]+)", text, re.M)) for name, text in shown.items()}
    assert listed["--help-all"] == every | {"--help"}
    assert {"--hint", "--hold", "--pp", "--data", "--out"} < listed["--help"] < every | {"--help"}
    # Types read as words, and a switch has none.
    assert re.search(r"--pp +INT ", shown["--help"])
    assert re.search(r"--silence +SECONDS ", shown["--help-all"])
    assert "<" not in re.sub(r"<time>-<hint>", "", shown["--help-all"])


def test_the_short_help_of_run_is_one_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr(sys, "argv", ["rrfp", "run", flag])
        assert main.main() == 0
        shown = capsys.readouterr().out
        listed[flag] = set(re.findall(r"^  (?:-., )?(--[a-z-]+)", shown, re.M))
        assert flag == "--help-all" or len(shown.splitlines()) <= 60
    own = {"--module", "--help", "--help-all"}
    assert listed["--help-all"] == {f"--{each.spelled}" for each in OPTIONS} | own
    common = {"--hint", "--dispatch", "--limit", "--hold", "--out", "--steps"}
    assert listed["--help"] == common | own


# Tab: what a shell is offered, asked as typer's own scripts for shells ask.


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
    """Return the completions that bash gets for this line."""
    monkeypatch.setenv(VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setattr(sys, "argv", ["rrfp"])
    assert main.main() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert len(lines) == len(set(lines))
    return set(lines)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rrfp sim", {"simulate"}),
        ("rrfp hint ", {"show", "check"}),
        ("rrfp train --hin", {"--hint"}),
        ("rrfp train --hint z", {"zb-h1", "zb-v"}),
        ("rrfp run --hint int", {"interleaved"}),
        ("rrfp simulate --hint ", {"auto", *HINT_DESCRIPTIONS}),
        ("rrfp hint show a", set()),
        ("rrfp analyze whatif --hint gp", {"gpipe"}),
        ("rrfp hint show gp", {"gpipe"}),
        ("rrfp train --dispatch ", {"ready", "fixed", "megatron"}),
        ("rrfp simulate --dispatch ", {"ready", "fixed"}),
        ("rrfp trace check ", {"old", "new"}),
        ("rrfp trace view @", {"@-1", "@-2"}),
        ("rrfp analyze compare old n", {"new"}),
        ("rrfp tune o", {"old"}),
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
def test_other_shells_get_descriptions(
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


# `rrfp hint`: what it prints, where, and how it exits.


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


def test_show_of_a_file_that_deadlocks_says_so(run: Run) -> None:
    Path("mine.csv").write_text(DEADLOCKS)
    code, out, err = run("show", "mine.csv", *sizes(2, 2))
    assert (code, out) == (0, DEADLOCKS)
    assert "mine.csv deadlocks after 2 units of time, 50% idle" in err
    assert "rank 1 stands at 1F1, lacks 0F1 of rank 0" in err


def test_check_states_the_memory_of_an_order_that_runs(
    run: Run, golden: Callable[[str, str], None]
) -> None:
    code, out, err = run("check", "zb-v", *sizes(4, 8), *V)
    assert (code, err) == (0, "")
    golden("hint-check-zb-v-4x8.txt", out)


def test_check_states_where_an_order_deadlocks(
    run: Run, golden: Callable[[str, str], None]
) -> None:
    text = run("show", "1f1b", *sizes(3, 4))[1]
    # The last rank wants a microbatch that the first starts only once its gradients come back.
    Path("mine.csv").write_text(text.replace("2F3,", "").replace("2B0", "2F3,2B0"))
    code, out, err = run("check", "mine.csv", *sizes(3, 4))
    assert code == 1
    golden("hint-check-deadlock.txt", out)
    assert err.startswith("rrfp: order mine.csv deadlocks as a fixed order, with rank 0 at ")
    assert err.count("\n") == 1


def test_a_task_that_waits_for_one_of_its_own_row_is_reported(run: Run) -> None:
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
    rehearsal = rehearse(order_of(hint_named("zb-v").for_shape(shape), shape))
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


# What a terminal shows of work under way, and that nothing else is shown it.


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "hidden_s", "is_told"),
    [(_Terminal(), 0.0, True), (_Terminal(), 60.0, False), (io.StringIO(), 0.0, False)],
)
def test_a_terminal_shows_work_that_takes_long(
    stderr: io.StringIO, hidden_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "_HIDDEN_S", hidden_s)
    monkeypatch.setenv("TERM", "xterm")
    begin_s = time.monotonic()
    with progress.working("Reading the trace"):
        while is_told and "Reading the trace" not in stderr.getvalue():
            assert time.monotonic() < begin_s + 20
            time.sleep(0.01)
    assert ("Reading the trace" in stderr.getvalue()) is is_told
    assert time.monotonic() < begin_s + 30  # it does not wait for its patience to end
