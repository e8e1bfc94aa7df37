"""Random delays injected into tasks and messages, to show that a result does not depend on them."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of one rank: each uniform between 0 and `longest_s`, and the same in every run with
    the same seed."""

    seed: int
    rank: int
    longest_s: float

    def stream(self, name: str) -> Callable[[], None]:
        """A function that sleeps for the next delay of this stream. One thread a stream, so that
        its sequence does not depend on other threads."""
        draws = random.Random(f"{self.seed}/{self.rank}/{name}")

        def delay() -> None:
            time.sleep(draws.uniform(0.0, self.longest_s))

        return delay
