"""Runs functions once the process' main thread has ended, while other threads still run.

A training script calls nothing of ours at its end. So a separate thread joins the main thread, and
the interpreter joins that thread before it tears anything down.

A process that ends only because a peer failed waits there, too: whoever started both reports the
first one that ends, and keeps its exit code (torchrun, srun).
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


class AtEnd:
    """Calls its functions, last one first, once the main thread has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._calls: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._has_lost_peer = False
        self._end: BaseException | None = None
        self._is_end_known = False
        self._exit: SystemExit | None = None
        """The main thread's last unsuccessful `sys.exit` since the last step, if any."""

    def note(self, error: BaseException | None) -> None:
        """Note how the last step failed; None if another one has begun."""
        # Imported late: scripts are to import torch themselves.
        from rrfp.runtime.protocols import PeerLostError

        self._has_lost_peer = error is not None and (
            isinstance(error, PeerLostError) or is_torchs_loss(error)
        )
        self._exit = None  # The program caught it and trains on.

    def ended(self, error: BaseException | None) -> None:
        """Note how the process' program has ended, for whoever runs it: without an error, or with
        one, such as a SystemExit with its exit code."""
        self._end, self._is_end_known = error, True

    @property
    def end(self) -> BaseException | None:
        """The error that has ended the program, if one is known to have."""
        return self._end if self._is_end_known else next(_uncaught(), self._exit)

    def ending(self, rank: int) -> Ending | None:
        """How the program has ended on this rank; None if that is not known, as of one that nobody
        of ours runs and that ended well, or by a SystemExit of its own."""
        error = self.end
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
        """Whether this process ends only because a peer's has."""
        return self._has_lost_peer or any(map(is_torchs_loss, _uncaught()))

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` at the end. It must neither raise nor block without bound, nor start a
        thread, which Python 3.12 and newer refuse by then."""
        with self._lock:
            self._calls.append(function)
            if self._thread is None:
                self._note_exits()
                # Not a daemon, so that the interpreter joins it before it shuts down.
                self._thread = threading.Thread(target=self._wait, name="rrfp-at-end")
                self._thread.start()

    def _note_exits(self) -> None:
        """Wrap `sys.exit`, because Python does not keep the SystemExit that ends a program."""
        leave = sys.exit

        def noted_exit(status: Any = None, /) -> NoReturn:
            succeeds = status is None or (isinstance(status, int) and status == 0)
            if not succeeds and threading.current_thread() is threading.main_thread():
                self._exit = SystemExit(status)
            leave(status)

        sys.exit = noted_exit

    def _wait(self) -> None:
        threading.main_thread().join()
        self.run()
        if self.has_lost_peer:
            time.sleep(PEERS_END_S)

    def run(self) -> None:
        """Call the functions now, for a process that ends in another way."""
        with self._lock:
            calls, self._calls = self._calls[::-1], []
        for call in calls:
            try:
                call()
            except Exception:
                _log.exception("a function registered for the end of the process failed")


at_end = AtEnd()
"""This process' functions."""


def _uncaught() -> Iterator[BaseException]:
    """The error that has ended the main thread, if one has, and those that it followed from."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
