"""Ctrl-C: the first one ends the command, and those that follow do not disturb its end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def take_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt once, and have no effect from then on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _tell_unraisable


def give_interrupts_back() -> None:
    """Let SIGINT do what Python has it do, for code that is not ours."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt once more, for work that may take long after the first."""
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # It came amid a destructor and is lost, so the next one counts.
        signal.signal(signal.SIGINT, _interrupt)
    else:
        sys.__unraisablehook__(unraisable)
