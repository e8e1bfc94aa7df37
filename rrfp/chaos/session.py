"""One `rrfp train` process with its ranks, observed from outside and signalled by faults."""

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

from rrfp.errors import RrfpError
from rrfp.runtime import launchers as variables
from rrfp.strict_json import mapping, parsed
from rrfp.trace.outcome import Ending, read_ending
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import create_new
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.settings import DECLARED, TrainSettings

# The processes of one training carry a mark in their environment, and only they get signals.
#
# A pid may belong to another process by the time it is used. A signal is therefore sent through a
# pidfd, after a check that this process has the mark and the expected start time.


_PROC = Path("/proc")
_RANK_MODULE = "rrfp.train.launch.rank_process"
_KILL_S = 5.0
_END_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A process with the mark."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""
    rank: int | None
    """The rank that it runs; None for the launcher and for children of a rank."""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank} (pid {self.pid})"


class MarkedProcesses:
    """The processes whose environment has `variable=value`: a training's processes and their
    children."""

    def __init__(self, variable: str, value: str) -> None:
        self._mark = f"{variable}={value}".encode()

    def __iter__(self) -> Iterator[Process]:
        """Iterate over the processes that exist now, without zombies."""
        for folder in _PROC.iterdir():
            if folder.name.isdigit():
                process = self._process(int(folder.name))
                if process is not None:
                    yield process

    def rank(self, rank: int) -> Process | None:
        """Return the oldest process of a rank; None if none exists."""
        found = (process for process in self if process.rank == rank)
        # A forked child of a rank looks the same but is younger.
        return min(found, key=lambda process: process.started, default=None)

    def send(self, process: Process, number: signal.Signals) -> bool:
        """Send a signal to a process that still has this pid, start time and mark; otherwise return
        False."""
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
        """Kill all of them and their new children, for at most 5 s.

        Processes blocked in the kernel may remain.
        """
        deadline_s = time.monotonic() + _KILL_S
        while (left := [*self]) and time.monotonic() < deadline_s:
            for process in left:
                self.send(process, signal.SIGKILL)
            time.sleep(_END_LOOK_S)

    def _process(self, pid: int) -> Process | None:
        """Return the process with this pid; None if it is gone, unreadable or without the mark."""
        folder = _PROC / str(pid)
        with suppress(OSError, ValueError, IndexError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if self._mark not in variables:
                return None
            words = (folder / "cmdline").read_bytes().split(b"\0")
            # The process name before the last bracket may contain blanks and brackets itself.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            rank = next((word for word in variables if word.startswith(b"RANK=")), b"")
            is_rank = _RANK_MODULE.encode() in words and rank
            return Process(pid, int(fields[19]), int(rank[5:]) if is_rank else None)
        return None


_LOOK_S = 0.005
_IMPORTED_FROM = str(Path(__file__).parents[2])


class TrainingSession:
    """One session of a training with checkpoints; its processes carry a unique mark."""

    def __init__(self, settings: TrainSettings, own: Path, temporary: Path) -> None:
        """Start it. `own` is a new directory for its output and the orders to its links;
        `temporary` is a directory with a short path for its temporary files."""
        assert settings.run.out is not None
        assert settings.run.save is not None
        self.run = RunDir(settings.run.out)
        self.checkpoints = CheckpointDir(settings.run.save)
        self.orders, self._output = own / "orders", own / "output"
        for directory in (own, self.orders):
            directory.mkdir(mode=0o700)
        self.processes = MarkedProcesses(variables.FAULTS, str(self.orders))
        self.first_step = newest_step(self.checkpoints)
        # Until the session rewrites the metrics, the file is that of the previous session.
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
        # Injected crashes must not leave core files.
        with suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))

    @property
    def launcher(self) -> Process | None:
        """The launcher process; None if it has ended."""
        found = (process for process in self.processes if process.pid == self._process.pid)
        return next(found, None)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        return self._process.poll()

    @property
    def has_ended(self) -> bool:
        """True if the launcher has ended and no marked process is left."""
        return self.exit_code is not None and not any(True for _ in self.processes)

    @property
    def num_finished(self) -> int:
        """Number of finished training steps; before this session writes metrics, the step it
        resumed."""
        if self._metrics_before is not None and _identity(self.run.metrics) == self._metrics_before:
            return self.first_step
        return num_finished(self.run)

    @property
    def ending(self) -> Ending | None:
        """Outcome that this session's launcher wrote: `KILLED` while its file is empty or damaged.

        None before the launcher makes the file, or if it cannot be read.
        """
        if _identity(self.run.outcome) != self._outcome_before:
            with suppress(OSError):
                return read_ending(self.run)
        return None

    def output(self) -> str:
        """Return the text that its launcher has printed so far, on stdout and stderr."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `holds()` is true; returns False if the launcher ends first, or on timeout."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if self.exit_code is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait for some time, or until the launcher ends; return whether it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code is None

    def end(self) -> list[str]:
        """Kill the processes that are left and return their names; wait for the launcher."""
        left = [str(process) for process in self.processes]
        self.processes.kill()
        self._process.wait()
        return left


def newest_step(checkpoints: CheckpointDir) -> int:
    """Return the step of the newest checkpoint with all its files, content unread; 0 without
    one."""
    found = checkpoints.newest(with_content=False)
    return 0 if found is None else found.step


def num_finished(run: RunDir) -> int:
    """Number of finished steps according to a run's metrics. Raises RrfpError as `metric_lines`
    does."""
    return len(metric_lines(run))


def metric_lines(run: RunDir) -> list[dict[str, Any]]:
    """Return the metrics of the finished steps.

    An incomplete last line is left out; a missing file gives an empty list. Raises RrfpError for
    any other line that is not a JSON object.
    """
    try:
        *lines, _ = run.metrics.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append(mapping(parsed(line)))
        except ValueError as error:
            raise RrfpError(
                f"{run.metrics} is damaged in line {number} ({error}); report this as a bug, with "
                "the command of the campaign"
            ) from error
    return metrics


def flags_of(settings: TrainSettings) -> list[str]:
    """Return the flags of `rrfp train` that give these settings; None and False give no flag."""
    flags = []
    for name, value in settings.described().items():
        flag = f"--{DECLARED[name].spelled}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")
    return flags


def _identity(path: Path) -> tuple[int, int] | None:
    """A file's inode and mtime, which change when it is replaced or written; None if missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
