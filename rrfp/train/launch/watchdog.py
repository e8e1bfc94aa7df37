"""The launcher's watchdog: finds the rank that hangs, wherever it hangs.

There are two signs of a hang. A rank is silent if it has no new heartbeat although it does no work:
a signal has stopped it, or none of its threads can run. A rank is inert if it has heartbeats but
its main thread has not run at all, while it waits for no other rank: it hangs in a read, a lock or
a sleep.

A wait that may end by itself gets a longer limit and a warning: a system call that ends with time
or by something outside of the process (a debugger, a child process, a server, a disk), and a call
of C code that holds the interpreter, which looks like a hang from outside.

A rank is at work for as long as its threads run, or are ready but have no processor. A rank that a
debugger holds is not judged, nor one that waits for others: the stall board and gloo do that,
unless all ranks wait. Only time in which this process checks counts, so it may itself be stopped.
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
"""Indices of fields in `stat`, counted from the state."""

_FUTEX, _PAUSE = {"x86_64": (202, 34), "aarch64": (98, None)}.get(os.uname().machine, (None, None))
_FUTEX_TIMEOUT = 4
"""The index of the timeout in `syscall`, counted from the call's number."""
_FREEZERS = ("refrigerator", "freezer")

_BUSY = 0.25
"""A thread that ran, or was ready to run, for more than this share of the time is computing.
Threads that only poll stay far below."""


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """The state of a process at one moment."""

    state: str
    """The kernel's letter: T if a signal has stopped it, D if it waits inside the kernel."""
    is_traced: bool
    """True if a debugger is attached."""
    major_faults: int
    """Number of page faults that read from a disk."""
    threads_ns: dict[int, tuple[int, int]]
    """Per thread, the time for which it has run and for which it was ready without a processor. The
    main thread has the number of the process."""

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process."""
        return self.state == "T"

    def main_thread_ns(self, pid: int) -> int | None:
        """Return the total run time of the main thread; None if this system does not report it."""
        ran_ns, _ = self.threads_ns.get(pid, (None, 0))
        return ran_ns

    def is_busy_since(self, before: "ProcessSnapshot", elapsed_s: float) -> bool:
        """True if any thread has run, or was ready to run, for more than a quarter of the time
        since an earlier snapshot. Threads that are new since then do not count."""
        least_ns = elapsed_s * _BUSY * 1e9
        return any(
            sum(now_ns) - sum(before.threads_ns[thread]) > least_ns
            for thread, now_ns in self.threads_ns.items()
            if thread in before.threads_ns
        )


def take_snapshot(pid: int) -> ProcessSnapshot | None:
    """Read the current state of a process; None if it has ended, or this system does not report
    it."""
    try:
        stat = _stat(pid)
        traced_by = _TRACED_BY.search((_PROC / str(pid) / "status").read_bytes())
    except OSError:
        return None
    return ProcessSnapshot(
        stat[0],
        traced_by is not None and traced_by[1] != b"0",
        int(stat[_MAJOR_FAULTS]),
        _threads_ns(pid),
    )


def descendants_of(pid: int, marks: Collection[bytes]) -> list[int]:
    """List the processes that a rank has started, in any session: its descendants, and processes
    with all of these entries (`NAME=value`) in their environment, such as orphans."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parents[int(folder.name)] = int(_stat(int(folder.name))[_PARENT])
    family = {pid}
    family.update(each for each in parents if _is_marked(each, marks))
    num_before = 0
    while num_before < len(family):
        num_before = len(family)
        family.update(each for each, parent in parents.items() if parent in family)
    return [*family - {pid}]


def waits_for_own_lock(pid: int) -> bool:
    """True if a main thread is in a wait that only its own process can end: for a lock without a
    timeout, or in pause(). False if that is unknown."""
    try:
        number, *more = (_PROC / str(pid) / "syscall").read_text().split()
    except OSError:
        return False
    if not number.isdigit():  # it runs
        return False
    is_lock = int(number) == _FUTEX and int(more[_FUTEX_TIMEOUT - 1], 16) == 0
    return is_lock or int(number) == _PAUSE


def is_frozen(pid: int) -> bool:
    """True if the cgroup of a process is frozen; False if that is unknown."""
    with suppress(OSError):
        waits_in = (_PROC / str(pid) / "wchan").read_text()
        return any(name in waits_in for name in _FREEZERS)
    return False


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread of a process, or to the process before glibc 2.30. A stopped
    main thread handles it before it continues; one sent to the process goes to the thread that
    continues first."""
    try:
        libc.call("tgkill", pid, pid, int(number))
    except AttributeError:  # before glibc 2.30
        os.kill(pid, number)


def _is_marked(pid: int, marks: Collection[bytes]) -> bool:
    """True if the environment of a process has all of these entries; False if it cannot be read."""
    with suppress(OSError):
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return all(mark in entries for mark in marks)
    return False


def _threads_ns(pid: int) -> dict[int, tuple[int, int]]:
    """Read how long each thread of a process has run, and was ready without a processor, in ns;
    empty if this system does not report it."""
    threads = {}
    # Threads may end meanwhile.
    with suppress(OSError):
        for folder in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                ran_ns, waited_ns, _ = (folder / "schedstat").read_bytes().split()
                threads[int(folder.name)] = int(ran_ns), int(waited_ns)
    return threads


def _stat(pid: int) -> list[str]:
    """Read the fields of a process' `stat` from the state on. May raise OSError."""
    # The name of a process may contain spaces and brackets.
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


