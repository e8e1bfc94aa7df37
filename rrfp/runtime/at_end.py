"""What is done once the process' main thread has ended, while its other threads still run.

A training script calls nothing of ours when it is over. So a thread of its own waits for the main
thread, and the interpreter waits for that thread before it takes anything down.
"""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class AtEnd:
    """Calls what it was given, the last first, once the main thread has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._calls: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` at the end. It must not raise, nor wait without bound."""
        with self._lock:
            self._calls.append(function)
            if self._thread is None:
                # No daemon: the interpreter joins it before it goes on to its own end.
                self._thread = threading.Thread(target=self._wait, name="rrfp-at-end")
                self._thread.start()

    def _wait(self) -> None:
        threading.main_thread().join()
        self.run()

    def run(self) -> None:
        """Do it now, for a process that ends otherwise."""
        with self._lock:
            calls, self._calls = self._calls[::-1], []
        for call in calls:
            try:
                call()
            except Exception:
                _log.exception("what was to be done at the end failed")


at_end = AtEnd()
"""That of this process."""
