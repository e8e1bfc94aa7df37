"""Gain of overtaking under a hold in bytes, for docs/memory.md.

`RRFP_COMPILED=0 python -m benchmarks.run_overtaking`, because it replaces a method, which compiled
code does not allow. A forward that does not fit may then be overtaken by the best of the next few
of its chunk that does. Figures are time over the load of the most loaded rank.
"""

from collections.abc import Callable
from heapq import nsmallest

from benchmarks.bytes_rows import BUDGETS, SEEDS, V, time_over_load
from rrfp.schedule.admission import Admit
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.policy import Bytes
from rrfp.schedule.ready_tracker import NO_TASK, ReadySet

_HINTS = ("zb-v", "bfw-deep")
_NUM_AHEAD = (1, 2, 8, 32)


def best_of(num_ahead: int) -> Callable[[Dispatcher, ReadySet], int]:
    """`Dispatcher._best_of_set` with overtaking among this number of tasks."""

    def best(self: Dispatcher, ready: ReadySet) -> int:
        bounds, tracker = self._bounds, self._tracker
        for tier in self._tiers:
            found = []
            for place in tier:
                heap = ready.heaps[place]
                best_first = nsmallest(len(heap), heap)
                entries = [
                    each
                    for each in best_first
                    if tracker.is_unfinished(tracker.number_in_entry(each))
                ]
                if place < tracker.index.num_chunks:
                    first = place * tracker.num_microbatches
                    entries = [
                        each
                        for each in entries[:num_ahead]
                        if bounds.fits(place, tracker.number_in_entry(each) - first)
                    ]
                found += entries[:1]
            if found:
                return tracker.number_in_entry(min(found))
        return NO_TASK

    return best


def main() -> None:
    given = Dispatcher._best_of_set
    for budget in BUDGETS:
        for hint in _HINTS:
            for admit in Admit:
                row = []
                for num_ahead in _NUM_AHEAD:
                    Dispatcher._best_of_set = best_of(num_ahead)  # type: ignore[method-assign,assignment]
                    row.append(f"{time_over_load(hint, V, SEEDS, admit, Bytes(budget)):.3f}")
                print(f"{budget / 1e9:.1f} GB {hint:8} {admit:7} {' '.join(row)}", flush=True)
    Dispatcher._best_of_set = given  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
