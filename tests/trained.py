"""`rrfp train` as a user runs it: a process of its own, its output, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TINY = ("--layers=4", "--hidden=32", "--heads=4", "--seq-length=32", "--microbatches=4")
ENDLESS = ("--steps", "1000000")

START_S = 90.0
"""How long a run may take to its first steps, on a machine that does other things too."""


def rrfp(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command line run to its end in that directory."""
    return subprocess.run(
        [sys.executable, "-m", "rrfp", *arguments],
        cwd=directory,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=START_S + 60,
    )


class Training:
    """A tiny `rrfp train --out RUN` that goes on by itself, and is ended with the `with` block."""

    def __init__(self, run: Path, *flags: str) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rrfp", "train", "--out", str(run), *TINY, *flags],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pid in processes_of(self.run):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def await_steps(self, num_steps: int) -> None:
        """Wait until so many steps stand in the metrics."""
        deadline_s = time.monotonic() + START_S
        while len(read_metrics(self.run)) < num_steps:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s, f"no {num_steps} steps in {START_S:g} s"
            time.sleep(0.05)

    def await_ranks(self, num_ranks: int) -> list[int]:
        """Wait until so many ranks have been started, and give their pids, by rank."""
        deadline_s = time.monotonic() + START_S
        while len(pids := processes_of(self.run, "rrfp.megatron.process")) < num_ranks:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s, f"no {num_ranks} ranks in {START_S:g} s"
            time.sleep(0.05)
        return sorted(pids)

    def ended(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


def processes_of(run: Path, *words: str) -> list[int]:
    """The processes whose command line names the run's directory, and these words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in command for word in (str(run), *words)):
                found.append(int(folder.name))
    return found


def await_no_process(run: Path, timeout_s: float) -> None:
    """Wait until no process of the run is left."""
    deadline_s = time.monotonic() + timeout_s
    while left := processes_of(run):
        assert time.monotonic() < deadline_s, f"processes {left} were left after {timeout_s:g} s"
        time.sleep(0.1)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def pid_of(run: Path, rank: int) -> int:
    """The process of a rank, as run.json tells it."""
    ranks = json.loads((run / "run.json").read_text())["ranks"]
    return int(next(entry["pid"] for entry in ranks if entry["rank"] == rank))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
