"""SIGTERM as a request: a rank ends after the step under way, together with all others."""

import signal

_asked = False


def take_sigterm_as_request() -> None:
    """Note SIGTERM from now on instead of ending. The launcher starts ranks with the signal held
    back, so that one that came earlier counts, too."""
    signal.signal(signal.SIGTERM, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _note(*_: object) -> None:
    global _asked
    _asked = True


def agree(*, is_busy: bool) -> tuple[bool, bool]:
    """Whether any rank was asked to end, and whether any is busy; every rank calls this after the
    same step."""
    # Signals are taken before torch is imported.
    import torch
    import torch.distributed as dist

    told = torch.tensor([int(_asked), int(is_busy)])
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told[0]), bool(told[1])
