"""What the tasks of a step keep in memory: the sizes that a bound in bytes adds up."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.schedule.values import Value

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Sizes(Value):
    """Bytes of activations, a row per stage (or, of one rank, per chunk) with an entry per
    microbatch.

    A dispatcher counts `kept` from the F until its B, and from the B until the W what is `owed` to
    W; where B is whole, or nothing is said of W, all of it until the last task frees it.
    """

    kept: Rows
    """From F on."""
    owed: Rows | None = None
    """From B until W, at most what was kept; None: all that was kept."""

    def __post_init__(self) -> None:
        if any(size < 0 for row in self.kept for size in row):
            raise ValueError("a size is negative")
        if self.owed is not None and any(
            not 0 <= owed <= kept
            for rows in zip(self.kept, self.owed, strict=True)
            for kept, owed in zip(*rows, strict=True)
        ):
            raise ValueError("what is owed to W is more than what was kept")

    def of(self, stages: Sequence[int]) -> "Sizes":
        """The rows of these stages."""
        owed = self.owed
        return Sizes(
            [self.kept[stage] for stage in stages],
            None if owed is None else [owed[stage] for stage in stages],
        )

    def permuted(self, order: Sequence[int]) -> "Sizes":
        """The same step with microbatch `order[i]` admitted as number i."""

        def rows(sizes: Rows) -> Rows:
            return [[row[microbatch] for microbatch in order] for row in sizes]

        return Sizes(rows(self.kept), None if self.owed is None else rows(self.owed))

    @property
    def least_budget(self) -> int:
        """The least budget in bytes with which a rank of these chunks never gets stuck: the
        heaviest microbatch of each chunk at once."""
        return sum(max(row, default=0) for row in self.kept)
