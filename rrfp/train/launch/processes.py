"""Runs the processes of one host's ranks: starts, watches and ends them together.

Each has its own terminal session, so that Ctrl-C reaches only the launcher, which forwards it.
Nothing here listens or connects.
"""

import fcntl
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
from rrfp.strict_json import parsed
from rrfp.system import temporary_directory
from rrfp.train.launch.rank_status import (
    BEAT_S,
    ERROR_FILE,
    STACK_SIGNAL,
    FailureReport,
    StatusPage,
    anonymous_file,
    page_file,
)
from rrfp.train.launch.stopping import StopRequestedError, ignore_sigterm
from rrfp.train.launch.watchdog import CHECK_S, Hang, Watchdog, signal_main_thread

# Limits of this process' cgroups, which its children share, by the kernel's counters. If these
# cannot be read, no limit is reported.


_REFUSED = re.compile(r"Resource temporarily unavailable|can't start new thread")
_UNLIMITED_BYTES = 1 << 62
"""Version 1 of cgroups writes the largest number of pages if there is no limit."""
_MIB = 1 << 20


class CgroupLimits:
    """Kills and refusals in the cgroups of this process since this object was created."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` contains `/proc` and the mounted cgroups."""
        self._memory = [*_cgroups(root, "memory")]
        self._pids = [*_cgroups(root, "pids")]
        self._kills, self._refusals = self._num_kills(), self._num_refusals()

    def killer(self) -> str | None:
        """Describe the OOM killer, with its memory limit if known, if it has killed a process of
        the cgroup since this object was created; else None."""
        if self._num_kills() <= self._kills:
            return None
        limits = (
            _number(path / name)
            for path in self._memory
            for name in ("memory.max", "memory.limit_in_bytes")
        )
        finite = (limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES)
        limit = next(finite, None)
        where = "" if limit is None else f" at its cgroup's memory limit of {limit / _MIB:,.0f} MiB"
        return f"the kernel's OOM killer{where}"

    def note(self, reason: str | None) -> str:
        """Return a clause that explains a failure by the OOM killer, or by the limit of processes
        if no error or a refused process or thread was reported; else an empty text. `reason` is the
        error of the failed process, or None."""
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
        """Return the number of processes of the cgroup that the OOM killer has killed so far."""
        return sum(
            _counted(path / name, "oom_kill")
            for path in self._memory[:1]
            for name in ("memory.events", "memory.oom_control")
        )

    def _num_refusals(self) -> int:
        """Return the number of processes and threads that the cgroups have refused so far
        (pids.max)."""
        # By the kernel's version this is counted at the cgroup of the limit or of the process.
        return sum(_counted(path / "pids.events", "max") for path in self._pids)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directory of this process' cgroup for a controller, then those of its visible
    parents; nothing if they are unknown."""
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
    """Return the value of a name in a file of `name value` lines; 0 if it is missing or
    unreadable."""
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split(" ", 1) for line in path.read_text().splitlines())[name])
    return 0


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it is missing or holds something else."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


# The launcher's temporary directory. A launcher that is killed cannot remove it. So each launcher
# locks its directory, and removes unlocked ones of its user when it starts.


_PREFIX = "rrfp-run-"


@contextmanager
def launcher_directory() -> Iterator[Path]:
    """Create a locked directory that only this user may enter, and remove it when the block ends.
    First removes directories that killed launchers left behind."""
    remove_abandoned()
    path, lock = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory() -> tuple[Path, int]:
    """Create a temporary directory and lock it; return its path and the descriptor of the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_directory()))
        # Another launcher may remove it as abandoned before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_abandoned() -> None:
    """Remove the temporary directories of this user's launchers that were killed: those that no
    process has locked. Errors are ignored."""
    for path in temporary_directory().glob(f"{_PREFIX}*"):
        # Another user's, locked, or gone meanwhile.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


# The process of one rank.


_STACKS_BY_SIGNAL_S = 1.5
"""How long a rank may take to write the stacks of its threads after a signal."""
_STACKS_BY_BEAT_S = 2.5 * BEAT_S
"""How long it may take if it writes them with its next heartbeat."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank's process failed."""

    pid: int
    exit_code: int
    """If negative, the signal that killed it. 0 is a failure too if the rank has not recorded that
    it has finished."""
    ended_s: float
    """Time of its report, or else of its end, on this host's monotonic clock."""
    report: FailureReport | None
    """The contents of its error file."""
    was_ended: bool = False
    """True if a signal of the launcher ended it."""
    hang: Hang | None = None
    """The hang for which it was killed."""
    stacks: str = ""
    """The stacks of its threads during the hang, as faulthandler writes them."""
    stage: str = ""
    """The stage in which it ended, such as `in step 7`."""


