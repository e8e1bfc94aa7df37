"""Deciding ahead: once, shortly before a task's expected end, and never outside of a task."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rrfp.runtime.agreement import AheadThread
from rrfp.runtime.protocols import monotonic
from rrfp.schedule.tasks import Kind

PATIENCE_S = 10.0
F, B = Kind.F, Kind.B


class Decisions:
    """Counts the calls, and lets a task wait for the next one."""

    def __init__(self, decide: Callable[[], None] = lambda: None) -> None:
        self._decide = decide
        self.came = threading.Event()
        self.came_ns = 0
        self.num = 0

    def __call__(self) -> None:
        self.num += 1
        self.came_ns = monotonic()
        self.came.set()
        self._decide()


@contextmanager
def ahead_thread(decide: Callable[[], None]) -> Iterator[AheadThread]:
    before = set(threading.enumerate())
    ahead = AheadThread(decide, monotonic)
    ahead.start()
    try:
        yield ahead
    finally:
        ahead.close()
        assert set(threading.enumerate()) <= before


def run(ahead: AheadThread, seconds: float, kind: Kind = F, chunk: int = 0) -> None:
    with ahead.while_running(kind, chunk):
        time.sleep(seconds)


def test_it_decides_before_the_expected_end_and_once_a_task() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.1)
        assert decisions.num == 0, "there was no estimate yet"
        for num_decided in (1, 2):
            decisions.came.clear()
            with ahead.while_running(F, 0):
                start_ns = monotonic()
                assert decisions.came.wait(PATIENCE_S)
                # The lead is 1 ms; a busy machine may add to it, but not all of the task.
                assert decisions.came_ns - start_ns > 50_000_000, "too early"
                time.sleep(0.05)
            assert decisions.num == num_decided


def test_estimates_are_of_a_kind_and_a_chunk() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.0)
        run(ahead, 0.05, B)
        run(ahead, 0.05, F, 1)
        assert decisions.num == 0


def test_the_estimate_follows_slowly() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.2)
        for _ in range(10):
            run(ahead, 0.0)
        with ahead.while_running(F, 0):
            start_ns = monotonic()
            assert decisions.came.wait(PATIENCE_S)
            # 0.9 ** 10 of 0.2 s.
            assert decisions.came_ns - start_ns > 50_000_000


def test_a_task_that_ends_early_is_not_decided_for() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.1)
        run(ahead, 0.0)
        time.sleep(0.15)
        assert decisions.num == 0


def test_a_task_does_not_end_while_it_is_decided_for() -> None:
    is_deciding = threading.Event()

    def decide_slowly() -> None:
        is_deciding.set()
        time.sleep(0.1)
        is_deciding.clear()

    decisions = Decisions(decide_slowly)
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.01)
        with ahead.while_running(F, 0):
            assert is_deciding.wait(PATIENCE_S)
        assert not is_deciding.is_set()


def test_a_failure_comes_out_at_the_end_of_the_task() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    decisions = Decisions(fail)
    with ahead_thread(decisions) as ahead:
        run(ahead, 0.01)
        with pytest.raises(ZeroDivisionError):
            run(ahead, 0.1)
    assert decisions.num == 1


def test_what_the_task_raises_comes_first() -> None:
    decisions = Decisions()
    with ahead_thread(decisions) as ahead:
        with pytest.raises(KeyError), ahead.while_running(F, 0):
            raise KeyError
        run(ahead, 0.01)
        assert decisions.num == 0, "a task that failed is no estimate"
