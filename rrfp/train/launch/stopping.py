"""SIGTERM as a request to stop: ranks end together after the current step. Before the first step
they end at once, and so does a launcher that has no ranks yet."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rrfp.train.launch.rank_status import show_request

_asked = False


class StopRequestedError(BaseException):
    """SIGTERM arrived before any rank had begun a step. A BaseException, like KeyboardInterrupt."""


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """Raise StopRequestedError at the first SIGTERM in this block, unless the signal is ignored.
    While ranks run, their launcher forwards it instead (`rrfp.train.launch.processes`). Must run on
    the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def ignoring_sigterm_on_failure() -> Iterator[None]:
    """If the block raises an Exception, ignore later SIGTERMs that `stopping_on_sigterm` would
    handle: as a request to stop, one would turn the failure into a success."""
    try:
        yield
    except Exception:
        if signal.getsignal(signal.SIGTERM) is _stop:
            ignore_sigterm()
        raise


def ignore_sigterm() -> None:
    """Ignore SIGTERM until this process ends. Python drops handlers as it ends, so a late signal
    would otherwise kill the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(*_: object) -> NoReturn:
    """Handle a SIGTERM: ignore later ones and raise StopRequestedError."""
    ignore_sigterm()
    raise StopRequestedError


def take_sigterm_as_request() -> None:
    """From now on record SIGTERM instead of ending, also on the status page, and unblock it. The
    launcher starts ranks with the signal blocked, so one that arrived earlier counts too."""
    signal.signal(signal.SIGTERM, _record)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _record(*_: object) -> None:
    """Handle a SIGTERM: record the request to stop, also on the status page."""
    global _asked
    _asked = True
    show_request()


def agree_on_stop(*, is_busy: bool) -> tuple[bool, bool]:
    """All-reduce two flags and return them: has any rank received SIGTERM as a request to stop, and
    is any rank busy? Every rank calls this after the same step."""
    # A rank handles signals before it imports torch.
    import torch
    import torch.distributed as dist

    flags = torch.tensor([int(_asked), int(is_busy)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags[0]), bool(flags[1])
