"""Decides on the next task while one runs, so that a group's members need not wait for a round.

Only the leader of a group does this. Deciding late takes into account what arrives until then;
deciding before the task ends hides the time that the decision travels. So a separate thread sleeps
until shortly before the task's expected end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread

from rrfp.runtime.protocols import Clock
from rrfp.schedule.patience.punctuality import Durations
from rrfp.schedule.tasks import Kind

_LONGEST_LEAD_NS = 1_000_000


class AheadThread:
    """Calls `decide` once, shortly before the running task is expected to end.

    `decide` runs on this thread, and only within `while_running`: the state that it touches belongs
    to the compute thread at all other times.
    """

    def __init__(self, decide: Callable[[], None], clock: Clock) -> None:
        self._decide = decide
        self._clock = clock
        self._durations = Durations()
        # Held while `decide` runs, and by the compute thread at a task's start and end.
        self._condition = Condition()
        self._due_ns: float | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="rrfp-ahead", daemon=True)

    def start(self) -> None:
        """Start the thread; `close` ends it."""
        self._thread.start()

    @contextmanager
    def while_running(self, kind: Kind, chunk: int) -> Iterator[None]:
        """Wrap the running of a task. Raises what `decide` raised, after the task has succeeded."""
        start_ns = self._clock()
        expected_ns = self._durations.expected_ns(kind, chunk)
        if expected_ns is not None:
            lead_ns = min(_LONGEST_LEAD_NS, expected_ns / 2)
            with self._condition:
                self._due_ns = start_ns + expected_ns - lead_ns
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:
                self._due_ns = None
        if self._failure is not None:
            raise self._failure
        self._durations.took(kind, chunk, self._clock() - start_ns)

    def close(self) -> None:
        """End the thread. Call it between two tasks."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._is_closed:
                if self._due_ns is None:
                    self._condition.wait()
                    continue
                early_ns = self._due_ns - self._clock()
                if early_ns > 0:
                    self._condition.wait(early_ns / 1e9)
                    continue
                self._due_ns = None
                try:
                    self._decide()
                except BaseException as error:  # reraised on the compute thread
                    self._failure = error
                    return