# The watchdog itself.


CHECK_S = 1.0
_MAX_COUNTED_S = 2 * CHECK_S
"""The most that one check counts for. Between two checks that are further apart, this process
itself was stopped."""

# Limits, as multiples of the silence setting.

C_CALL = 20
"""For a single call of C code that holds the interpreter without computing."""
_UNSURE = 60
"""For a wait that may only be slow: a disk, a server, a device, a person at a debugger."""
_DEADLOCK = 10
"""For ranks that all wait for each other."""
_WARN = 2
"""For a warning before one of the above."""


class Why(StrEnum):
    """The kinds of hangs, most certain first, as clauses of an error sentence."""

    STOPPED = "a signal had stopped it"
    FROZEN = "its cgroup was frozen"
    IN_KERNEL = "it waited inside the kernel, as for a disk that does not answer"
    SILENT = "none of its threads ran"
    INERT = "its main thread did not run, and waited for no other rank"
    DEADLOCK = "every rank of the run waited for another"


@dataclass(frozen=True, slots=True)
class Hang:
    """The hang of a rank, as observed by the watchdog."""

    why: Why
    seen_s: float
    """How long it has been observed."""
    stage: str
    """The rank's stage, such as `in step 7`."""
    place: str
    """The innermost line of the rank's own code, if known."""
    waiting: Sequence[int]
    """The ranks that waited for others meanwhile."""
    limit_s: float = 0.0
    """How long such a hang may last."""
    is_silent: bool = False
    """True if no thread of the rank could run Python."""


@dataclass(slots=True)
class _WatchedRank:
    """The observations of one rank at the last check."""

    pid: int
    page: StatusPage
    marks: Collection[bytes] = ()
    beats: int = 0
    now: ProcessSnapshot | None = None
    silent_s: float = 0.0
    """Time without heartbeats and without work."""
    inert_s: float = 0.0
    """Time in which its main thread has not run, and no other thread worked."""
    waiting_s: float = 0.0
    """Time for which it has waited for other ranks."""
    processes: dict[int, ProcessSnapshot] | None = None
    """The processes that it has started; None if the last check did not examine them."""
    is_warned: bool = False
    """True if `new_warnings` has returned its current hang."""


