"""The processes of one training: found by the mark in their environment, and only they signalled.

A pid may be another process's by the time that it is used. So a signal goes through a descriptor of
the process, after that process has shown the mark and the time at which it was found to have
started.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_RANK_MODULE = "rrfp.train.ranks.process"
_KILL_S = 5.0
_LOOK_S = 0.02


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


class Marked:
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
            time.sleep(_LOOK_S)

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