class RankProcess:
    """The process of a rank, in its own session, as its launcher started it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], error_file: Path
    ) -> None:
        """Start it with these variables added to this process' environment. May raise OSError."""
        self._error_file = error_file
        self._stacks = anonymous_file()
        with page_file() as page:
            self.page = StatusPage(page.fileno())
            shared = (page.fileno(), self._stacks.fileno())
            launcher_variables = {
                ERROR_FILE: str(error_file),
                variables.LAUNCHER: str(os.getpid()),
                variables.LIVENESS: ",".join(map(str, shared)),
            }
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, **launcher_variables},
                    start_new_session=True,
                    pass_fds=shared,
                )
            except OSError:
                self._stacks.close()
                raise
        self._exit_code: int | None = None
        self._ended_by: set[int] = set()
        self._hang: Hang | None = None
        self._hang_stacks = ""

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True if it has ended; at the first such call its children are killed, also stopped ones.
        A process group keeps its number until the exit code of its leader is read."""
        if self._exit_code is None:
            ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.pid, ended) is not None:
                self._signal(signal.SIGKILL)
                self._exit_code = self._process.wait()
        return self._exit_code is not None

    def send(self, number: signal.Signals) -> None:
        """Send it and its children a signal that is not meant to end it, unless it has ended."""
        if not self.has_ended:
            self._signal(number)

    def end(self, number: signal.Signals) -> None:
        """Send it and its children a signal that ends them, unless it has ended, and let a stopped
        one continue. Does not wait."""
        if not self.has_ended:
            self._ended_by.add(number)
            self._signal(number)
            # A stopped process handles no signal but SIGKILL until it continues.
            self._signal(signal.SIGCONT)

    def kill_hung(self, hang: Hang) -> None:
        """Record the hang and kill it and its children. If it has had a heartbeat, it first may
        write the stacks of its threads, for up to 1.5 s; one that a signal has stopped continues
        for this."""
        self._hang = hang
        # Before its first heartbeat this signal would kill it.
        if self.page.beats and not self.has_ended:
            size = self._stacks_size()
            signal_main_thread(self.pid, STACK_SIGNAL)
            os.kill(self.pid, signal.SIGCONT)
            self._hang_stacks = self._await_stacks(size, _STACKS_BY_SIGNAL_S)
        self.end(signal.SIGKILL)

    def stacks(self) -> str:
        """Wait up to 2.5 s for the stacks of its threads and return them; empty if none arrive.
        They are requested without a signal, which could interrupt it."""
        size = self._stacks_size()
        self.page.request_stacks(wanted=True)
        stacks = self._await_stacks(size, _STACKS_BY_BEAT_S)
        self.page.request_stacks(wanted=False)
        return stacks

    def close(self) -> None:
        """Close the file of its stacks; the process is not ended."""
        self._stacks.close()

    def failure(self) -> Failure | None:
        """Return the failure of the rank, with its report and hang; None if it was not killed for a
        hang and either runs or has exited with 0 after recording that it had finished."""
        has_failed = self.has_ended and (self._exit_code != 0 or not self.page.is_done)
        if self._hang is None and not has_failed:
            return None
        # Even SIGKILL does not end a process that waits inside the kernel.
        exit_code = self._exit_code if self.has_ended else -signal.SIGKILL
        assert exit_code is not None
        try:
            report = FailureReport.read(parsed(self._error_file.read_bytes()))
        except (OSError, ValueError):
            report = None
        ended_s = time.monotonic() if report is None else report.at_s
        # A process that was sent a signal may also exit by itself because of it.
        was_ended = -exit_code in self._ended_by or (
            exit_code >= 0 and report is None and bool(self._ended_by)
        )
        return Failure(
            self.pid,
            exit_code,
            ended_s,
            report,
            was_ended,
            self._hang,
            self._hang_stacks,
            self.page.stage,
        )

    def _stacks_size(self) -> int:
        """Return the size in bytes of the file of its stacks."""
        return os.fstat(self._stacks.fileno()).st_size

    def _await_stacks(self, size: int, within_s: float) -> str:
        """Return the text that it appends to a file of `size` bytes, once that stops growing or the
        time is over."""
        deadline_s = time.monotonic() + within_s
        before, now = -1, size
        while (now == size or now != before) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            before, now = now, self._stacks_size()
        # pread, because the rank shares the position in the file.
        return os.pread(self._stacks.fileno(), now - size, size).decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group; do nothing if that is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def start_rank(
    command: Sequence[str], environment: Mapping[str, str], error_file: Path
) -> RankProcess:
    """Start the process of a rank. Raise RrfpError if it cannot be started."""
    try:
        return RankProcess(command, environment, error_file)
    except OSError as error:
        raise RrfpError(
            f"a rank's process cannot be started ({error}); see whether this host allows one more"
        ) from None


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHUTDOWN_S = 5.0
"""How long a rank may take to end after a signal before it is killed."""
_KILL_S = 5.0
"""How long a killed rank may take to end."""
_REQUEST_S = 600.0
"""How long ranks may take to finish their step and save after a request to stop: the time after
which a rank that waits for a message reports a stall."""


class SignalledError(Exception):
    """A signal from outside ended the ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def supervise_ranks(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    directory: Path,
    *,
    end_on_request: bool = False,
    lost: Callable[[], RrfpError | None] = lambda: None,
    silence_s: float = math.inf,
    is_whole: bool = True,
    warn: Callable[[int, int, Hang, str], None] = lambda *_: None,
) -> dict[int, Failure]:
    """Run the command once per rank, with the rank's variables added to this process' environment,
    until all have ended; return the failures by rank. When one rank fails, or hangs for `silence_s`
    seconds or the multiple of that for its kind of hang, the others are ended. A rank has failed
    unless it exits with 0 after recording that it has finished.

    Error files go to `directory`. `warn` receives rank, process number, hang and stacks of a rank
    whose hang may last longer. `lost` returns an error once another host is lost, which is raised
    when all have ended. `is_whole` states that the run has no other ranks. With `end_on_request`
    the first SIGTERM is forwarded as a request to stop (`rrfp.train.launch.stopping`), and ignored
    from then on.

    Raise StopRequestedError if it arrives, here or at a rank, before any rank of a whole run has
    begun a step, SignalledError if another signal asks this process to end, and RrfpError if a
    process cannot be started, or the ranks do not stop when asked; no rank is left then. Must run
    on the main thread.
    """
    ranks: dict[int, RankProcess] = {}
    watchdog = Watchdog(silence_s, sees_all=is_whole)
    with _recorded_signals(end_on_request=end_on_request) as received:
        try:
            # Blocked until the rank has its handler.
            with _blocked(signal.SIGTERM) if end_on_request else nullcontext():
                for rank, environment in environments.items():
                    process = start_rank(command, environment, directory / f"error-{rank}.json")
                    ranks[rank] = process
                    marks = (f"{variables.LAUNCHER}={os.getpid()}", f"RANK={rank}")
                    watchdog.add(rank, process.pid, process.page, [*map(str.encode, marks)])
            return _watch(
                ranks,
                received,
                lost,
                watchdog,
                warn,
                end_on_request=end_on_request,
                is_whole=is_whole,
            )
        finally:
            for process in ranks.values():
                process.end(signal.SIGKILL)
                process.close()


