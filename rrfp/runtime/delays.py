"""Random delays injected into tasks and messages, to show that a result does not depend on them."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of one rank, uniform between 0 and `longest_s` and reproducible by seed."""

    seed: int
    rank: int
    longest_s: float

    def draws(self, name: str) -> Callable[[], float]:
        """A function that draws the next delay of this stream, in seconds. Give each thread its own
        stream, so that its sequence does not depend on other threads."""
        source = random.Random(f"{self.seed}/{self.rank}/{name}")
        return lambda: source.uniform(0.0, self.longest_s)

    def stream(self, name: str) -> Callable[[], None]:
        """A function that sleeps for the next delay of this stream."""
        draw = self.draws(name)
        return lambda: time.sleep(draw())
