"""Bounds on what a rank keeps in memory: which tasks they withhold, and why that never deadlocks.

`limit` bounds D, the chunk-forwards minus the chunk-backwards run in this step (paper App. C).
Once D has reached it, a rank of one chunk runs only backwards. A rank of several chunks *drains*:
it finishes microbatches one by one in index order, each in the order F0..F(C-1), B(C-1)..B0, and
waits for each. The smallest unfinished microbatch of the whole pipeline can always go on, so no
limit deadlocks.

`hold` bounds the sum of the *sizes* of the activations kept, from F until W (until B where B is
whole). A size is in bytes, or 1 for every microbatch and chunk where the hold counts microbatches.
With `used` the sum now, a forward of chunk c of microbatch m may start only while

    used + size(c, m) <= budget - reserve(c),

where reserve(c) is the sum, over the chunks deeper than c, of the largest size among the
microbatches whose forward has not run there yet. No budget of at least the sum, over all chunks, of
the largest size there deadlocks, whatever the order of the tasks:

1. *The sizes kept by chunks up to c never exceed budget - reserve(c).* A forward of a chunk j <= c
   left them at most budget - reserve(j), and reserve(j) >= reserve(c). Backwards and weight
   gradients only lower the sum (`Sizes`: what is owed to W is part of what was kept), and reserves
   only shrink, because forwards leave the set that they are taken over.
2. *Something can always run.* Assume that no task runs and some are left. Weight gradients and
   backwards are never withheld, so every kept activation waits for a gradient. Take the deepest
   stage s that keeps one, of microbatch m. Its backward lacks the gradient from stage s + 1 (the
   last stage lacks none), so the backward of m has not run there, nor has its forward, as s + 1
   keeps nothing. Its forward is ready, on chunk d of some rank. That rank keeps activations of
   chunks up to d - 1 only, at most budget - reserve(d - 1) by 1. As reserve(d - 1) is reserve(d)
   plus the largest size left in chunk d, this and every other ready forward of chunk d fits. If
   no stage keeps anything, a first forward fits by the assumption about the budget.

The largest size left shrinks as heavy microbatches pass, and gives its memory back to shallower
chunks. A plain cap, without reserves, deadlocks: shallow chunks fill it and no backward can start.
A light forward does not overtake a heavy one of its chunk that does not fit: by 1 and 2 the heavy
one fits in the end, and simulated steps gain 1% at most (docs/memory.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.knobs import told_bytes
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.ready_tracker import BACKWARD, FORWARD, WEIGHT_GRADIENT, Books
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Value

# What the tasks of a step keep in memory: the sizes that a bound in bytes adds up.


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


class Bounds:
    """What one rank holds, and what its bound currently withholds. Kinds and task numbers are those
    of `rrfp.schedule.ready_tracker`."""

    def __init__(
        self, shape: Shape, policy: Policy, sizes: Sizes | None, budget: int | None
    ) -> None:
        """`sizes` are those of this rank's chunks. A `budget` in bytes stands in for the policy's
        hold, where it differs by rank. Raises UsageError for a budget that could deadlock."""
        trains = Kind.B in shape.kinds
        # A binding order was checked against its bounds when it was chosen.
        binds = trains and policy.dispatch is Dispatch.READY
        if budget is None:
            budget = policy.hold_bytes
        self._counts_bytes = budget is not None
        if budget is None:
            budget = policy.hold_slots(shape.num_chunks)
        self.has_budget = binds and budget is not None
        self.budget = budget or 0
        """The most that may be in use, in slots of one chunk and one microbatch, or in bytes, if
        there is a budget."""
        self._has_limit = binds and not self.has_budget and policy.limit is not None
        self._limit = policy.limit or 0
        self.depth = 0
        self.held = 0
        self.peak_held = 0
        self.held_bytes = 0
        self.peak_held_bytes = 0
        self.is_at_limit = False
        """Forwards are withheld (with several chunks the rank drains)."""
        self.drains = False
        """Of all forwards and backwards, only the next one of the smallest unfinished microbatch
        may run."""
        self._num_chunks, self._num_microbatches = shape.num_chunks, shape.num_microbatches
        # A step without backwards keeps nothing.
        self._keeps_activations = trains
        self._splits = shape.splits_backward
        self._frees_held = WEIGHT_GRADIENT if self._splits else BACKWARD
        self._sizes = sizes if trains else None
        # By microbatch: how many of its forwards and backwards were dispatched.
        self._progress = [0] * shape.num_microbatches
        self._smallest_unfinished = 0
        if not self.has_budget:
            return
        self._needs = self._rows_of(sizes)
        # By chunk: its microbatches, the heaviest last, without those whose forward was dispatched
        # while they were last.
        self._left = [sorted(range(len(row)), key=row.__getitem__) for row in self._needs]
        self._ran = [[False] * len(row) for row in self._needs]
        self._smallest = [min(row) for row in self._needs]
        self._reserves = [0] * shape.num_chunks
        self._reserve()

    def _rows_of(self, sizes: Sizes | None) -> list[list[int]]:
        """What each forward needs of the budget, by chunk and microbatch."""
        if not self._counts_bytes:
            return [[1] * self._num_microbatches] * self._num_chunks
        if sizes is None:
            raise ValueError("a hold in bytes needs the sizes of the step's microbatches")
        if self.budget < sizes.least_budget:
            raise UsageError(
                f"the hold of {told_bytes(self.budget)} ({self.budget} bytes) is below the "
                f"{told_bytes(sizes.least_budget)} that the heaviest microbatches take on their "
                f"way through a rank's chunks; set it to {sizes.least_budget}B or more"
            )
        return [list(row) for row in sizes.kept]

    def ran(self, kind: int, chunk: int, microbatch: int) -> None:
        """Count a dispatched task, and update what is withheld."""
        if kind == FORWARD:
            self.depth += 1
            if self._keeps_activations:
                self.held += 1
                if self.held > self.peak_held:
                    self.peak_held = self.held
            if self.has_budget:
                self._ran[chunk][microbatch] = True
                if self._left[chunk][-1] == microbatch:
                    self._reserve()
        elif kind == BACKWARD:
            self.depth -= 1
        if kind == self._frees_held:
            self.held -= 1
        if self._sizes is not None:
            self._count_bytes(self._sizes, kind, chunk, microbatch)
        if self._has_limit and kind != WEIGHT_GRADIENT:
            self._progress[microbatch] += 1
            self.is_at_limit = self.depth >= self._limit
            self.drains = self.is_at_limit and self._num_chunks > 1

    def _count_bytes(self, sizes: Sizes, kind: int, chunk: int, microbatch: int) -> None:
        size = sizes.kept[chunk][microbatch]
        owed = 0
        if self._splits:
            owed = size if sizes.owed is None else sizes.owed[chunk][microbatch]
        if kind == FORWARD:
            self.held_bytes += size
            if self.held_bytes > self.peak_held_bytes:
                self.peak_held_bytes = self.held_bytes
        else:
            self.held_bytes -= size - owed if kind == BACKWARD else owed

    def _reserve(self) -> None:
        """Set what each chunk must leave to deeper ones, from the heaviest left in each."""
        total = 0
        for chunk in range(self._num_chunks - 1, -1, -1):
            self._reserves[chunk] = total
            left, has_run = self._left[chunk], self._ran[chunk]
            while left and has_run[left[-1]]:
                left.pop()
            if left:
                total += self._needs[chunk][left[-1]]

    def next_to_drain(self) -> int:
        """The number of the next task of the smallest unfinished microbatch. A microbatch's tasks
        can only run in one order, as each needs the one before it."""
        num_chunks, num_microbatches = self._num_chunks, self._num_microbatches
        while self._progress[self._smallest_unfinished] == 2 * num_chunks:
            self._smallest_unfinished += 1
        progress = self._progress[self._smallest_unfinished]
        # Backwards run from the deepest chunk.
        place = progress if progress < num_chunks else 3 * num_chunks - 1 - progress
        return place * num_microbatches + self._smallest_unfinished

    @property
    def used(self) -> int:
        """What counts against the budget, in its unit."""
        return self.held_bytes if self._counts_bytes else self.held

    @property
    def withholds_forwards(self) -> bool:
        """Whether `fits` may be false for a forward now."""
        return self.has_budget or self.is_at_limit

    def fits(self, chunk: int, microbatch: int) -> bool:
        """Whether the bounds let this forward start, unless the rank drains."""
        if not self.has_budget:
            return not self.is_at_limit
        return self._needs[chunk][microbatch] <= self._room(chunk)

    def _room(self, chunk: int) -> int:
        """The largest size with which a forward of this chunk may start."""
        return self.budget - self.used - self._reserves[chunk]

    def permits(self, number: int) -> bool:
        """Whether the bounds let the task of this number run."""
        if number >= 2 * self._num_chunks * self._num_microbatches:
            return True
        if self.drains:
            return number == self.next_to_drain()
        lane, microbatch = divmod(number, self._num_microbatches)
        return lane >= self._num_chunks or self.fits(lane, microbatch)

    def permitted(self, books: Books, counts: Sequence[int], mask: int) -> tuple[int, int, int]:
        """How many forwards, backwards and weight gradients the bounds permit, of `counts` by lane
        taken at the members of `mask`. Of a chunk's forwards, none is permitted before the best."""
        num_chunks = self._num_chunks
        if num_chunks == 1:
            # The common case of the sums below, without building lists.
            forwards, backwards, weight_gradients = counts
        else:
            backwards = sum(counts[num_chunks : 2 * num_chunks])
            weight_gradients = sum(counts[2 * num_chunks :])
            if self.drains:
                number = self.next_to_drain()
                drains = int(books.is_ready(number, mask))
                is_forward = number < books.num_of_a_kind
                return drains * is_forward, drains * (not is_forward), weight_gradients
            forwards = sum(counts[:num_chunks])
        if forwards and self.withholds_forwards:
            forwards = 0
            for chunk in range(num_chunks):
                if counts[chunk] and self._is_open(books, chunk, mask):
                    forwards += counts[chunk]
        return forwards, backwards, weight_gradients

    def _is_open(self, books: Books, chunk: int, mask: int) -> bool:
        """Whether the best of a chunk's forwards that are ready at `mask` fits."""
        if not self.has_budget:
            return not self.is_at_limit
        room, left = self._room(chunk), self._left[chunk]
        if not left or self._needs[chunk][left[-1]] <= room:
            return True
        if self._smallest[chunk] > room:
            return False
        return self.fits(chunk, books.best_forward(chunk, mask) % self._num_microbatches)

    @property
    def cause(self) -> Cause:
        """The cause of a wait for what is withheld."""
        return Cause.HOLD if self.has_budget else Cause.LIMIT
