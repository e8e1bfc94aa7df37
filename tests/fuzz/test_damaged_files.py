"""Damaged files of every reader end in a sentence; `make fuzz` tries far more of them."""

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from tests.fuzz.batch import Inputs
from tests.fuzz.readers import READERS

QUICK = [name for name, reader in READERS.items() if reader.share >= 4]


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_reader_refuses_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    READERS[name].make(whole)
    inputs = Inputs(READERS[name], whole, seed=0)
    for number in range(8):
        directory = tmp_path / str(number)
        attempt = inputs.write(number, directory)
        monkeypatch.chdir(directory)
        with suppress(RrfpError):
            attempt()


@pytest.mark.parametrize("name", READERS)
def test_what_is_whole_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else a reader would refuse every input for that reason."""
    monkeypatch.chdir(tmp_path)
    READERS[name].make(tmp_path)
    told = str(READERS[name].attempts[0]())
    assert not told.startswith(("1: rrfp: ", "2: ")), told


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_reader_takes_or_refuses_what_is_damaged(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "5000", "--seed", str(seed)]
    done = subprocess.run([*command, "--keep", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
