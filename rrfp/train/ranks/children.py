"""The processes of one host's ranks: started together, watched, and ended together.

Each has its own terminal session, so that Ctrl-C reaches only the launcher, which passes it on.
Nothing here listens or connects.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.train.ranks.liveness.child import Child, Failure, started
from rrfp.train.ranks.liveness.vigil import LOOK_S, Standstill, Vigil
from rrfp.train.ranks.stopping import StopRequestedError, ignore_sigterm

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
    noted that it has done all its work (`rrfp.train.ranks.liveness.heartbeat.finish`). As soon as
    one rank fails, the others are ended, and so it is if one stands still for `silence_s`
    (`rrfp.train.ranks.liveness`); `warn` gets the rank, its process, how it stands still, and its
    stacks, if it may do so for longer. `is_whole` says that the run has no other ranks than these.
    All are ended, too, once `lost` gives an error, because another host is; it is raised.

    Error files go to `directory`. With `end_on_request` the ranks take SIGTERM as a request
    (`rrfp.train.ranks.stopping`): the first one that comes here is passed on, and they end by
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
