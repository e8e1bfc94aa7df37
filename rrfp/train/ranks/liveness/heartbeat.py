"""A rank's own part: it shows its launcher that it lives, and ends when its launcher is gone."""

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.train import libc
from rrfp.train.ranks.liveness.page import StatusPage, Waits
from rrfp.train.ranks.liveness.stack import frames_of, standing_at, waits_of

BEAT_S = 1.0
STACK_SIGNAL = signal.SIGUSR2
"""On which a rank writes the stacks of its threads to the file that its launcher gave it, even
while no thread of it can run Python. It interrupts a sleep, so only a rank that is then killed gets
it."""

_PR_SET_PDEATHSIG = 1

_page: StatusPage | None = None


def end_with_launcher() -> None:
    """Have the kernel kill this process when its launcher ends, even while it is stopped. Called as
    early as can be."""
    with suppress(OSError):  # the thread that beats looks for it, too
        libc.call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before.
    if os.getppid() != _launcher():
        os._exit(RrfpError.exit_code)


def show_life(*, waits_on_device: bool) -> None:
    """Beat from now on, in a thread that ends with the process, so also while that closes. With
    `waits_on_device` this process waits for a device without a sign of it in its stack."""
    global _page
    told = os.environ.pop(variables.LIVENESS, None)
    stacks = -1
    if told is not None:
        page, stacks = map(int, told.split(","))
        _page = StatusPage(page)
        os.close(page)
        os.set_inheritable(stacks, False)
        faulthandler.register(STACK_SIGNAL, stacks)
    arguments = (_page, stacks, threading.main_thread().ident, _launcher(), waits_on_device)
    threading.Thread(target=_beat, args=arguments, name="rrfp-beat", daemon=True).start()


def enter(stage: str) -> None:
    """Note what this rank does from now on: `in step 7`."""
    if _page is not None:
        _page.enter(stage)


def finish() -> None:
    """Note that this rank has done all its work and left its groups: whatever its exit code, a rank
    that ends without this note has failed."""
    if _page is not None:
        _page.finish()


def show_request() -> None:
    """Note that this rank was asked to end."""
    if _page is not None:
        _page.ask_to_end()


def _beat(
    page: StatusPage | None, stacks: int, main_thread: int, launcher: int, waits_on_device: bool
) -> NoReturn:
    while os.getppid() == launcher:
        if page is not None:
            frames = [*frames_of(sys._current_frames().get(main_thread))]
            waits = waits_of(frames)
            if waits_on_device and waits is Waits.NOTHING:
                waits = Waits.PERHAPS
            page.beat(waits, standing_at(frames))
            if page.wants_stacks:
                page.ask_for_stacks(wanted=False)
                faulthandler.dump_traceback(stacks)
        time.sleep(BEAT_S)
    # Where the kernel does not do it.
    os._exit(RrfpError.exit_code)


def _launcher() -> int:
    return int(os.environ[variables.LAUNCHER])
