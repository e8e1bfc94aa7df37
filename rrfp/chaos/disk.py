"""A file system that can be made full.

Where this process may mount, it is a small one in memory, mounted where this process and what it
starts see it, and nobody else; it is gone with the last of them. Elsewhere no process of the
training may write to a file for a while, which it learns by another error than that of a full disk.
"""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rrfp import system as libc
from rrfp.chaos.session import MarkedProcesses, Process

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
_FILL_S = 5.0
_PAUSE_S = 0.002


class Disk(Protocol):
    """Where a training writes."""

    path: Path

    def fill(self, processes: MarkedProcesses) -> None:
        """Let nobody write there any more. May raise OSError."""

    def empty(self, processes: MarkedProcesses) -> None:
        """Let everybody write there again. May raise OSError."""

    def close(self) -> None:
        """Remove it, with what is in it."""


class PrivateDisk:
    """One of this process' own, mounted on a directory."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where this process may not mount."""
        self.path = path
        # Nobody else is to see it, nor to have to remove it.
        libc.call("unshare", _CLONE_NEWNS)
        libc.call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        self._mount(0, "mode=0700")

    def fill(self, processes: MarkedProcesses) -> None:
        deadline_s = time.monotonic() + _FILL_S
        while True:
            told = os.statvfs(self.path)
            used = (told.f_blocks - told.f_bfree) * told.f_frsize
            try:
                self._mount(_MS_REMOUNT, f"size={used}")
            except OSError:
                # What was written in between needs more.
                if time.monotonic() > deadline_s:
                    raise
            else:
                return
            time.sleep(_PAUSE_S)

    def empty(self, processes: MarkedProcesses) -> None:
        self._mount(_MS_REMOUNT, "size=50%")

    def close(self) -> None:
        libc.call("umount2", os.fsencode(self.path), _MNT_DETACH)

    def _mount(self, flags: int, options: str) -> None:
        flags |= _MS_NOSUID | _MS_NODEV
        libc.call("mount", b"rrfp-chaos", os.fsencode(self.path), b"tmpfs", flags, options.encode())


class LimitedFiles:
    """The limit on the size of files, of each process of a training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[Process, tuple[int, int]] = {}

    def fill(self, processes: MarkedProcesses) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
                self._before[process] = limits

    def empty(self, processes: MarkedProcesses) -> None:
        for process in {*processes} & self._before.keys():
            with suppress(ProcessLookupError):
                limits = self._before.pop(process)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)

    def close(self) -> None:
        pass


def disk_at(path: Path) -> Disk:
    """A disk on this directory, as good as this process may make it."""
    with suppress(OSError):
        return PrivateDisk(path)
    return LimitedFiles(path)
