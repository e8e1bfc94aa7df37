"""One call of `rrfp train` as a process that is watched from outside, and that may be harmed."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp.runtime import launchers as variables
from rrfp.trace.outcome import Ending, read_ending
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import create_new
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.settings import DECLARED, TrainSettings

# The processes of one training: found by the mark in their environment, and only they signalled.
#
# A pid may be another process's by the time that it is used. So a signal goes through a descriptor
# of the process, after that process has shown the mark and the time at which it was found to have
# started.


_PROC = Path("/proc")
_RANK_MODULE = "rrfp.train.launch.rank_process"
_KILL_S = 5.0
_END_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A process that carries the mark."""

    pid: int
    started: int
    """When it was started, in ticks since the machine was."""
    rank: int | None
    """Which rank it is; None for the launcher, and for what a rank has started."""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank} (pid {self.pid})"


class MarkedProcesses:
    """The processes whose environment has `variable=value`: the training's own, and all that it
    has started."""

    def __init__(self, variable: str, value: str) -> None:
        self._mark = f"{variable}={value}".encode()

    def __iter__(self) -> Iterator[Process]:
        """Those that are there now. One that has ended, but is still a zombie, is not."""
        for folder in _PROC.iterdir():
            if folder.name.isdigit():
                process = self._process(int(folder.name))
                if process is not None:
                    yield process

    def rank(self, rank: int) -> Process | None:
        """The process of a rank, once it is there."""
        found = (process for process in self if process.rank == rank)
        # What a rank has forked looks like it, and is younger.
        return min(found, key=lambda process: process.started, default=None)

    def send(self, process: Process, number: signal.Signals) -> bool:
        """Send one of these processes a signal; tells whether it was still there."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        except OSError:
            descriptor = -1  # a kernel before 5.3 lacks the call, and a container may refuse it
        try:
            if self._process(process.pid) != process:
                return False
            if descriptor < 0:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def kill(self) -> None:
        """End all of them, and what they start meanwhile. What waits inside the kernel outlives
        it."""
        deadline_s = time.monotonic() + _KILL_S
        while (left := [*self]) and time.monotonic() < deadline_s:
            for process in left:
                self.send(process, signal.SIGKILL)
            time.sleep(_END_LOOK_S)

    def _process(self, pid: int) -> Process | None:
        folder = _PROC / str(pid)
        with suppress(OSError, ValueError, IndexError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if self._mark not in variables:
                return None
            words = (folder / "cmdline").read_bytes().split(b"\0")
            # The name in it may have blanks and brackets of its own.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            rank = next((word for word in variables if word.startswith(b"RANK=")), b"")
            is_rank = _RANK_MODULE.encode() in words and rank
            return Process(pid, int(fields[19]), int(rank[5:]) if is_rank else None)
        return None


_LOOK_S = 0.005
_IMPORTED_FROM = str(Path(__file__).parents[2])


class TrainingSession:
    """One session of a training that saves, in processes that carry a mark of their own."""

    def __init__(self, settings: TrainSettings, own: Path, temporary: Path) -> None:
        """Starts it. `own` is a new directory, for its output and the orders to its links;
        `temporary` one of a short name, for its temporary files."""
        assert settings.run.out is not None
        assert settings.run.save is not None
        self.run = RunDir(settings.run.out)
        self.checkpoints = CheckpointDir(settings.run.save)
        self.orders, self._output = own / "orders", own / "output"
        for directory in (own, self.orders):
            directory.mkdir(mode=0o700)
        self.processes = MarkedProcesses(variables.FAULTS, str(self.orders))
        self.first_step = newest_step(self.checkpoints)
        # Until the session has made the metrics its own, they are those of the one before.
        self._metrics_before = _identity(self.run.metrics)
        self._outcome_before = _identity(self.run.outcome)
        self.began_s = time.monotonic()
        with create_new(self._output) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rrfp", "train", *flags_of(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    variables.FAULTS: str(self.orders),
                    "TMPDIR": str(temporary),
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (_IMPORTED_FROM, os.environ.get("PYTHONPATH")))
                    ),
                },
                start_new_session=True,
            )
        # A process that is made to crash is to leave no core behind.
        with suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))

    @property
    def launcher(self) -> Process | None:
        """Its first process, unless that has ended."""
        found = (process for process in self.processes if process.pid == self._process.pid)
        return next(found, None)

    @property
    def exit_code(self) -> int | None:
        """That of the launcher, once it has ended."""
        return self._process.poll()

    @property
    def has_ended(self) -> bool:
        """Whether no process of it is left."""
        return self.exit_code is not None and not any(True for _ in self.processes)

    @property
    def num_finished(self) -> int:
        """How many steps of the training are finished, as far as this session shows."""
        if self._metrics_before is not None and _identity(self.run.metrics) == self._metrics_before:
            return self.first_step
        return num_finished(self.run)

    @property
    def ending(self) -> Ending | None:
        """What its launcher wrote about its end, if it came to write that."""
        if _identity(self.run.outcome) != self._outcome_before:
            with suppress(OSError):
                return read_ending(self.run)
        return None

    def output(self) -> str:
        """Its output."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something holds; tells whether it does before the launcher has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if self.exit_code is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait for some time; tells whether the launcher is still there after it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code is None

    def end(self) -> list[str]:
        """End what is left of it, and tell what that was."""
        left = [str(process) for process in self.processes]
        self.processes.kill()
        self._process.wait()
        return left


def newest_step(checkpoints: CheckpointDir) -> int:
    """How many steps the newest whole checkpoint has."""
    found = checkpoints.newest(with_content=False)
    return 0 if found is None else found.step


def num_finished(run: RunDir) -> int:
    """How many steps are finished by a run's metrics."""
    return len(metric_lines(run))


def metric_lines(run: RunDir) -> list[dict[str, Any]]:
    """The metrics of the finished steps; a line that is not whole is of none."""
    try:
        *lines, _ = run.metrics.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def flags_of(settings: TrainSettings) -> list[str]:
    """The flags of `rrfp train` that mean these settings."""
    flags = []
    for name, value in settings.described().items():
        flag = f"--{DECLARED[name].spelled}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")
    return flags


def _identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced or written."""
    try:
        told = path.stat()
    except FileNotFoundError:
        return None
    return told.st_ino, told.st_mtime_ns
