"""What the kernel says of a process, which needs no answer of it: proc(5)."""

import os
import re
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp import system as libc

_PROC = Path("/proc")
_TRACED_BY = re.compile(rb"^TracerPid:\s+(\d+)", re.MULTILINE)
_PARENT, _MAJOR_FAULTS = 1, 9
"""Fields of `stat`, counted from the state on."""

_FUTEX, _PAUSE = {"x86_64": (202, 34), "aarch64": (98, None)}.get(os.uname().machine, (None, None))
_FUTEX_TIMEOUT = 4
"""The field of `syscall` with the time-out, counted from the call's number on."""
_FREEZERS = ("refrigerator", "freezer")

_BUSY = 0.25
"""The share of the time for which a thread that computes has run, or waited for a processor.
Threads that only look now and then stay far below."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A process at one moment."""

    state: str
    """The kernel's letter: T if a signal has stopped it, D if it waits inside the kernel."""
    is_traced: bool
    """By a debugger."""
    major_faults: int
    """How often it waited for memory that lay on a disk."""
    threads_ns: dict[int, tuple[int, int]]
    """By thread, how long it has run, and how long it was ready to, but had no processor. The main
    thread's number is the process'."""

    @property
    def is_stopped(self) -> bool:
        return self.state == "T"

    def main_thread_ns(self, pid: int) -> int | None:
        """How long the main thread has run; None if this system does not tell."""
        ran_ns, _ = self.threads_ns.get(pid, (None, 0))
        return ran_ns

    def is_busy_since(self, before: "Sight", elapsed_s: float) -> bool:
        """Whether any thread has computed, or would have, had it had a processor."""
        least_ns = elapsed_s * _BUSY * 1e9
        return any(
            sum(now_ns) - sum(before.threads_ns[thread]) > least_ns
            for thread, now_ns in self.threads_ns.items()
            if thread in before.threads_ns
        )


def sight(pid: int) -> Sight | None:
    """A process as it is now; None if it has ended, or this system does not tell."""
    try:
        stat = _stat(pid)
        traced_by = _TRACED_BY.search((_PROC / str(pid) / "status").read_bytes())
    except OSError:
        return None
    return Sight(
        stat[0],
        traced_by is not None and traced_by[1] != b"0",
        int(stat[_MAJOR_FAULTS]),
        _threads_ns(pid),
    )


def family_of(rank: int, marks: Collection[bytes]) -> list[int]:
    """What a rank has started, in whatever session: its descendants, and orphans among them that
    still have these entries (`NAME=value`) in their environment."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parents[int(folder.name)] = int(_stat(int(folder.name))[_PARENT])
    family = {rank}
    family.update(pid for pid in parents if _is_marked(pid, marks))
    num_before = 0
    while num_before < len(family):
        num_before = len(family)
        family.update(pid for pid, parent in parents.items() if parent in family)
    return [*family - {rank}]


def waits_for_itself(pid: int) -> bool:
    """Whether only its own process can end what a main thread waits for: it waits for a lock
    without a time-out. Every other system call ends with time, or by what is outside."""
    try:
        number, *more = (_PROC / str(pid) / "syscall").read_text().split()
    except OSError:
        return False
    if not number.isdigit():  # as where it runs
        return False
    is_lock = int(number) == _FUTEX and int(more[_FUTEX_TIMEOUT - 1], 16) == 0
    return is_lock or int(number) == _PAUSE


def is_frozen(pid: int) -> bool:
    """Whether the cgroup of a process is frozen."""
    with suppress(OSError):
        waits_in = (_PROC / str(pid) / "wchan").read_text()
        return any(name in waits_in for name in _FREEZERS)
    return False


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process' main thread alone. If that is stopped, it takes the signal before
    it goes on; one sent to the process is taken by whichever thread goes on first."""
    try:
        libc.call("tgkill", pid, pid, int(number))
    except AttributeError:  # before glibc 2.30
        os.kill(pid, number)


def _is_marked(pid: int, marks: Collection[bytes]) -> bool:
    with suppress(OSError):
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return all(mark in entries for mark in marks)
    return False


def _threads_ns(pid: int) -> dict[int, tuple[int, int]]:
    threads = {}
    # A thread may end meanwhile.
    with suppress(OSError):
        for folder in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                ran_ns, waited_ns, _ = (folder / "schedstat").read_bytes().split()
                threads[int(folder.name)] = int(ran_ns), int(waited_ns)
    return threads


def _stat(pid: int) -> list[str]:
    # A name may hold spaces and brackets.
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