def _watch(
    ranks: Mapping[int, RankProcess],
    received: list[signal.Signals],
    lost: Callable[[], RrfpError | None],
    watchdog: Watchdog,
    warn: Callable[[int, int, Hang, str], None],
    *,
    end_on_request: bool,
    is_whole: bool,
) -> dict[int, Failure]:
    """Poll the ranks until all have ended or one has failed or hangs, then end the others.
    `received` grows by each signal that this process receives. Raises and returns what
    `supervise_ranks` does."""
    requested_s, check_s = math.inf, time.monotonic()
    while not (failures := _failures(ranks)):
        if end_on_request and is_whole and _is_asked_before_first_step(ranks, received):
            # Some may not have their handlers yet.
            _end(ranks, signal.SIGKILL)
            raise StopRequestedError
        # A set: a scheduler may send SIGTERM more than once.
        if end_on_request and {*received} == {signal.SIGTERM}:
            if requested_s == math.inf:
                for process in ranks.values():
                    process.send(signal.SIGTERM)
                requested_s = time.monotonic()
            elif time.monotonic() - requested_s > _REQUEST_S:
                late = [rank for rank, process in ranks.items() if not process.has_ended]
                _end(ranks, signal.SIGKILL)
                raise RrfpError(
                    f"rank {', '.join(map(str, late))} did not save and end within "
                    f"{_REQUEST_S:.0f} s of SIGTERM and was killed; go on from the last checkpoint "
                    "with --resume"
                )
        elif received:
            number = next(each for each in received if each != signal.SIGTERM or not end_on_request)
            _end(ranks, _ending_signal(end_on_request=True) if end_on_request else number)
            raise SignalledError(number)
        if error := lost():
            _end(ranks, _ending_signal(end_on_request=end_on_request))
            raise error
        if all(process.has_ended for process in ranks.values()):
            return _failures(ranks)
        if (now_s := time.monotonic()) >= check_s:
            check_s = now_s + CHECK_S
            _check_for_hangs(ranks, watchdog, now_s, warn)
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # time for ranks that fail now to report why
    if not any(failure.hang for failure in failures.values()):
        # Other ranks may give up a stopped one before the watchdog does.
        _kill_hung(ranks, watchdog.stopped())
    _end(ranks, _ending_signal(end_on_request=end_on_request))
    return _failures(ranks) | failures  # those found first stay as they were


