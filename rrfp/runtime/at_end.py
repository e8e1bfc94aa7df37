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

from rrfp.errors import is_torchs_loss

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

    def note(self, error: BaseException | None) -> None:
        """Note how the last step failed; None if another one has begun."""
        # Imported late: scripts are to import torch themselves.
        from rrfp.runtime.protocols import PeerLostError

        self._has_lost_peer = error is not None and (
            isinstance(error, PeerLostError) or is_torchs_loss(error)
        )

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` at the end. It must neither raise nor block without bound, nor start a
        thread, which Python 3.12 and newer refuse by then."""
        with self._lock:
            self._calls.append(function)
            if self._thread is None:
                # Not a daemon, so that the interpreter joins it before it shuts down.
                self._thread = threading.Thread(target=self._wait, name="rrfp-at-end")
                self._thread.start()

    def _wait(self) -> None:
        threading.main_thread().join()
        self.run()
        if self._has_lost_peer or any(map(is_torchs_loss, _uncaught())):
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
