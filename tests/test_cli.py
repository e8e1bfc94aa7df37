import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from rrfp import __version__
from rrfp.cli import errors, main
from rrfp.cli import terminal as streams
from rrfp.compiled import core
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.named_hints import HINTS, IN_WORDS

TRACE = str(Path(__file__).parent.parent / "traces" / "gpt-pp4-bf.pftrace")
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


@pytest.mark.parametrize("arguments", [[], ["trace"], ["analyze"], ["train"], ["simulate"]])
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
    assert errors.run(app_that_raises(error), []) == code
    assert capsys.readouterr() == ("", sentence)


def test_a_bug_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_that_raises(ZeroDivisionError("by nothing"))
    assert errors.run(app, []) == 1
    told = capsys.readouterr().err
    assert told.startswith("rrfp: unexpected ZeroDivisionError: by nothing; this is a bug")
    assert "Traceback" not in told
    monkeypatch.setenv(errors.DEBUG_VARIABLE, "1")
    assert errors.run(app, []) == 1
    assert "Traceback" in capsys.readouterr().err


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
    """Whether something failed is told by its exit code alone, then: nobody hears the rest."""
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


def test_a_full_disk_is_told() -> None:
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
        with streams.unheard_if_closed():
            sys.stdout.write("read\n")
            sys.stdout.flush()
            assert streams.is_heard()
            os.close(reading)
            sys.stdout.write("unheard\n")
            sys.stdout.flush()
            assert not streams.is_heard()
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
def test_what_an_environment_lacks_is_told_in_a_sentence(
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


@pytest.mark.parametrize("verb", ["train", "run", "simulate"])
def test_the_help_says_what_each_hint_is_on_a_line_of_its_own(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["rrfp", verb, "--help"])
    assert main.main() == 0
    shown = capsys.readouterr().out
    assert set(IN_WORDS) == set(HINTS)
    for name, words in IN_WORDS.items():
        assert re.search(rf" {re.escape(name)} +{re.escape(words)}( |\n)", shown)
    for panel in ("Schedule", "Memory", "Layout", "Output"):
        assert (f"\n{panel}:\n" if verb == "run" else f"─ {panel} ─") in shown
    assert max(map(len, shown.splitlines())) <= 80
