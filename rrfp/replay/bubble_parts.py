"""The two parts of a bubble: what the schedule leaves, and what jitter adds.

They stand apart from the replay that finds them, so that who only prints them need not load the
simulator.
"""

from dataclasses import dataclass


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
        """In two sentences, whose whole percents add up."""
        whole, structural = (round(100 * part) for part in (self.fraction, self.structural))
        excess = whole - structural
        jitter = f"{'added' if excess > 0 else 'took off'} {abs(excess)}%"
        return (
            f"{whole}% of the ranks' time was bubble. Tasks at their mean times would have left "
            f"{structural}%; jitter {jitter if excess else 'changed nothing'}."
        )

    def as_json(self) -> dict[str, float]:
        return {
            "fraction": self.fraction,
            "structural": self.structural,
            "excess": self.excess,
        }
