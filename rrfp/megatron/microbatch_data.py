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

    def of(self, microbatch: int) -> Iterator[Any]:
        """What `forward_step_func` may pull for this microbatch: its item, once."""
        while self._num_drawn <= microbatch:
            try:
                self._drawn[self._num_drawn] = next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"the data iterator ended after {self._num_drawn} microbatches, before "
                    f"microbatch {microbatch} of this step; give it one item a microbatch"
                ) from None
            self._num_drawn += 1
        yield self._drawn.pop(microbatch)
        raise UsageError(
            f"forward_step_func asked for a second item for microbatch {microbatch}; "
            "put all that a microbatch needs into one item"
        )