class Watchdog:
    """Watches the ranks of one host for hangs, and only reports them; `check` is called about every
    `CHECK_S` seconds."""

    def __init__(self, silence_s: float, *, sees_all: bool) -> None:
        """`sees_all` states that the run has no ranks on other hosts."""
        self._silence_s = silence_s
        self._sees_all = sees_all
        self._ranks: dict[int, _WatchedRank] = {}
        self._checked_s: float | None = None
        self._hangs: dict[int, Hang] = {}

    def add(self, rank: int, pid: int, page: StatusPage, marks: Collection[bytes] = ()) -> None:
        """Watch a rank. `marks` are entries of its environment that only it and its children
        have."""
        self._ranks[rank] = _WatchedRank(pid, page, marks)

    def remove(self, rank: int) -> None:
        """Stop watching a rank that has ended: another process may get its number."""
        self._ranks.pop(rank, None)

    def check(self, now_s: float) -> tuple[int, Hang] | None:
        """Observe all ranks and return the rank whose hang has reached its limit, or None. Of
        several, return the one with the most certain cause; of these, one that waits for nothing
        before others, then the longest hang."""
        elapsed_s = CHECK_S if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        for watched in self._ranks.values():
            self._observe(watched, elapsed_s)
        self._hangs = {
            rank: hang for rank in self._ranks if (hang := self._hang_of(rank)) is not None
        }
        over = {rank: hang for rank, hang in self._hangs.items() if hang.seen_s >= hang.limit_s}
        if not over:
            return None
        rank = min(over, key=lambda rank: self._precedence(over[rank].why, self._ranks[rank]))
        return rank, over[rank]

    def new_warnings(self) -> list[tuple[int, Hang]]:
        """Return the ranks that, at the last check, have hung for at least twice the silence
        setting. Each hang is returned once."""
        found = []
        for rank, watched in self._ranks.items():
            hang = self._hangs.get(rank)
            if hang is None:
                watched.is_warned = False
            elif not watched.is_warned and hang.seen_s >= _WARN * self._silence_s:
                watched.is_warned = True
                found.append((rank, hang))
        return found

    def stopped(self) -> tuple[int, Hang] | None:
        """Return a rank that is stopped by a signal now, without a minimum time, or None."""
        for rank, watched in self._ranks.items():
            now = take_snapshot(watched.pid)
            if now is not None and now.is_stopped:
                return rank, self._make_hang(rank, Why.STOPPED, 0.0)
        return None

    def _observe(self, watched: _WatchedRank, elapsed_s: float) -> None:
        """Compare a rank with the last check and update how long it has been silent (no heartbeat,
        no work), inert (its main thread has not run, no work) and waiting for ranks. Work is a busy
        thread or a read from disk; after half of the silence setting also a busy child process. A
        check adds at most 2 s. A debugger, or a first or failed snapshot, sets all to 0."""
        last, now = watched.now, take_snapshot(watched.pid)
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
        # Without run times of threads, only a stop can be judged.
        works = works or not (now.threads_ns or now.is_stopped)
        has_run = works or last.main_thread_ns(watched.pid) != now.main_thread_ns(watched.pid)
        # Before its first beat it reads what it imports, perhaps over a network.
        works = works or (has_run and beats == 0)
        waits = watched.page.waits is Waits.OTHERS
        counted_s = min(elapsed_s, _MAX_COUNTED_S)
        watched.silent_s = 0.0 if works or beats != last_beats else watched.silent_s + counted_s
        watched.inert_s = 0.0 if has_run else watched.inert_s + counted_s
        watched.waiting_s = watched.waiting_s + counted_s if waits else 0.0

    def _has_busy_process(self, watched: _WatchedRank, elapsed_s: float) -> bool:
        """True if a process that the rank has started is computing, or is new since the last check;
        False if that check examined none. Keeps their snapshots."""
        last = watched.processes
        watched.processes = {
            pid: now
            for pid in descendants_of(watched.pid, watched.marks)
            if (now := take_snapshot(pid)) is not None
        }
        return last is not None and any(
            pid not in last or now.is_busy_since(last[pid], elapsed_s)
            for pid, now in watched.processes.items()
        )

    def _hang_of(self, rank: int) -> Hang | None:
        """Return the hang of a rank, with the limit for its kind: silence, an inert main thread, or
        a deadlock of all ranks, whichever applies first. None unless it has been observed for
        `silence_s` seconds. An inert thread that may wait for something outside of its process
        counts only if all ranks are on this host."""
        watched, silence_s = self._ranks[rank], self._silence_s
        if watched.now is None:
            return None
        in_kernel = watched.now.state == "D"
        if watched.silent_s >= silence_s:
            if watched.now.is_stopped:
                return self._make_hang(rank, Why.STOPPED, watched.silent_s)
            if is_frozen(watched.pid):
                return self._make_hang(rank, Why.FROZEN, watched.silent_s)
            if in_kernel:
                return self._make_hang(rank, Why.IN_KERNEL, watched.silent_s, _UNSURE)
            return self._make_hang(rank, Why.SILENT, watched.silent_s, C_CALL)
        if watched.beats > 0 and self._is_inert(watched):
            is_sure = not in_kernel and watched.page.waits is Waits.NOTHING
            times = 1 if is_sure and waits_for_own_lock(watched.pid) else _UNSURE
            if times == 1 or self._sees_all:
                why = Why.IN_KERNEL if in_kernel else Why.INERT
                return self._make_hang(rank, why, watched.inert_s, times)
        if self._is_deadlock():
            seen_s = min(each.inert_s for each in self._ranks.values())
            return self._make_hang(rank, Why.DEADLOCK, seen_s, _DEADLOCK)
        return None

    def _is_inert(self, watched: _WatchedRank) -> bool:
        """True if a main thread that waits for no other rank has not run for `silence_s`, while
        every rank of the host has stood still or waited for as long: this one might wait for
        another in a way that its stack does not show."""
        return (
            watched.page.waits is not Waits.OTHERS
            and watched.inert_s >= self._silence_s
            and all(
                other.now is None or max(other.inert_s, other.waiting_s) >= self._silence_s
                for other in self._ranks.values()
            )
        )

    def _is_deadlock(self) -> bool:
        """True if all ranks of the run wait for each other, and none has run for `silence_s`."""
        return self._sees_all and all(
            watched.page.waits is Waits.OTHERS and watched.inert_s >= self._silence_s
            for watched in self._ranks.values()
        )

    def _precedence(self, why: Why, watched: _WatchedRank) -> tuple[int, Waits, float]:
        """Return the sort key of a hang: the most certain cause first, then waits for nothing, then
        the longest."""
        return [*Why].index(why), watched.page.waits, -max(watched.silent_s, watched.inert_s)

    def _make_hang(self, rank: int, why: Why, seen_s: float, times: int = 1) -> Hang:
        """Describe a hang of a rank, with the other ranks that wait for ranks now. `seen_s` 0 means
        its longest time so far; `times` is the limit as a multiple of the silence setting."""
        found = self._ranks[rank]
        waiting = [
            other
            for other, watched in self._ranks.items()
            if watched is not found
            and watched.now is not None
            and watched.page.waits is Waits.OTHERS
        ]
        return Hang(
            why,
            seen_s or max(found.silent_s, found.inert_s),
            found.page.stage,
            found.page.place,
            waiting,
            times * self._silence_s,
            is_silent=found.silent_s >= self._silence_s,
        )
