"""SIGTERM as a request: ranks end together after the step under way. Before the first step they end
at once, and so does a launcher that has no ranks yet."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rrfp.train.launch.rank_status import show_request

_asked = False


class StopRequestedError(BaseException):
    """SIGTERM came before any rank had begun a step; like Ctrl-C, nobody handles it on the way."""


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """Raise StopRequestedError when SIGTERM first comes in this block. While ranks run, their
    launcher passes the signal on instead (`rrfp.train.launch.processes`). Must run on the main
    thread."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def failing_for_good() -> Iterator[None]:
    """If the block fails, a SIGTERM that comes later is no request to end any more: it would make
    a success of the failure."""
    try:
        yield
    except Exception:
        if signal.getsignal(signal.SIGTERM) is _stop:
            ignore_sigterm()
        raise


def ignore_sigterm() -> None:
    """Let SIGTERM have no effect until this process ends: what it asks for has happened. Python
    itself drops handlers as it ends, so a late signal would kill the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(*_: object) -> NoReturn:
    ignore_sigterm()
    raise StopRequestedError


def take_sigterm_as_request() -> None:
    """Note SIGTERM from now on instead of ending, and show that to the launcher, which starts ranks
    with the signal held back: one that came earlier counts, too."""
    signal.signal(signal.SIGTERM, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _note(*_: object) -> None:
    global _asked
    _asked = True
    show_request()


def agree(*, is_busy: bool) -> tuple[bool, bool]:
    """Whether any rank was asked to end, and whether any is busy; every rank calls this after the
    same step."""
    # Signals are taken before torch is imported.
    import torch
    import torch.distributed as dist

    told = torch.tensor([int(_asked), int(is_busy)])
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told[0]), bool(told[1])
