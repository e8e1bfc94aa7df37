"""Runs functions once the process' main thread has ended, while other threads still run.

A training script calls nothing of ours at its end. So a separate thread joins the main thread, and
the interpreter joins that thread before it tears anything down.
"""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class AtEnd:
    """Calls its functions, last one first, once the main thread has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._calls: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

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
