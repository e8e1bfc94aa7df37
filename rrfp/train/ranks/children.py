"""The processes of one host's ranks: started together, watched, and ended together.

Each has its own terminal session, so that Ctrl-C reaches only the launcher, which passes it on.
Nothing here listens or connects.
"""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.train.ranks.failure import ERROR_FILE, FailureReport
from rrfp.train.ranks.stopping import ignore_sigterm

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK_S = 0.05
_SHUTDOWN_S = 5.0
"""How long a rank may take to end after a signal before it is killed."""
_REQUEST_S = 600.0
"""How long ranks may take to finish their step and save after a request to end: as long as a rank
waits for a message before it takes that for a stall."""


class SignalledError(Exception):
    """A signal from outside ended the ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank's process failed."""

    pid: int
    exit_code: int
    """If negative, the signal that killed it."""
    ended_s: float
    """When it reported the failure, or was found to have ended (seconds since the epoch)."""
    report: FailureReport | None
    """The contents of its error file."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    error_file: Path


def run_to_end(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    directory: Path,
    *,
    end_on_request: bool = False,
    lost: Callable[[], str] = str,
) -> dict[int, Failure]:
    """Run the command once per rank, with the rank's variables added to this process' environment,
    until all have ended; returns the failures. As soon as one rank fails, the others are ended. So
    are all once `lost` says in a sentence that another host is, which is raised as RrfpError; `str`
    says nothing.

    Error files go to `directory`. With `end_on_request` the ranks take SIGTERM as a request
    (`rrfp.train.ranks.stopping`): the first one that comes here is passed on, and they end by
    themselves; from then on the signal has no effect here. Raises SignalledError if another signal
    asks this process to end, and RrfpError if a process cannot be started, or the ranks do not end
    as requested; no rank is left then. Must run on the main thread.
    """
    children: dict[int, _Child] = {}
    try:
        with _noted_signals(end_on_request=end_on_request) as noted:
            # Held back until the rank has its handler.
            with _held_back(signal.SIGTERM) if end_on_request else nullcontext():
                for rank, environment in environments.items():
                    children[rank] = _start(command, environment, directory / f"error-{rank}.json")
            return _watch(children, noted, lost, end_on_request=end_on_request)
    finally:
        _signal(children, signal.SIGKILL)


def _start(command: Sequence[str], environment: Mapping[str, str], error_file: Path) -> _Child:
    ours = {ERROR_FILE: str(error_file), variables.LAUNCHER: str(os.getpid())}
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **environment, **ours}, start_new_session=True
        )
    except OSError as error:
        raise RrfpError(
            f"a rank's process cannot be started ({error}); see whether this host allows one more"
        ) from None
    return _Child(process, error_file)


def _watch(
    children: Mapping[int, _Child],
    noted: list[signal.Signals],
    lost: Callable[[], str],
    *,
    end_on_request: bool,
) -> dict[int, Failure]:
    failures: dict[int, Failure] = {}
    requested_s = math.inf
    while not failures:
        # Repeated: whoever stops jobs may ask more than once.
        if end_on_request and {*noted} == {signal.SIGTERM}:
            if requested_s == math.inf:
                _signal(children, signal.SIGTERM)
                requested_s = time.monotonic()
            elif time.monotonic() - requested_s > _REQUEST_S:
                late = [rank for rank, child in children.items() if child.process.poll() is None]
                _end(children, signal.SIGKILL)
                raise RrfpError(
                    f"rank {', '.join(map(str, late))} did not save and end within "
                    f"{_REQUEST_S:.0f} s of SIGTERM and was killed; go on from the last checkpoint "
                    "with --resume"
                )
        elif noted:
            number = next(each for each in noted if each != signal.SIGTERM or not end_on_request)
            _end(children, ending_signal(end_on_request=True) if end_on_request else number)
            raise SignalledError(number)
        if sentence := lost():
            _end(children, ending_signal(end_on_request=end_on_request))
            raise RrfpError(sentence)
        is_over = all(child.process.poll() is not None for child in children.values())
        _add_failures(failures, children)
        if is_over:
            return failures
        time.sleep(_LOOK_S)
    _end(children, ending_signal(end_on_request=end_on_request))
    _add_failures(failures, children)
    return failures


def ending_signal(*, end_on_request: bool) -> signal.Signals:
    """What ends the other ranks at once when one has failed: the signal that they do not handle."""
    return signal.SIGINT if end_on_request else signal.SIGTERM


def _end(children: Mapping[int, _Child], number: signal.Signals) -> None:
    """Send every process a signal, and kill those that do not end in time."""
    deadline_s = time.monotonic() + _SHUTDOWN_S
    for each in (number, signal.SIGKILL):
        _signal(children, each)
        for child in children.values():
            # A process that waits for a device inside the kernel survives SIGKILL; do not wait for
            # it.
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
        deadline_s += _SHUTDOWN_S


def _signal(children: Mapping[int, _Child], number: signal.Signals) -> None:
    for child in children.values():
        if child.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def _add_failures(failures: dict[int, Failure], children: Mapping[int, _Child]) -> None:
    for rank, child in children.items():
        exit_code = child.process.poll()
        if exit_code and rank not in failures:
            failures[rank] = _failure(child, exit_code)


def _failure(child: _Child, exit_code: int) -> Failure:
    try:
        report = FailureReport.read(json.loads(child.error_file.read_bytes()))
        ended_s = child.error_file.stat().st_mtime
    except (OSError, ValueError):
        report, ended_s = None, time.time()
    return Failure(child.process.pid, exit_code, ended_s, report)


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
