"""A file system that can be filled up.

If this process may mount, the disk is a tmpfs in a private mount namespace: only this process and
its children see it, and it vanishes with the last of them. Otherwise a limit on file sizes keeps
the training's processes from writing, which fails with another error than a full disk."""

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
    """Directory of a training whose writes can be made to fail."""

    path: Path

    def fill(self, processes: MarkedProcesses) -> None:
        """Make writes of these processes fail. May raise OSError."""

    def empty(self, processes: MarkedProcesses) -> None:
        """Let these processes write again. May raise OSError."""

    def close(self) -> None:
        """Unmount the disk, which removes its contents, if one was mounted. May raise OSError."""


class PrivateDisk:
    """A tmpfs of this process, mounted on a directory."""

    def __init__(self, path: Path) -> None:
        """Mount it. Raises OSError if this process may not mount."""
        self.path = path
        # A private namespace hides the mount from other processes and removes it at exit.
        libc.call("unshare", _CLONE_NEWNS)
        libc.call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        self._mount(0, "mode=0700")

    def fill(self, processes: MarkedProcesses) -> None:
        """Shrink the tmpfs to the space in use; `processes` is ignored.

        Retries for up to 5 s while processes write, then raises OSError.
        """
        deadline_s = time.monotonic() + _FILL_S
        while True:
            status = os.statvfs(self.path)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            try:
                self._mount(_MS_REMOUNT, f"size={used}")
            except OSError:
                # A process wrote in between, so that `used` is too small.
                if time.monotonic() > deadline_s:
                    raise
            else:
                return
            time.sleep(_PAUSE_S)

    def empty(self, processes: MarkedProcesses) -> None:
        """Let the tmpfs grow again, to half of the machine's memory."""
        self._mount(_MS_REMOUNT, "size=50%")

    def close(self) -> None:
        """Unmount the tmpfs, even if it is in use; its contents are lost."""
        libc.call("umount2", os.fsencode(self.path), _MNT_DETACH)

    def _mount(self, flags: int, options: str) -> None:
        """Mount the tmpfs, or change it with `_MS_REMOUNT`. Raises OSError if that fails."""
        flags |= _MS_NOSUID | _MS_NODEV
        libc.call("mount", b"rrfp-chaos", os.fsencode(self.path), b"tmpfs", flags, options.encode())


class LimitedFiles:
    """A limit on file sizes, set for each process of a training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[Process, tuple[int, int]] = {}

    def fill(self, processes: MarkedProcesses) -> None:
        """Set each process's soft limit on file sizes to 0 and remember its limits, unless it has
        ended."""
        for process in processes:
            with suppress(ProcessLookupError):
                limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
                self._before[process] = limits

    def empty(self, processes: MarkedProcesses) -> None:
        """Restore the limits that `fill` changed, of those of these processes that still exist, and
        forget all limits."""
        for process in {*processes} & self._before.keys():
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, self._before[process])
        self._before.clear()

    def close(self) -> None:
        """Do nothing, because nothing was mounted: the directory and its contents remain."""


def disk_at(path: Path) -> Disk:
    """Mount a `PrivateDisk` here, or return `LimitedFiles` if this process may not mount."""
    with suppress(OSError):
        return PrivateDisk(path)
    return LimitedFiles(path)
