"""What was announced to a rank, and when it is worth waiting for.

Theory of operation. When a rank dispatches a task whose output another rank takes, it announces to
that rank when to expect it. A free rank chooses as if the announced tasks that are due within its
patience, early or late, were ready. If its choice is one of them it waits, else it runs the choice.
So a task that the hint puts first is not put off by a lesser one that happens to be ready.

Weight gradients that fill idle time are never put off: a wait is idle time, too.

No patience deadlocks a step, whatever the bound, the hint, and what was announced:

1. *A wait has a deadline*, the end of the patience for what it waits for, and each task counts as
   announced at most once, so that all waits together are finite. After them the rank decides as if
   nothing had been announced: by the proofs in `rrfp.schedule.bounds` something can always run.
2. *A wait changes nothing that a bound counts*, because it runs nothing: what is held stays, in
   microbatches or in bytes, and so does the next task of a rank that drains. The rank waits only
   for what the bound permits now, and it will still permit it then.
3. *Ranks do not wait for each other.* An announced task lacks the output of a task that was
   dispatched, which runs to its end whatever this rank does. A rank that waits has announced
   nothing that has not ended, so no chain of waits is longer than one.
"""

from typing import Final

from rrfp.schedule.books import Books, Tiers
from rrfp.schedule.bounds import Bounds
from rrfp.schedule.lanes import NOTHING
from rrfp.schedule.stimuli import Announced

NEVER: Final = -1
"""In the place of a time in ns."""


class Announcements:
    """The tasks of one rank whose input was announced and has not arrived everywhere."""

    def __init__(self, books: Books, bounds: Bounds) -> None:
        self.windows: dict[int, tuple[int, int]] = {}
        """By number: from when to wait for a task, and until when."""
        self._books = books
        self._bounds = bounds
        num_chunks = books.shape.num_chunks
        self._idle = (num_chunks + 1,)
        """The tier of weight gradients that fill idle time."""
        self._draining = (tuple(range(num_chunks + 1)), self._idle)
        """The tiers of a rank that drains."""

    def add(self, number: int, announced: Announced) -> None:
        """Note the first announcement of the task of this number."""
        _, expected_ns, patience_ns = announced
        window = expected_ns - patience_ns, expected_ns + patience_ns
        self.windows.setdefault(number, window)

    def until(self, now_ns: int, choice: int, tiers: Tiers) -> int:
        """Until when to wait rather than run `choice`, the best task that may run; `NEVER`: run
        it."""
        books, bounds = self._books, self._bounds
        if bounds.drains:
            tiers = self._draining
        if tiers[-1] == self._idle and choice >= 2 * books.num_of_a_kind:
            return NEVER
        best_tier, best_entry = self._tier(choice, tiers), books.entry(choice)
        found_ns = NEVER
        for number, (from_ns, until_ns) in self.windows.items():
            if not from_ns <= now_ns < until_ns or books.lacks[number] != 0:
                continue
            tier, entry = self._tier(number, tiers), books.entry(number)
            if tier > best_tier or (tier == best_tier and entry >= best_entry):
                continue
            if not bounds.permits(number):
                continue
            if number < books.num_of_a_kind:
                heap = books.ready_sets[0].heaps[number // books.num_microbatches]
                first = books.best(heap)
                # The bound withholds a better one of its chunk, and so this one, too.
                if first != NOTHING and first < entry:
                    continue
            best_tier, best_entry, found_ns = tier, entry, until_ns
        return found_ns

    def _tier(self, number: int, tiers: Tiers) -> int:
        """The place of the tier in which a task competes now."""
        books = self._books
        num_chunks = books.lanes.num_chunks
        lane = number // books.num_microbatches
        heap = lane if lane < num_chunks else num_chunks - 1 + lane // num_chunks
        for place, tier in enumerate(tiers):
            if heap in tier:
                return place
        raise AssertionError("every heap is in a tier")
