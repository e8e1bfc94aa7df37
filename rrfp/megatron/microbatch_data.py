"""The items of a data iterator by microbatch: each microbatch sees its own, in any order."""

from collections.abc import Iterator
from typing import Any

from rrfp.errors import UsageError


class MicrobatchData:
    """One model chunk's data of one step; Megatron's iterators are drawn once a microbatch."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._num_drawn = 0
        self._drawn: dict[int, Any] = {}

    def first(self, num_items: int) -> list[Any]:
        """The items of the step before any is used, in the order in which they come."""
        self._draw(num_items)
        return [self._drawn[number] for number in range(num_items)]

    def of(self, number: int) -> Iterator[Any]:
        """What `forward_step_func` may pull for the microbatch that the item of that number, as
        they come, makes: the item, once."""
        self._draw(number + 1)
        yield self._drawn.pop(number)
        raise UsageError(
            f"forward_step_func asked for a second item for microbatch {number}; "
            "put all that a microbatch needs into one item"
        )

    def _draw(self, num_items: int) -> None:
        while self._num_drawn < num_items:
            try:
                self._drawn[self._num_drawn] = next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"the data iterator ended after {self._num_drawn} microbatches, before "
                    f"microbatch {num_items - 1} of this step; give it one item a microbatch"
                ) from None
            self._num_drawn += 1
