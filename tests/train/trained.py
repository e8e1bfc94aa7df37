"""`rrfp train` as a user runs it: a process of its own, its output, and what it leaves behind."""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from rrfp.cli import main as cli
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import Recording

TINY = ("--layers=4", "--hidden=32", "--heads=4", "--seq-length=32", "--microbatches=4")
ENDLESS = ("--steps", "1000000")

START_S = 90.0
"""How long a run may take to its first steps, on a machine that does other things too."""


def rrfp(
    directory: Path, *arguments: str, timeout_s: float = START_S + 60
) -> subprocess.CompletedProcess[str]:
    """A command line run to its end in that directory, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rrfp", *arguments],
        cwd=directory,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def rrfp_here(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: for a command that only reads, it is the same and takes no second
    to start."""
    from rrfp.cli import app, errors

    out, err = io.StringIO(), io.StringIO()
    with chdir(directory), redirect_stdout(out), redirect_stderr(err):
        code = errors.run_app(app.app, arguments)
        assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def trained_recording(directory: Path, flags: str) -> Recording:
    """The trace of four steps of a tiny run with these flags."""
    done = rrfp(directory, "train", "--steps", "4", "--out", "run", *TINY, *flags.split())
    assert done.returncode == 0, done.stderr
    return read_trace(directory / "run" / "trace.pftrace")


class Training:
    """A tiny `rrfp train --out RUN` that goes on by itself, and is ended with the `with` block."""

    def __init__(self, run: Path, *flags: str, within: Sequence[str] = ()) -> None:
        """`within` goes before the command."""
        self.run = run
        # A file, because it is read while the run goes on.
        self._stderr = tempfile.NamedTemporaryFile(prefix="rrfp-stderr-")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "rrfp", "train", "--out", str(run), *TINY, *flags],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=self._stderr,
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
        self._stderr.close()

    def await_that(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, while the run goes on."""
        deadline_s = time.monotonic() + START_S
        while not holds():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, f"no {what} in {START_S:g} s"
            time.sleep(0.02)

    def await_steps(self, num_steps: int) -> None:
        """Wait until the metrics have this number of steps."""
        self.await_that(lambda: self.num_steps >= num_steps, f"{num_steps} steps")

    def await_start(self, rank: int) -> int:
        """Wait until that rank has begun to start, and give its pid."""
        # The first thing that a rank does is to open its log.
        log = self.run / "logs" / f"rank-{rank}.log"
        self.await_that(log.exists, f"log of rank {rank}")
        pids = processes_of(self.run, "rrfp.train.launch.rank_process")
        (pid,) = (pid for pid in pids if _environment_of(pid)["RANK"] == str(rank))
        return pid

    def stop_amid_tasks(self, rank: int) -> int:
        """Stop a rank (SIGSTOP) in the middle of a step's tasks, and give its pid.

        Its processor time tells, which passes only while it works: it has used between a quarter
        and three quarters of what it uses in a step, so it is in none of the collectives that end
        a step, however busy the machine is.
        """
        self.await_steps(1)
        pid = pid_of(self.run, rank)
        num_steps, _, used_s = self._await_step(pid)
        while True:
            last_num_steps, last_used_s = num_steps, used_s
            num_steps, least_s, used_s = self._await_step(pid)
            step_s = (used_s - last_used_s) / (num_steps - last_num_steps)
            while _processor_s(pid) < used_s + step_s / 4:
                time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            while _stat(pid)[0] != "T":
                time.sleep(0.01)
            if self.num_steps == num_steps and _processor_s(pid) < least_s + step_s * 3 / 4:
                return pid
            os.kill(pid, signal.SIGCONT)

    def _await_step(self, pid: int) -> tuple[int, float, float]:
        """Wait for one step more: how many there are, and the processor time that the process had
        used at the least, and at the most, when that step ended."""
        num_steps = self.num_steps
        least_s = most_s = _processor_s(pid)

        def is_there() -> bool:
            nonlocal least_s, most_s
            least_s, most_s = most_s, _processor_s(pid)
            return self.num_steps > num_steps

        self.await_that(is_there, f"step after {num_steps}")
        return self.num_steps, least_s, most_s

    @property
    def num_steps(self) -> int:
        """Number of steps in the metrics."""
        return len(read_metrics(self.run))

    def said(self) -> str:
        """The text on stderr so far."""
        return Path(self._stderr.name).read_text()

    def ended(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout and stderr."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, self.said()


def free_port() -> int:
    """A port that nobody listens at.

    Below those that the system gives out by itself, so that no connection or server of another
    test takes it before it is used.
    """
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for port in random.sample(range(max(1024, int(given_out[0]) - 20000), int(given_out[0])), 100):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("a hundred ports were all taken")


def is_listening(port: int) -> bool:
    """Whether somebody listens at that port of this host."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


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
    """Wait until no process of the run is left, nor holds a lock of its files any more."""
    deadline_s = time.monotonic() + timeout_s
    seen: set[int] = set()
    while True:
        seen.update(processes_of(run))
        if not (left := [pid for pid in seen if not _has_ended(pid)]):
            return
        assert time.monotonic() < deadline_s, f"processes {left} were left after {timeout_s:g} s"
        time.sleep(0.1)


def _has_ended(pid: int) -> bool:
    """A process that ends has no command line any more while its threads still have files open."""
    try:
        return len([*Path(f"/proc/{pid}/task").iterdir()]) == 1 and _stat(pid)[0] == "Z"
    except OSError:
        return True


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def assert_opens(run: Path) -> None:
    """Check that the trace can be read and has every step of the metrics."""
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == list(range(len(steps)))
    shown = rrfp_here(run.parent, "analyze", "bubbles", str(run), "--format", "json")
    assert shown.returncode == 0, shown.stderr
    last = f"{steps[-1]}:{steps[-1] + 1}"
    shown = rrfp_here(run.parent, "analyze", "bubbles", str(run), "--steps", last)
    assert (shown.returncode, shown.stderr) == (0, "")


def pid_of(run: Path, rank: int) -> int:
    """The process of a rank by run.json."""
    ranks = json.loads((run / "run.json").read_text())["ranks"]
    return int(next(entry["pid"] for entry in ranks if entry["rank"] == rank))


def _environment_of(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def _processor_s(pid: int) -> float:
    """The processor time that a process has used."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of proc(5)'s stat that follow the name, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


# A command called in this process, as a terminal of 80 columns shows it.


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("tune", ...)` gives the exit code and both outputs; the test's directory is current."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return rrfp
