"""What overtaking would gain under a hold in bytes: `python -m benchmarks.run_overtaking`.

A forward that does not fit may then be overtaken by the best of the next few of its chunk that
does. The figures of docs/memory.md, as time over the load of the most loaded rank.
"""

from heapq import nsmallest

from benchmarks.bytes_rows import BUDGETS, SEEDS, V, time_over_load
from rrfp.schedule.admission import Admit
from rrfp.schedule.books import ReadySet
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.hold import Bytes
from rrfp.schedule.tasks import Kind

_HINTS = ("zb-v", "bfw-deep")
_NUM_AHEAD = (1, 2, 8, 32)


def best_of(num_ahead: int) -> object:
    """`Dispatcher._best` with overtaking among so many."""

    def best(self: Dispatcher, ready: ReadySet) -> int | None:
        bounds, books = self._bounds, self._books
        for tier in self._tiers:
            found = []
            for kind in tier:
                for chunk, heap in enumerate(ready.heaps[kind]):
                    numbers = [
                        each % books.num_tasks
                        for each in nsmallest(len(heap), heap)
                        if books.is_left(each % books.num_tasks)
                    ]
                    if kind == list(Kind).index(Kind.F):
                        numbers = [
                            each
                            for each in numbers[:num_ahead]
                            if bounds.fits(chunk, each % books.num_microbatches)
                        ]
                    if numbers:
                        found.append((books._keys[numbers[0]], numbers[0]))
            if found:
                return min(found)[1]
        return None

    return best


def main() -> None:
    given = Dispatcher._best
    for budget in BUDGETS:
        for hint in _HINTS:
            for admit in Admit:
                row = []
                for num_ahead in _NUM_AHEAD:
                    Dispatcher._best = best_of(num_ahead)  # type: ignore[method-assign,assignment]
                    row.append(f"{time_over_load(hint, V, SEEDS, admit, Bytes(budget)):.3f}")
                print(f"{budget / 1e9:.1f} GB {hint:8} {admit:7} {' '.join(row)}", flush=True)
    Dispatcher._best = given  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
