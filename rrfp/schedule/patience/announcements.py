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

from rrfp.schedule.books import Books
from rrfp.schedule.bounds import Bounds
from rrfp.schedule.stimuli import Announced

_F, _B, _W = range(3)

Tiers = tuple[tuple[int, ...], ...]
"""Kinds that compete, the best tier first."""

_IDLE = (_W,)
"""The tier of weight gradients that fill idle time."""
_DRAINING = ((_F, _B), _IDLE)
"""The tiers of a rank that drains."""


class Announcements:
    """The tasks of one rank whose input was announced and has not arrived everywhere."""

    def __init__(self, books: Books, bounds: Bounds) -> None:
        self.windows: dict[int, tuple[int, int]] = {}
        """By number: from when to wait for a task, and until when."""
        self._books = books
        self._bounds = bounds

    def add(self, number: int, announced: Announced) -> None:
        """Note the first announcement of the task of this number."""
        _, expected_ns, patience_ns = announced
        window = expected_ns - patience_ns, expected_ns + patience_ns
        self.windows.setdefault(number, window)

    def until(self, now_ns: int, choice: int, tiers: Tiers) -> int | None:
        """Until when to wait rather than run `choice`, the best task that may run; None: run it."""
        books, bounds = self._books, self._bounds
        if bounds.drains:
            tiers = _DRAINING
        best = self._place(choice, tiers)
        if tiers[-1] == _IDLE and choice >= _W * books.num_of_a_kind:
            return None
        found_ns: int | None = None
        for number, (from_ns, until_ns) in self.windows.items():
            if not from_ns <= now_ns < until_ns or books.lacks[number] != 0:
                continue
            place = self._place(number, tiers)
            if place >= best or not bounds.permits(number):
                continue
            if number < books.num_of_a_kind:
                heap = books.ready_sets[0].heaps[_F][number // books.num_microbatches]
                # The bound withholds a better one of its chunk, and so this one, too.
                if heap and heap[0] < place[1]:
                    continue
            best, found_ns = place, until_ns
        return found_ns

    def _place(self, number: int, tiers: Tiers) -> tuple[int, int]:
        """A task's place among those that compete now: its tier, and its entry there."""
        kind = number // self._books.num_of_a_kind
        tier = next(place for place, kinds in enumerate(tiers) if kind in kinds)
        return tier, self._books.entry(number)