def _check_for_hangs(
    ranks: Mapping[int, RankProcess],
    watchdog: Watchdog,
    now_s: float,
    warn: Callable[[int, int, Hang, str], None],
) -> None:
    """Let the watchdog check the ranks that run, kill one whose hang is at its limit, and warn of
    others with their stacks."""
    for rank, process in ranks.items():
        if process.has_ended:
            watchdog.remove(rank)
    _kill_hung(ranks, watchdog.check(now_s))
    for rank, hang in watchdog.new_warnings():
        stacks = "" if hang.is_silent else ranks[rank].stacks()
        warn(rank, ranks[rank].pid, hang, stacks)


def _is_asked_before_first_step(
    ranks: Mapping[int, RankProcess], received: list[signal.Signals]
) -> bool:
    """True if a request to stop, SIGTERM, arrived here or at a rank while all ranks are starting,
    so that there is nothing to save."""
    pages = [process.page for process in ranks.values()]
    is_asked = {*received} == {signal.SIGTERM} or any(page.is_asked_to_end for page in pages)
    return is_asked and all(page.is_starting for page in pages)


def _kill_hung(ranks: Mapping[int, RankProcess], found: tuple[int, Hang] | None) -> None:
    """Kill the rank that the watchdog has found, with its stacks taken first; do nothing for
    None."""
    if found is not None:
        rank, hang = found
        ranks[rank].kill_hung(hang)


def _failures(ranks: Mapping[int, RankProcess]) -> dict[int, Failure]:
    """Return the failures of the ranks that have failed, by rank."""
    failures = {rank: process.failure() for rank, process in ranks.items()}
    return {rank: failure for rank, failure in failures.items() if failure is not None}


def _ending_signal(*, end_on_request: bool) -> signal.Signals:
    """Return the signal that ends the other ranks at once, because they do not handle it: SIGINT if
    SIGTERM is a request to stop, else SIGTERM."""
    return signal.SIGINT if end_on_request else signal.SIGTERM


def _end(ranks: Mapping[int, RankProcess], number: signal.Signals) -> None:
    """Send every process a signal and wait up to 5 s until all have ended; then kill the rest and
    wait up to 5 s more."""
    for each, timeout_s in ((number, _SHUTDOWN_S), (signal.SIGKILL, _KILL_S)):
        for process in ranks.values():
            process.end(each)
        # A process that waits for a device inside the kernel survives SIGKILL; do not wait for it.
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if all(process.has_ended for process in ranks.values()):
                return
            time.sleep(_POLL_S)


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal in the block, for this thread and for processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _recorded_signals(*, end_on_request: bool) -> Iterator[list[signal.Signals]]:
    """Collect SIGTERM, SIGINT, SIGHUP and SIGQUIT, except ignored ones, in a list, instead of
    ending. After the block SIGTERM is ignored with `end_on_request`: a request that comes too late
    must not change how the run ended."""
    received: list[signal.Signals] = []
    handlers = {
        each: signal.signal(each, lambda number, _: received.append(signal.Signals(number)))
        for each in _SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield received
    finally:
        if end_on_request:
            ignore_sigterm()
            handlers.pop(signal.SIGTERM, None)
        for each, handler in handlers.items():
            signal.signal(each, handler)
