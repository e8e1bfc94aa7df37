"""Bounds on a rank's activation memory: the tasks that they withhold, and why none deadlocks.

`limit` bounds D, the chunk-forwards minus the chunk-backwards run in this step (paper App. C).
Once D has reached it, a rank of one chunk runs only backwards. A rank of several chunks *drains*:
it finishes microbatches one by one in index order, each in the order F0..F(C-1), B(C-1)..B0, and
waits for each. The smallest unfinished microbatch of the whole pipeline can always go on, so no
limit deadlocks.

`hold` bounds the sum of the *sizes* of the activations in memory, from F until W (until B where B
is whole). A size is in bytes, or 1 for every microbatch and chunk where the hold counts
microbatches. With `used` the sum now, a forward of chunk c of microbatch m may start only while

    used + size(c, m) <= budget - reserve(c),

where reserve(c) is the sum, over the chunks deeper than c, of the largest size among the
microbatches whose forward has not run there yet. No budget of at least the sum, over all chunks, of
the largest size there deadlocks, whatever the order of the tasks:

1. *The sizes in use by chunks up to c never exceed budget - reserve(c).* A forward of a chunk j <=
   c left them at most budget - reserve(j), and reserve(j) >= reserve(c). Backwards and weight
   gradients only lower the sum (`ActivationSizes`: the bytes pending for W are part of the
   forward's), and reserves only shrink, because forwards leave the set that they are taken over.
2. *Something can always run.* Assume that no task runs and some are left. Weight gradients and
   backwards are never withheld, so every activation in memory waits for a gradient. Take the
   deepest stage s that has one, of microbatch m. Its backward lacks the gradient from stage s + 1
   (the last stage lacks none), so the backward of m has not run there, nor has its forward, as s +
   1 has nothing in memory. Its forward is ready, on chunk d of some rank. That rank has activations
   of chunks up to d - 1 only, at most budget - reserve(d - 1) by 1. As reserve(d - 1) is reserve(d)
   plus the largest size left in chunk d, this and every other ready forward of chunk d fits. If no
   stage has any, a first forward fits by the assumption about the budget.

The largest size left shrinks as heavy microbatches pass, which frees memory for shallower chunks. A
plain cap, without reserves, deadlocks: shallow chunks fill it and no backward can start. A light
forward does not overtake a heavy one of its chunk that does not fit: by 1 and 2 the heavy one fits
in the end, and simulated steps gain 1% at most (docs/memory.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.policy import Dispatch, Policy, format_bytes
from rrfp.schedule.ready_tracker import BACKWARD, FORWARD, WEIGHT_GRADIENT, ReadyTracker
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Value

# The activation sizes that a bound in bytes adds up.


Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class ActivationSizes(Value):
    """Bytes of activations by microbatch, in a row per stage (for one rank: per chunk).

    A dispatcher counts `activations` from an F until its B, and `pending_w` from the B until the W.
    If B is whole, or without `pending_w`, it counts all of them until the last task.
    """

    activations: Rows
    """In memory from F on."""
    pending_w: Rows | None = None
    """In memory from B until W, at most as much as `activations`. None: all of it."""

    def __post_init__(self) -> None:
        if any(size < 0 for row in self.activations for size in row):
            raise ValueError("a size is negative")
        if self.pending_w is not None and any(
            not 0 <= pending <= size
            for rows in zip(self.activations, self.pending_w, strict=True)
            for size, pending in zip(*rows, strict=True)
        ):
            raise ValueError("more bytes are pending for W than F left in memory")

    def of(self, stages: Sequence[int]) -> "ActivationSizes":
        """Return the sizes of these stages only: their rows, in this sequence."""
        pending = self.pending_w
        return ActivationSizes(
            [self.activations[stage] for stage in stages],
            None if pending is None else [pending[stage] for stage in stages],
        )

    def permuted(self, order: Sequence[int]) -> "ActivationSizes":
        """Return the sizes with reordered microbatches: number i is what `order[i]` was."""

        def rows(sizes: Rows) -> Rows:
            return [[row[microbatch] for microbatch in order] for row in sizes]

        return ActivationSizes(
            rows(self.activations), None if self.pending_w is None else rows(self.pending_w)
        )

    @property
    def least_budget(self) -> int:
        """The smallest budget in bytes with which a rank of these chunks cannot deadlock: the sum
        of the heaviest microbatch of each chunk."""
        return sum(max(row, default=0) for row in self.activations)


class Bounds:
    """Counts the activations that one rank holds, and decides which tasks its bound on memory
    (limit or hold) withholds.

    Kinds, rows and task numbers are those of `rrfp.schedule.ready_tracker`.
    """

    def __init__(
        self, shape: Shape, policy: Policy, sizes: ActivationSizes | None, budget: int | None
    ) -> None:
        """Start a step. `sizes` are those of this rank's chunks. A `budget` in bytes replaces the
        policy's hold, where it differs by rank. Raises UsageError for a budget that could
        deadlock."""
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
        """The most that may be in use if there is a budget: bytes, or slots of one chunk and one
        microbatch."""
        self._has_limit = binds and not self.has_budget and policy.limit is not None
        self._limit = policy.limit or 0
        self.depth = 0
        self.held = 0
        self.peak_held = 0
        self.held_bytes = 0
        self.peak_held_bytes = 0
        self.is_at_limit = False
        """Whether forwards are withheld (with several chunks the rank drains)."""
        self.drains = False
        """Whether only the next forward or backward of the smallest unfinished microbatch may
        run."""
        self._num_chunks, self._num_microbatches = shape.num_chunks, shape.num_microbatches
        # A step without backwards keeps no activations.
        self._keeps_activations = trains
        self._splits = shape.splits_backward
        self._frees_held = WEIGHT_GRADIENT if self._splits else BACKWARD
        self._sizes = sizes if trains else None
        # By microbatch: the number of its forwards and backwards that were dispatched.
        self._progress = [0] * shape.num_microbatches
        self._smallest_unfinished = 0
        if not self.has_budget:
            return
        self._needs = self._forward_needs(sizes)
        # By chunk: its microbatches, the heaviest last, without those whose forward was dispatched
        # while they were last.
        self._left = [sorted(range(len(row)), key=row.__getitem__) for row in self._needs]
        self._ran = [[False] * len(row) for row in self._needs]
        self._smallest = [min(row) for row in self._needs]
        self._reserves = [0] * shape.num_chunks
        self._update_reserves()

    def _forward_needs(self, sizes: ActivationSizes | None) -> list[list[int]]:
        """Return the part of the budget that each forward needs, by chunk and microbatch: its
        bytes, or 1 if the hold counts microbatches. For a hold in bytes, raises ValueError without
        sizes, and UsageError if the budget could deadlock."""
        if not self._counts_bytes:
            return [[1] * self._num_microbatches] * self._num_chunks
        if sizes is None:
            raise ValueError("a hold in bytes needs the sizes of the step's microbatches")
        if self.budget < sizes.least_budget:
            raise UsageError(
                f"the hold of {format_bytes(self.budget)} ({self.budget} bytes) is below the "
                f"{format_bytes(sizes.least_budget)} that the heaviest microbatches take on their "
                f"way through a rank's chunks; set it to {sizes.least_budget}B or more"
            )
        return [list(row) for row in sizes.activations]

    def count_dispatched(self, kind: int, chunk: int, microbatch: int) -> None:
        """Count a dispatched task in D (forwards minus backwards), in the activations and bytes
        held and in their peaks, and update what the bound withholds."""
        if kind == FORWARD:
            self.depth += 1
            if self._keeps_activations:
                self.held += 1
                if self.held > self.peak_held:
                    self.peak_held = self.held
            if self.has_budget:
                self._ran[chunk][microbatch] = True
                if self._left[chunk][-1] == microbatch:
                    self._update_reserves()
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

    def _count_bytes(self, sizes: ActivationSizes, kind: int, chunk: int, microbatch: int) -> None:
        """Update the activation bytes held, and their peak: F adds a microbatch's bytes, B frees
        those that are not pending for W, and W frees the rest. A whole B frees all."""
        size = sizes.activations[chunk][microbatch]
        pending = 0
        if self._splits:
            pending = size if sizes.pending_w is None else sizes.pending_w[chunk][microbatch]
        if kind == FORWARD:
            self.held_bytes += size
            if self.held_bytes > self.peak_held_bytes:
                self.peak_held_bytes = self.held_bytes
        else:
            self.held_bytes -= size - pending if kind == BACKWARD else pending

    def _update_reserves(self) -> None:
        """Recompute what each chunk must leave of the budget to deeper chunks: the sum of their
        heaviest microbatches whose forward has not run. Heaviest ones that ran are removed from the
        lists."""
        total = 0
        for chunk in range(self._num_chunks - 1, -1, -1):
            self._reserves[chunk] = total
            left, has_run = self._left[chunk], self._ran[chunk]
            while left and has_run[left[-1]]:
                left.pop()
            if left:
                total += self._needs[chunk][left[-1]]

    def next_to_drain(self) -> int:
        """Return the number of the next forward or backward of the smallest unfinished microbatch,
        after moving on past finished ones. A microbatch's tasks can only run in one order, as each
        needs the one before it. At least one microbatch must be unfinished."""
        num_chunks, num_microbatches = self._num_chunks, self._num_microbatches
        while self._progress[self._smallest_unfinished] == 2 * num_chunks:
            self._smallest_unfinished += 1
        progress = self._progress[self._smallest_unfinished]
        # Backwards run from the deepest chunk.
        place = progress if progress < num_chunks else 3 * num_chunks - 1 - progress
        return place * num_microbatches + self._smallest_unfinished

    @property
    def used(self) -> int:
        """The part of the budget in use now: bytes, or slots of one chunk and one microbatch."""
        return self.held_bytes if self._counts_bytes else self.held

    @property
    def withholds_forwards(self) -> bool:
        """True if `fits` may be false for a forward now: there is a budget, or D has reached the
        limit."""
        return self.has_budget or self.is_at_limit

    def fits(self, chunk: int, microbatch: int) -> bool:
        """True if the budget has room for this forward, beside the reserve for deeper chunks, or
        without a budget if D is below the limit. It ignores draining."""
        if not self.has_budget:
            return not self.is_at_limit
        return self._needs[chunk][microbatch] <= self._headroom(chunk)

    def _headroom(self, chunk: int) -> int:
        """Return the largest size with which a forward of this chunk may start: the budget minus
        what is in use and what is reserved for deeper chunks."""
        return self.budget - self.used - self._reserves[chunk]

    def permits(self, number: int) -> bool:
        """True if the bounds let the task of this number run: every weight gradient; while the rank
        drains, only the next task to drain; otherwise every backward, and forwards that fit."""
        if number >= 2 * self._num_chunks * self._num_microbatches:
            return True
        if self.drains:
            return number == self.next_to_drain()
        row, microbatch = divmod(number, self._num_microbatches)
        return row >= self._num_chunks or self.fits(row, microbatch)

    def count_permitted(
        self, tracker: ReadyTracker, counts: Sequence[int], mask: int
    ) -> tuple[int, int, int]:
        """Count the ready forwards, backwards and weight gradients that the bounds permit; return
        the three numbers. `counts` are the ready tasks by row at the members of `mask`. All of a
        chunk's forwards count if the best one fits, else none. While the rank drains, at most the
        next task to drain counts beside weight gradients."""
        num_chunks = self._num_chunks
        if num_chunks == 1:
            # The common case of the sums below, without building lists.
            forwards, backwards, weight_gradients = counts
        else:
            backwards = sum(counts[num_chunks : 2 * num_chunks])
            weight_gradients = sum(counts[2 * num_chunks :])
            if self.drains:
                number = self.next_to_drain()
                drains = int(tracker.is_ready(number, mask))
                is_forward = number < tracker.num_per_kind
                return drains * is_forward, drains * (not is_forward), weight_gradients
            forwards = sum(counts[:num_chunks])
        if forwards and self.withholds_forwards:
            forwards = 0
            for chunk in range(num_chunks):
                if counts[chunk] and self._best_forward_fits(tracker, chunk, mask):
                    forwards += counts[chunk]
        return forwards, backwards, weight_gradients

    def _best_forward_fits(self, tracker: ReadyTracker, chunk: int, mask: int) -> bool:
        """True if the best forward of a chunk, of those ready at all members of `mask`, fits. At
        least one must be ready."""
        if not self.has_budget:
            return not self.is_at_limit
        headroom, left = self._headroom(chunk), self._left[chunk]
        if not left or self._needs[chunk][left[-1]] <= headroom:
            return True
        if self._smallest[chunk] > headroom:
            return False
        return self.fits(chunk, tracker.best_ready_forward(chunk, mask) % self._num_microbatches)

    @property
    def cause(self) -> Cause:
        """The cause that a wait for a withheld task is recorded under: `HOLD` with a budget, else
        `LIMIT`."""
        return Cause.HOLD if self.has_budget else Cause.LIMIT
