"""The launcher's part: it finds the rank that stands still, wherever that stands.

Two things show it. A rank whose page has no new beat, though it is not at work: a signal has
stopped it, or none of its threads can run. And a rank that beats, but whose main thread has not run
for one moment, while it waits for no other rank: it hangs in a read, in a lock, in a sleep.

What may end by itself gets longer, and a warning: a system call that time or something outside
the process can end (a debugger, a child process, a server, a disk), and a call of C code that holds
the interpreter, which looks from outside like a hang.

Whoever computes is at work however long it takes: its threads run, or would if they had a
processor. So is whoever a debugger holds, and whoever waits for others, for that is decided
elsewhere (the stall board, gloo), unless all ranks do. Only the time in which this process looks
counts, so that it may itself be stopped.
"""

import os
import re
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rrfp import system as libc
from rrfp.train.launch.rank_status import StatusPage, Waits

# A process as the kernel sees it: proc(5).


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


# The watchdog.


LOOK_S = 1.0
_MOST_LOOK_S = 2 * LOOK_S
"""What one look counts for at the most: between two that are further apart, this process was
itself stopped."""
C_CALL = 20
"""How many times the silence a single call of C code may hold the interpreter without computing."""
_UNSURE = 60
"""How many times the silence one waits for what may only be slow: a disk, a server, a device, a
person at a debugger."""
_DEADLOCK = 10
"""The same, for ranks that all wait for each other."""
_WARN = 2
"""After how many times the silence one warns of what gets longer."""


class Why(StrEnum):
    """How a rank was found to stand still."""

    STOPPED = "a signal had stopped it"
    FROZEN = "its cgroup was frozen"
    IN_KERNEL = "it waited inside the kernel, as for a disk that does not answer"
    SILENT = "none of its threads ran"
    INERT = "its main thread did not run, and waited for no other rank"
    DEADLOCK = "every rank of the run waited for another"


@dataclass(frozen=True, slots=True)
class Standstill:
    """A rank that stands still, as it was found."""

    why: Why
    seen_s: float
    """How long it was seen to stand still."""
    stage: str
    """`in step 7`"""
    place: str
    """The innermost line of its own code, where that is known."""
    waiting: Sequence[int]
    """The ranks that waited for others meanwhile."""
    limit_s: float = 0.0
    """How long it may stand still like that."""
    is_silent: bool = False
    """Whether no thread of it could run Python."""


@dataclass(slots=True)
class _Watched:
    pid: int
    page: StatusPage
    marks: Collection[bytes] = ()
    beats: int = 0
    now: Sight | None = None
    silent_s: float = 0.0
    """How long it has neither beaten nor worked."""
    inert_s: float = 0.0
    """How long its main thread has not run, and no other worked."""
    waiting_s: float = 0.0
    """How long it was seen to wait for others."""
    processes: dict[int, Sight] | None = None
    """Those that it has started, at the last look, if that looked at them."""
    is_warned: bool = False
    """Whether one has warned of its standing still."""


