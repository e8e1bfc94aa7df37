"""Runs functions once the process' main thread has ended, while other threads still run.

A training script does not call rrfp at its end. So a separate thread joins the main thread, and the
interpreter joins that thread before it shuts down.

A process that ends only because a peer failed waits there: a launcher (torchrun, srun) reports the
process that ends first, and takes its exit code.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rrfp.errors import RrfpError, first_line, is_torchs_loss
from rrfp.trace.outcome import Ending, FaultOrigin, FoundBy, Outcome

PEERS_END_S = 15.0
"""How long a process waits for its launcher to end it after a peer has failed."""

_log = logging.getLogger(__name__)


class ExitHooks:
    """Functions to call, last one first, once the main thread has ended, and what is known about
    how the program ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._functions: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._has_lost_peer = False
        self._error: BaseException | None = None
        self._is_end_known = False
        self._exit: SystemExit | None = None
        """The main thread's last unsuccessful `sys.exit` since the last step, if any."""

    def note_step_error(self, error: BaseException | None) -> None:
        """Store whether the last step failed because of a lost peer (PeerLostError, or a broken
        connection in a collective of torch); None if another step begins. Also forgets a failing
        `sys.exit`."""
        # Imported late: scripts are to import torch themselves.
        from rrfp.runtime.protocols import PeerLostError

        self._has_lost_peer = error is not None and (
            isinstance(error, PeerLostError) or is_torchs_loss(error)
        )
        self._exit = None  # The program caught it and trains on.

    def note_program_end(self, error: BaseException | None) -> None:
        """Store how the program ended, for a caller that runs it: None without an error, or the
        exception, such as a SystemExit with its exit code."""
        self._error, self._is_end_known = error, True

    @property
    def program_error(self) -> BaseException | None:
        """The error that has ended the program: the one from `note_program_end` if that was called,
        or else the main thread's uncaught error, or else its last failing `sys.exit`; None without
        one."""
        return self._error if self._is_end_known else next(_uncaught(), self._exit)

    def make_ending(self, rank: int) -> Ending | None:
        """Describe how the program ended on this rank: finished, interrupted by Ctrl-C, or failed,
        with a sentence and the fault's origin: this rank or, if a peer was lost, what the error
        names or else a collective. None if neither `note_program_end` was called nor an error is
        known."""
        error = self.program_error
        if error is None and not self._is_end_known:
            return None
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return Ending(Outcome.FINISHED)
        if isinstance(error, KeyboardInterrupt):
            return Ending(Outcome.INTERRUPTED)
        if isinstance(error, SystemExit):
            code = error.code
            how = f"code {code:d}" if isinstance(code, int) else f"'{first_line(str(code)):.200}'"
            sentence = f"the script exited with {how}"
        elif isinstance(error, RrfpError):
            sentence = str(error)
        else:
            sentence = f"{type(error).__name__}: {error}"
        culprit = FaultOrigin(FoundBy.RANK, rank)
        if self.has_lost_peer:
            culprit = getattr(error, "culprit", FaultOrigin(FoundBy.COLLECTIVE))
        return Ending(Outcome.FAILED, first_line(sentence), culprit)

    @property
    def has_lost_peer(self) -> bool:
        """True if this process ends only because a peer has ended: by the error of its last step,
        or by a broken connection in a collective of torch among the uncaught error and its
        causes."""
        return self._has_lost_peer or any(map(is_torchs_loss, _uncaught()))

    def register(self, function: Callable[[], None]) -> None:
        """Add a function to call once the main thread has ended. It must neither raise nor block
        without bound, nor start a thread, which Python 3.12 and newer refuse by then. The first
        call wraps `sys.exit`, and starts the thread that waits."""
        with self._lock:
            self._functions.append(function)
            if self._thread is None:
                self._wrap_sys_exit()
                # Not a daemon, so that the interpreter joins it before it shuts down.
                self._thread = threading.Thread(target=self._wait, name="rrfp-at-end")
                self._thread.start()

    def _wrap_sys_exit(self) -> None:
        """Replace `sys.exit` by a function that also stores a failing exit of the main thread,
        because Python does not keep the SystemExit that ends a program."""
        leave = sys.exit

        def noted_exit(status: Any = None, /) -> NoReturn:
            succeeds = status is None or (isinstance(status, int) and status == 0)
            if not succeeds and threading.current_thread() is threading.main_thread():
                self._exit = SystemExit(status)
            leave(status)

        sys.exit = noted_exit

    def _wait(self) -> None:
        """Wait for the end of the main thread, and run the functions; then, if a peer was lost,
        sleep for 15 s (`PEERS_END_S`), so that the launcher sees that peer end first."""
        threading.main_thread().join()
        self.run()
        if self.has_lost_peer:
            time.sleep(PEERS_END_S)

    def run(self) -> None:
        """Call the functions now, last one first, and forget them, for a process that ends in
        another way. An exception is logged, and the other functions still run."""
        with self._lock:
            functions, self._functions = self._functions[::-1], []
        for function in functions:
            try:
                function()
            except Exception:
                _log.exception("a function registered for the end of the process failed")


at_end = ExitHooks()
"""The hooks of this process."""


def _uncaught() -> Iterator[BaseException]:
    """Yield the error that has ended the main thread (`sys.last_value`), if any, and then its
    causes."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
