"""How far a rank has progressed through the order of its hint."""

from bisect import bisect_left
from collections.abc import Iterator


class OrderProgress:
    """How far a rank has progressed through an order whose entries may run out of sequence."""

    def __init__(self, numbers: list[int], positions: list[int], lacks: list[int]) -> None:
        """`numbers` are the order's tasks in sequence, `positions` the place of each number there,
        and `lacks` is the books' list: negative for tasks that were dispatched."""
        self._numbers = numbers
        self._positions = positions
        self._lacks = lacks
        self._best = 0
        # Positions that `take` has counted: all before the first, and those ahead of it, sorted.
        self._first = 0
        self._taken_ahead: list[int] = []

    @property
    def best(self) -> int:
        """The number of the first unfinished task, of which there must be one."""
        while self._lacks[self._numbers[self._best]] < 0:
            self._best += 1
        return self._numbers[self._best]

    def left(self) -> Iterator[int]:
        """The numbers of the unfinished tasks, in the order's sequence."""
        return (number for number in self._numbers if self._lacks[number] >= 0)

    def take(self, number: int) -> tuple[int, int]:
        """Count a dispatched task; return its position and how many uncounted tasks precede it."""
        position = self._positions[number]
        ahead = self._taken_ahead
        if position > self._first:
            place = bisect_left(ahead, position)
            ahead.insert(place, position)
            return position, position - self._first - place
        self._first += 1
        done = 0
        while done < len(ahead) and ahead[done] == self._first:
            self._first += 1
            done += 1
        del ahead[:done]
        return position, 0