class Vigil:
    """Watches the ranks of one host; `look` is called about every `LOOK_S`."""

    def __init__(self, silence_s: float, *, sees_all: bool) -> None:
        """`sees_all` says that the run has no other hosts."""
        self._silence_s = silence_s
        self._sees_all = sees_all
        self._ranks: dict[int, _Watched] = {}
        self._looked_s: float | None = None
        self._still: dict[int, Standstill] = {}

    def add(self, rank: int, pid: int, page: StatusPage, marks: Collection[bytes] = ()) -> None:
        """`marks` are entries of its environment that no process has but those that it starts."""
        self._ranks[rank] = _Watched(pid, page, marks)

    def remove(self, rank: int) -> None:
        """Watch a rank no longer, if it was watched: it has ended, and others may get its number of
        a process."""
        self._ranks.pop(rank, None)

    def look(self, now_s: float) -> tuple[int, Standstill] | None:
        """The rank that has stood still for as long as it may, if one has."""
        elapsed_s = LOOK_S if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        for watched in self._ranks.values():
            self._see(watched, elapsed_s)
        self._still = {
            rank: still for rank in self._ranks if (still := self._standstill_of(rank)) is not None
        }
        over = {r: still for r, still in self._still.items() if still.seen_s >= still.limit_s}
        if not over:
            return None
        rank = min(over, key=lambda rank: self._precedence(over[rank].why, self._ranks[rank]))
        return rank, over[rank]

    def to_warn(self) -> list[tuple[int, Standstill]]:
        """The ranks that were found, at the last look, to have stood still for long, and may do so
        for longer. Each is given once."""
        found = []
        for rank, watched in self._ranks.items():
            still = self._still.get(rank)
            if still is None:
                watched.is_warned = False
            elif not watched.is_warned and still.seen_s >= _WARN * self._silence_s:
                watched.is_warned = True
                found.append((rank, still))
        return found

    def stopped(self) -> tuple[int, Standstill] | None:
        """A rank that a signal has stopped, for however short a time."""
        for rank, watched in self._ranks.items():
            now = sight(watched.pid)
            if now is not None and now.is_stopped:
                return rank, self._standstill(rank, Why.STOPPED, 0.0)
        return None

    def _see(self, watched: _Watched, elapsed_s: float) -> None:
        last, now = watched.now, sight(watched.pid)
        watched.now = now
        beats, last_beats = watched.page.beats, watched.beats
        watched.beats = beats
        if last is None or now is None or now.is_traced:
            watched.silent_s = watched.inert_s = watched.waiting_s = 0.0
            return
        works = now.major_faults != last.major_faults or now.is_busy_since(last, elapsed_s)
        if max(watched.silent_s, watched.inert_s) > self._silence_s / 2:
            works = self._has_busy_process(watched, elapsed_s) or works
        else:
            watched.processes = None
        # A system that does not tell what threads do leaves no more to judge by than a stop.
        works = works or not (now.threads_ns or now.is_stopped)
        has_run = works or last.main_thread_ns(watched.pid) != now.main_thread_ns(watched.pid)
        # Before its first beat it reads what it imports, perhaps over a network.
        works = works or (has_run and beats == 0)
        waits = watched.page.waits is Waits.OTHERS
        counted_s = min(elapsed_s, _MOST_LOOK_S)
        watched.silent_s = 0.0 if works or beats != last_beats else watched.silent_s + counted_s
        watched.inert_s = 0.0 if has_run else watched.inert_s + counted_s
        watched.waiting_s = watched.waiting_s + counted_s if waits else 0.0

    def _has_busy_process(self, watched: _Watched, elapsed_s: float) -> bool:
        """Whether a process that the rank has started works for it, or starts others."""
        last = watched.processes
        watched.processes = {
            pid: now
            for pid in family_of(watched.pid, watched.marks)
            if (now := sight(pid)) is not None
        }
        return last is not None and any(
            pid not in last or now.is_busy_since(last[pid], elapsed_s)
            for pid, now in watched.processes.items()
        )

    def _standstill_of(self, rank: int) -> Standstill | None:
        """How a rank stands still, once that was seen for the silence; None if it does not."""
        watched, silence_s = self._ranks[rank], self._silence_s
        if watched.now is None:
            return None
        in_kernel = watched.now.state == "D"
        if watched.silent_s >= silence_s:
            if watched.now.is_stopped:
                return self._standstill(rank, Why.STOPPED, watched.silent_s)
            if is_frozen(watched.pid):
                return self._standstill(rank, Why.FROZEN, watched.silent_s)
            if in_kernel:
                return self._standstill(rank, Why.IN_KERNEL, watched.silent_s, _UNSURE)
            return self._standstill(rank, Why.SILENT, watched.silent_s, C_CALL)
        if watched.beats > 0 and self._is_inert(watched):
            is_sure = not in_kernel and watched.page.waits is Waits.NOTHING
            times = 1 if is_sure and waits_for_itself(watched.pid) else _UNSURE
            if times == 1 or self._sees_all:
                why = Why.IN_KERNEL if in_kernel else Why.INERT
                return self._standstill(rank, why, watched.inert_s, times)
        if self._is_deadlock():
            seen_s = min(each.inert_s for each in self._ranks.values())
            return self._standstill(rank, Why.DEADLOCK, seen_s, _DEADLOCK)
        return None

    def _is_inert(self, watched: _Watched) -> bool:
        """Whether a main thread hangs by itself. No other rank of the host may be at work: this one
        might wait for it in a way that its stack does not show."""
        return (
            watched.page.waits is not Waits.OTHERS
            and watched.inert_s >= self._silence_s
            and all(
                other.now is None or max(other.inert_s, other.waiting_s) >= self._silence_s
                for other in self._ranks.values()
            )
        )

    def _is_deadlock(self) -> bool:
        """Whether all ranks of the run wait for each other, and none has run for long."""
        return self._sees_all and all(
            watched.page.waits is Waits.OTHERS and watched.inert_s >= self._silence_s
            for watched in self._ranks.values()
        )

    def _precedence(self, why: Why, watched: _Watched) -> tuple[int, Waits, float]:
        return [*Why].index(why), watched.page.waits, -max(watched.silent_s, watched.inert_s)

    def _standstill(self, rank: int, why: Why, seen_s: float, times: int = 1) -> Standstill:
        found = self._ranks[rank]
        waiting = [
            other
            for other, watched in self._ranks.items()
            if watched is not found
            and watched.now is not None
            and watched.page.waits is Waits.OTHERS
        ]
        return Standstill(
            why,
            seen_s or max(found.silent_s, found.inert_s),
            found.page.stage,
            found.page.place,
            waiting,
            times * self._silence_s,
            is_silent=found.silent_s >= self._silence_s,
        )
