"""Ranks of one process on a `MemoryNetwork`: whole workers in virtual time, in milliseconds.

Each rank has a thread, for a worker's loop is a function that waits. One of them runs at a time,
until it waits; then time goes on to what comes next, and the network's seed says who runs first of
those that can. So a run is the same each time, and a stall of seconds costs none.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rrfp.runtime.protocols import Event, Inbox
from rrfp.trace.records import NS_PER_S
from tests.doubles.memory_transport import MemoryNetwork

T = TypeVar("T")


@dataclass(slots=True)
class _Wait:
    """Of a rank that does not run: until when, unless something comes before."""

    until_ns: int
    has_come: Callable[[], bool]


class MemoryRanks(Generic[T]):
    """Runs one function a rank."""

    def __init__(self, network: MemoryNetwork, num_ranks: int, seed: int = 0) -> None:
        self.network = network
        self.inboxes = [MemoryInbox(partial(self.wait, rank)) for rank in range(num_ranks)]
        self._draws = random.Random(seed)
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ended = threading.Semaphore(0)
        self._waits: dict[int, _Wait] = {}
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []

    def run(self, target: Callable[[int], T]) -> list[T]:
        """What `target(rank)` gives on each rank; raises what the first of them raised."""
        ranks = range(len(self._turns))
        threads = [threading.Thread(target=self._run, args=(rank, target)) for rank in ranks]
        for rank, thread in enumerate(threads):
            self._waits[rank] = _Wait(0, lambda: False)
            thread.start()
        self._pass_on()
        self._ended.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [self._results[rank] for rank in ranks]

    def sleep(self, rank: int, duration_ns: int) -> None:
        """Let so much time pass on this rank's compute thread."""
        self.wait(rank, duration_ns, lambda: False)

    def wait(self, rank: int, most_ns: int, has_come: Callable[[], bool]) -> None:
        """Wait at most so long until something has come."""
        self._waits[rank] = _Wait(self.network.now_ns + most_ns, has_come)
        self._pass_on()
        self._turns[rank].acquire()

    def _run(self, rank: int, target: Callable[[int], T]) -> None:
        self._turns[rank].acquire()
        try:
            self._results[rank] = target(rank)
        except BaseException as error:
            self._errors.append(error)
        self._pass_on()

    def _pass_on(self) -> None:
        """Let time pass until a rank can go on, and let it."""
        if not self._waits:
            self._ended.release()
            return
        while not (able := self._able()):
            self.network.step(min(wait.until_ns for wait in self._waits.values()))
        rank = self._draws.choice(able)
        del self._waits[rank]
        self._turns[rank].release()

    def _able(self) -> list[int]:
        now_ns = self.network.now_ns
        return [
            rank for rank, wait in self._waits.items() if wait.until_ns <= now_ns or wait.has_come()
        ]


class MemoryInbox(Inbox):
    """An inbox whose rank waits in virtual time."""

    def __init__(self, wait: Callable[[int, Callable[[], bool]], None]) -> None:
        super().__init__()
        self._wait = wait

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        if timeout_s > 0 and not self._events:
            self._wait(round(timeout_s * NS_PER_S), lambda: bool(self._events))
        return super().take()
