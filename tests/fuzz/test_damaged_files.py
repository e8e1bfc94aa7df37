"""Every reader refuses damaged files with a one-sentence error; `make fuzz` tries far more
files."""

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from tests.fuzz.__main__ import is_asleep
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
def test_every_reader_reads_undamaged_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Otherwise a reader would refuse every input for another reason than its damage."""
    monkeypatch.chdir(tmp_path)
    READERS[name].make(tmp_path)
    output = str(READERS[name].attempts[0]())
    assert not output.startswith(("1: rrfp: ", "2: ")), output


def test_a_process_that_waits_for_the_processor_is_not_asleep() -> None:
    busy = "print(flush=True)\nwhile True: pass"
    idle = "import time\nprint(flush=True)\ntime.sleep(300)"
    found = {}
    for program in (busy, idle):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            deadline_s = time.monotonic() + 60
            while program is idle and not is_asleep(process.pid):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            found[program] = is_asleep(process.pid)
            process.kill()
    assert found == {busy: False, idle: True}


@pytest.mark.slow
@pytest.mark.timeout(
    0
)  # The fuzzer limits the processor's time of each input; the clock is no limit.
def test_every_reader_reads_or_refuses_damaged_files(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "5000", "--seed", str(seed)]
    done = subprocess.run([*command, "--keep", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-5000:]}{done.stderr[-5000:]}"
