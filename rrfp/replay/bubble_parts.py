"""The two parts of a bubble: what the schedule leaves, and what jitter adds.

They stand apart from the replay that finds them, so that who only prints them need not load the
simulator.
"""

from dataclasses import dataclass

_LEAST_EXCESS = 0.005
"""A smaller excess is not worth a word."""


@dataclass(frozen=True, slots=True)
class BubbleParts:
    """Idle time as a share of the measured time; the parts sum to the whole."""

    structural: float
    excess: float

    @property
    def fraction(self) -> float:
        return self.structural + self.excess

    @property
    def told(self) -> str:
        """In two sentences."""
        jitter = f"{'added' if self.excess > 0 else 'took off'} {abs(self.excess):.0%}"
        if abs(self.excess) < _LEAST_EXCESS:
            jitter = "changed nothing"
        return (
            f"{self.fraction:.0%} of the ranks' time was bubble. Tasks at their mean times would "
            f"have left {self.structural:.0%}; jitter {jitter}."
        )

    def as_json(self) -> dict[str, float]:
        return {
            "fraction": self.fraction,
            "structural": self.structural,
            "excess": self.excess,
        }
