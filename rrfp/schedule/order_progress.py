"""How far a rank has progressed through the order of its hint."""

from bisect import bisect_left
from collections.abc import Iterator


class OrderProgress:
    """How far a rank has progressed through an order whose entries may run out of sequence."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._position = {number: position for position, number in enumerate(numbers)}
        self._first = 0
        self._taken_ahead: list[int] = []  # positions after the first unfinished one, sorted

    @property
    def best(self) -> int:
        """The number of the first unfinished task."""
        return self._numbers[self._first]

    def left(self) -> Iterator[int]:
        """The numbers of the unfinished tasks, in the order's sequence."""
        ahead = set(self._taken_ahead)
        for position in range(self._first, len(self._numbers)):
            if position not in ahead:
                yield self._numbers[position]

    def take(self, number: int) -> tuple[int, int]:
        """Finish a task; return its position and how many unfinished tasks precede it."""
        position = self._position[number]
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
