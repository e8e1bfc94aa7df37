"""The processes of one host's ranks: started together, watched, and ended together.

Each has its own terminal session, so that Ctrl-C reaches only the launcher, which passes it on.
Nothing here listens or connects.
"""

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.runtime import launchers as variables
from rrfp.system import temporary_directory
from rrfp.train.launch.rank_status import (
    BEAT_S,
    ERROR_FILE,
    STACK_SIGNAL,
    FailureReport,
    StatusPage,
    nameless_file,
    page_file,
)
from rrfp.train.launch.stopping import StopRequestedError, ignore_sigterm
from rrfp.train.launch.watchdog import LOOK_S, Standstill, Vigil, signal_main_thread

# Whether this process' cgroups have reached a limit, by the kernel's own counters.
#
# Processes that it starts are in the same cgroups. Where the counters cannot be read, nothing is
# said.


_REFUSED = re.compile(r"Resource temporarily unavailable|can't start new thread")
_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes the largest number of pages where there is no limit."""
_MIB = 1 << 20


class CgroupLimits:
    """What the cgroups of this process have counted since this object was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` has `/proc` and the mounted cgroups in it."""
        self._memory = [*_cgroups(root, "memory")]
        self._pids = [*_cgroups(root, "pids")]
        self._kills, self._refusals = self._num_kills(), self._num_refusals()

    def killer(self) -> str | None:
        """What has killed a process of them for its memory; None if nothing has."""
        if self._num_kills() <= self._kills:
            return None
        limits = (
            _number(path / name)
            for path in self._memory
            for name in ("memory.max", "memory.limit_in_bytes")
        )
        limit = next(
            (each for each in limits if each is not None and each < _UNLIMITED_BYTES), None
        )
        where = "" if limit is None else f" at its cgroup's memory limit of {limit / _MIB:,.0f} MiB"
        return f"the kernel's OOM killer{where}"

    def note(self, reason: str | None) -> str:
        """A clause with the limit behind a failure; empty if there is none. `reason` is what the
        failed process said; None if it said nothing."""
        if killer := self.killer():
            return f"; {killer} has killed a process of this run, or one beside it"
        is_other = reason is not None and not _REFUSED.search(reason)
        if is_other or self._num_refusals() <= self._refusals:
            return ""
        limits = (_number(path / "pids.max") for path in self._pids)
        limit = next((each for each in limits if each is not None), None)
        of = "" if limit is None else f" of {limit:,}"
        return f"; the cgroup has reached its limit{of} processes and threads (pids.max)"

    def _num_kills(self) -> int:
        return sum(
            _counted(path / name, "oom_kill")
            for path in self._memory[:1]
            for name in ("memory.events", "memory.oom_control")
        )

    def _num_refusals(self) -> int:
        # Counted where the limit is, or where the process is, by the kernel's version.
        return sum(_counted(path / "pids.events", "max") for path in self._pids)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process' cgroup and of those above it that can be seen here."""
    with suppress(OSError, ValueError):
        own: dict[str, str] = {}
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            is_first = kind == "cgroup" and controller in options.split(",") and controller in own
            if not is_first and not (kind == "cgroup2" and controller not in own and "" in own):
                continue
            within, at = (each.replace("\\040", " ") for each in mount.split(" ")[3:5])
            path = own[controller if is_first else ""]
            # A container may see its own cgroup as the root.
            below = path[len(within) :] if path.startswith(within) else ""
            top = root / at.lstrip("/")
            directory = top / below.strip("/")
            yield directory
            yield from (each for each in directory.parents if each.is_relative_to(top))
            return


def _counted(path: Path, name: str) -> int:
    """The number behind a name in a file of them; 0 if it is not there."""
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split(" ", 1) for line in path.read_text().splitlines())[name])
    return 0


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


# A launcher's own temporary directory, which does not outlast it by much.
#
# Whoever is killed removes nothing. So a launcher locks its directory for as long as it lives, and
# each one that starts removes those of this user that nobody has locked.


_PREFIX = "rrfp-run-"


@contextmanager
def own_directory() -> Iterator[Path]:
    """A new directory that only this user may enter; it is removed when the block ends."""
    remove_abandoned()
    path, lock = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_directory()))
        # Another launcher may take it for abandoned before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_abandoned() -> None:
    """Remove what launchers of this user have left that were killed."""
    for path in temporary_directory().glob(f"{_PREFIX}*"):
        # Somebody else's, somebody's who lives, or gone by now.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


# One rank's process, as its launcher holds it: started, looked at, and ended for certain.


_ANSWER_S = 1.5
"""How long a rank may take to write the stacks of its threads after a signal."""
_BEATS_S = 2.5 * BEAT_S
"""The same, if it is asked to do so with its next beat."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank's process failed."""

    pid: int
    exit_code: int
    """If negative, the signal that killed it. 0 is a failure, too, without the rank's own note that
    it has done all its work."""
    ended_s: float
    """When it reported the failure, or was found to have ended, on this host's monotonic clock."""
    report: FailureReport | None
    """The contents of its error file."""
    was_ended: bool = False
    """Whether a signal of the launcher's ended it."""
    standstill: Standstill | None = None
    """How it was found, if it stood still."""
    stacks: str = ""
    """What its threads did then, in faulthandler's words."""
    stage: str = ""
    """What it did when it ended: `in step 7`."""


class Child:
    """A rank's process, in a session of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], error_file: Path
    ) -> None:
        """Start it with these variables besides this process' own. Raises OSError if it cannot be
        started."""
        self._error_file = error_file
        self._stacks = nameless_file()
        with page_file() as page:
            self.page = StatusPage(page.fileno())
            shared = (page.fileno(), self._stacks.fileno())
            ours = {
                ERROR_FILE: str(error_file),
                variables.LAUNCHER: str(os.getpid()),
                variables.LIVENESS: ",".join(map(str, shared)),
            }
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, **ours},
                    start_new_session=True,
                    pass_fds=shared,
                )
            except OSError:
                self._stacks.close()
                raise
        self._exit_code: int | None = None
        self._ended_by: set[int] = set()
        self._standstill: Standstill | None = None
        self._told = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. What it had started ends with it, even if that was stopped: a
        group of processes keeps its number until its leader is asked for its exit code."""
        if self._exit_code is None:
            ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.pid, ended) is not None:
                self._signal(signal.SIGKILL)
                self._exit_code = self._process.wait()
        return self._exit_code is not None

    def tell(self, number: signal.Signals) -> None:
        """Pass on a signal that does not end it."""
        if not self.has_ended:
            self._signal(number)

    def end(self, number: signal.Signals) -> None:
        """Send it, and what it has started, a signal that ends it."""
        if not self.has_ended:
            self._ended_by.add(number)
            self._signal(number)
            # What is stopped takes no other signal than SIGKILL before it goes on.
            self._signal(signal.SIGCONT)

    def end_still(self, standstill: Standstill) -> None:
        """Kill it, as it stands still, once it has told the stacks of its threads. If a signal has
        stopped it, it goes on for this moment."""
        self._standstill = standstill
        # Before its first beat it would die of this signal.
        if self.page.beats and not self.has_ended:
            size = self._stacks_size()
            signal_main_thread(self.pid, STACK_SIGNAL)
            os.kill(self.pid, signal.SIGCONT)
            self._told = self._await_stacks(size, _ANSWER_S)
        self.end(signal.SIGKILL)

    def stacks(self) -> str:
        """What its threads do now. No signal asks for that, which could interrupt what it does."""
        size = self._stacks_size()
        self.page.ask_for_stacks(wanted=True)
        told = self._await_stacks(size, _BEATS_S)
        self.page.ask_for_stacks(wanted=False)
        return told

    def close(self) -> None:
        """Let go of its files."""
        self._stacks.close()

    def failure(self) -> Failure | None:
        """How it failed; None if it has not."""
        has_failed = self.has_ended and (self._exit_code != 0 or not self.page.is_done)
        if self._standstill is None and not has_failed:
            return None
        # Not even SIGKILL ends what waits inside the kernel.
        exit_code = self._exit_code if self.has_ended else -signal.SIGKILL
        assert exit_code is not None
        try:
            report = FailureReport.read(json.loads(self._error_file.read_bytes()))
        except (OSError, ValueError):
            report = None
        ended_s = time.monotonic() if report is None else report.at_s
        # One that was sent a signal may also have ended by itself because of it.
        was_ended = -exit_code in self._ended_by or (
            exit_code >= 0 and report is None and bool(self._ended_by)
        )
        return Failure(
            self.pid,
            exit_code,
            ended_s,
            report,
            was_ended,
            self._standstill,
            self._told,
            self.page.stage,
        )

    def _stacks_size(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size

    def _await_stacks(self, size: int, within_s: float) -> str:
        """What it writes behind so many bytes, once that is no longer growing."""
        deadline_s = time.monotonic() + within_s
        before, now = -1, size
        while (now == size or now != before) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            before, now = now, self._stacks_size()
        # The rank writes where this process would otherwise have read to.
        return os.pread(self._stacks.fileno(), now - size, size).decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def started(command: Sequence[str], environment: Mapping[str, str], error_file: Path) -> Child:
    """A rank's process. Raises RrfpError if it cannot be started."""
    try:
        return Child(command, environment, error_file)
    except OSError as error:
        raise RrfpError(
            f"a rank's process cannot be started ({error}); see whether this host allows one more"
        ) from None


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK_S = 0.05
_SHUTDOWN_S = 5.0
"""How long a rank may take to end after a signal before it is killed."""
_KILL_S = 5.0
"""How long a killed rank may take to end."""
_REQUEST_S = 600.0
"""How long ranks may take to finish their step and save after a request to end: as long as a rank
waits for a message before it takes that for a stall."""


class SignalledError(Exception):
    """A signal from outside ended the ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def run_to_end(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    directory: Path,
    *,
    end_on_request: bool = False,
    lost: Callable[[], RrfpError | None] = lambda: None,
    silence_s: float = math.inf,
    is_whole: bool = True,
    warn: Callable[[int, int, Standstill, str], None] = lambda *_: None,
) -> dict[int, Failure]:
    """Run the command once per rank, with the rank's variables added to this process' environment,
    until all have ended; returns the failures. A rank has failed unless it ends with 0 and has
    noted that it has done all its work (`rrfp.train.launch.rank_status.finish`). As soon as
    one rank fails, the others are ended, and so it is if one stands still for `silence_s`
    (`rrfp.train.launch.watchdog`); `warn` gets the rank, its process, how it stands still, and its
    stacks, if it may do so for longer. `is_whole` says that the run has no other ranks than these.
    All are ended, too, once `lost` gives an error, because another host is; it is raised.

    Error files go to `directory`. With `end_on_request` the ranks take SIGTERM as a request
    (`rrfp.train.launch.stopping`): the first one that comes here is passed on, and they end by
    themselves; from then on the signal has no effect here. Raises StopRequestedError if it comes,
    here or to a rank, before any rank of a whole run has begun a step, SignalledError if another
    signal asks this process to end, and RrfpError if a process cannot be started, or the ranks do
    not end as requested; no rank is left then. Must run on the main thread.
    """
    children: dict[int, Child] = {}
    vigil = Vigil(silence_s, sees_all=is_whole)
    with _noted_signals(end_on_request=end_on_request) as noted:
        try:
            # Held back until the rank has its handler.
            with _held_back(signal.SIGTERM) if end_on_request else nullcontext():
                for rank, environment in environments.items():
                    child = started(command, environment, directory / f"error-{rank}.json")
                    children[rank] = child
                    marks = (f"{variables.LAUNCHER}={os.getpid()}", f"RANK={rank}")
                    vigil.add(rank, child.pid, child.page, [*map(str.encode, marks)])
            return _watch(
                *(children, noted, lost, vigil, warn),
                end_on_request=end_on_request,
                is_whole=is_whole,
            )
        finally:
            for child in children.values():
                child.end(signal.SIGKILL)
                child.close()


def _watch(
    children: Mapping[int, Child],
    noted: list[signal.Signals],
    lost: Callable[[], RrfpError | None],
    vigil: Vigil,
    warn: Callable[[int, int, Standstill, str], None],
    *,
    end_on_request: bool,
    is_whole: bool,
) -> dict[int, Failure]:
    requested_s, look_s = math.inf, time.monotonic()
    while not (failures := _failures(children)):
        if end_on_request and is_whole and _is_asked_before_a_step(children, noted):
            # Some may not have their handlers yet.
            _end(children, signal.SIGKILL)
            raise StopRequestedError
        # Repeated: whoever stops jobs may ask more than once.
        if end_on_request and {*noted} == {signal.SIGTERM}:
            if requested_s == math.inf:
                for child in children.values():
                    child.tell(signal.SIGTERM)
                requested_s = time.monotonic()
            elif time.monotonic() - requested_s > _REQUEST_S:
                late = [rank for rank, child in children.items() if not child.has_ended]
                _end(children, signal.SIGKILL)
                raise RrfpError(
                    f"rank {', '.join(map(str, late))} did not save and end within "
                    f"{_REQUEST_S:.0f} s of SIGTERM and was killed; go on from the last checkpoint "
                    "with --resume"
                )
        elif noted:
            number = next(each for each in noted if each != signal.SIGTERM or not end_on_request)
            _end(children, _ending_signal(end_on_request=True) if end_on_request else number)
            raise SignalledError(number)
        if error := lost():
            _end(children, _ending_signal(end_on_request=end_on_request))
            raise error
        if all(child.has_ended for child in children.values()):
            return _failures(children)
        if (now_s := time.monotonic()) >= look_s:
            look_s = now_s + LOOK_S
            for rank, child in children.items():
                if child.has_ended:
                    vigil.remove(rank)
            _end_still(children, vigil.look(now_s))
            for rank, still in vigil.to_warn():
                stacks = "" if still.is_silent else children[rank].stacks()
                warn(rank, children[rank].pid, still, stacks)
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # others that fail now tell why themselves
    if not any(failure.standstill for failure in failures.values()):
        # Others may give up one that a signal has stopped before this process does.
        _end_still(children, vigil.stopped())
    _end(children, _ending_signal(end_on_request=end_on_request))
    return _failures(children) | failures  # as they were first found


def _is_asked_before_a_step(children: Mapping[int, Child], noted: list[signal.Signals]) -> bool:
    """Whether a request came while there is nothing to save."""
    pages = [child.page for child in children.values()]
    is_asked = {*noted} == {signal.SIGTERM} or any(page.is_asked_to_end for page in pages)
    return is_asked and all(page.is_starting for page in pages)


def _end_still(children: Mapping[int, Child], found: tuple[int, Standstill] | None) -> None:
    if found is not None:
        rank, standstill = found
        children[rank].end_still(standstill)


def _failures(children: Mapping[int, Child]) -> dict[int, Failure]:
    failures = {rank: child.failure() for rank, child in children.items()}
    return {rank: failure for rank, failure in failures.items() if failure is not None}


def _ending_signal(*, end_on_request: bool) -> signal.Signals:
    """What ends the other ranks at once when one has failed: the signal that they do not handle."""
    return signal.SIGINT if end_on_request else signal.SIGTERM


def _end(children: Mapping[int, Child], number: signal.Signals) -> None:
    """Send every process a signal, and kill those that do not end in time."""
    for each, most_s in ((number, _SHUTDOWN_S), (signal.SIGKILL, _KILL_S)):
        for child in children.values():
            child.end(each)
        # A process that waits for a device inside the kernel survives SIGKILL; do not wait for it.
        deadline_s = time.monotonic() + most_s
        while time.monotonic() < deadline_s:
            if all(child.has_ended for child in children.values()):
                return
            time.sleep(_LOOK_S)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back from this thread, and from processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _noted_signals(*, end_on_request: bool) -> Iterator[list[signal.Signals]]:
    """Collect the signals that would end this process in a list, instead of ending. A request to
    end comes too late after that, so it is ignored: how the run ended must not change."""
    noted: list[signal.Signals] = []
    handlers = {
        each: signal.signal(each, lambda number, _: noted.append(signal.Signals(number)))
        for each in _SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield noted
    finally:
        if end_on_request:
            ignore_sigterm()
            handlers.pop(signal.SIGTERM, None)
        for each, handler in handlers.items():
            signal.signal(each, handler)
