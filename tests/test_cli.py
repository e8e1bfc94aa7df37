import os
import subprocess
import sys
from typing import NoReturn

import pytest
import typer

from rrfp import __version__
from rrfp.cli import errors, main
from rrfp.errors import RrfpError, UsageError

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
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rrfp {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hnt"], "rrfp: No such option: --hnt"),
        (["trian"], "rrfp: No such command 'trian'"),
        (["train", "--steps", "many"], "rrfp: Invalid value for '--steps': "),
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
def test_a_closed_stdout_is_no_news(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "rrfp", "--version"],
            stdout=closed,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "")
