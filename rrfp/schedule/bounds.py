"""Bounds on what a rank keeps in memory: which tasks they withhold, and why that never deadlocks.

`limit` bounds D, the chunk-forwards minus the chunk-backwards run in this step (paper App. C).
Once D has reached it, a rank of one chunk runs only backwards. A rank of several chunks *drains*:
it finishes microbatches one by one in index order, each in the order F0..F(C-1), B(C-1)..B0, and
waits for each. The smallest unfinished microbatch of the whole pipeline can always go on, so no
limit deadlocks.

`hold` bounds the slots in use: activations kept from F until W (until B where B is whole). A
forward of chunk c may start only while fewer than hold - (C - 1 - c) slots are in use: deeper
chunks have slots reserved. Slots used by chunks up to c then never exceed hold - (C - 1 - c), so
the successor of the deepest stage that holds an activation is permitted, and no hold of C slots or
more deadlocks. A plain cap would: shallow chunks would fill it and no backward could start.
"""

from rrfp.schedule.causes import Cause
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind

_F, _B, _W = range(3)


class Bounds:
    """What one rank holds, and what its bound currently withholds. Kinds and task numbers are those
    of `rrfp.schedule.books`."""

    def __init__(self, shape: Shape, policy: Policy) -> None:
        trains = Kind.B in shape.kinds
        # A binding order was checked against its bounds when it was chosen.
        binds = trains and policy.dispatch is Dispatch.READY
        self.limit = policy.limit if binds else None
        self.hold = policy.hold_slots(shape.num_chunks) if binds else None
        self.depth = 0
        self.held = 0
        self.peak_held = 0
        self.drains = False
        """Of all forwards and backwards, only the next one of the smallest unfinished microbatch
        may run."""
        self.first_open_chunk = 0
        """Forwards of smaller chunks are withheld."""
        self._num_chunks, self._num_microbatches = shape.num_chunks, shape.num_microbatches
        # A step without backwards keeps nothing.
        self._keeps_activations = trains
        self._frees_held = _W if shape.splits_backward else _B
        # By microbatch: how many of its forwards and backwards were dispatched.
        self._progress = [0] * shape.num_microbatches
        self._smallest_unfinished = 0

    def ran(self, kind: int, microbatch: int) -> None:
        """Count a dispatched task, and update what is withheld."""
        if kind != _W:
            self._progress[microbatch] += 1
        if kind == _F:
            self.depth += 1
            self.held += self._keeps_activations
            if self.held > self.peak_held:
                self.peak_held = self.held
        elif kind == _B:
            self.depth -= 1
        if kind == self._frees_held:
            self.held -= 1
        num_chunks = self._num_chunks
        if self.hold is not None:
            self.first_open_chunk = max(0, num_chunks - (self.hold - self.held))
        elif self.limit is not None:
            is_at_limit = self.depth >= self.limit
            self.first_open_chunk = num_chunks if is_at_limit else 0
            self.drains = is_at_limit and num_chunks > 1

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

    def permits(self, number: int) -> bool:
        """Whether the bounds let the task of this number run."""
        if number >= 2 * self._num_chunks * self._num_microbatches:
            return True
        if self.drains:
            return number == self.next_to_drain()
        lane = number // self._num_microbatches
        return lane >= self.first_open_chunk

    @property
    def cause(self) -> Cause:
        """The cause of a wait for what is withheld."""
        return Cause.LIMIT if self.hold is None else Cause.HOLD
