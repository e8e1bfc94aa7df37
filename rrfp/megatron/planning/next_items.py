"""The items of the next step, drawn from a training loop's iterator before that step begins.

Drawn items wait in their iterator's stead, and go to the next step in the loop's own sequence. So
training sees the same data as without a look ahead, with two exceptions that are watched for: an
iterator whose draws advance the loop's random states is not looked at any further, and one that the
loop gives up keeps what was drawn from it, in case it comes back.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from rrfp.megatron.step.microbatch_data import CallersStates, is_iterator, shared

_log = logging.getLogger(__name__)


class AheadIterator:
    """An iterator whose next items can be looked at."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.waiting: deque[Any] = deque()
        """Items that were looked at and not taken."""
        self._failure: BaseException | None = None
        self._is_random = False

    def __iter__(self) -> "AheadIterator":
        return self

    def __next__(self) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        if self._failure is not None:
            # What the look ahead met, where the loop would have met it.
            failure, self._failure = self._failure, None
            raise failure
        return next(self.source)

    def look(self, num: int) -> list[Any] | None:
        """The next items, without taking them; None if there are not as many, or if drawing them
        moves random states that the loop may use."""
        if self._failure is not None or self._is_random:
            return None
        before = CallersStates()
        while len(self.waiting) < num:
            try:
                self.waiting.append(next(self.source))
            except Exception as error:
                self._failure = error
                return None
            if CallersStates() != before:
                self._is_random = True
                return None
        return [*self.waiting][:num]


class AheadIterators:
    """The iterators of a training loop that were looked at."""

    def __init__(self) -> None:
        self._known: dict[int, AheadIterator] = {}
        """By the id of the loop's own iterator, which they keep alive."""
        self._has_warned = False

    def put_in(self, given: Sequence[Any]) -> list[Any]:
        """A step's data objects, by chunk, with the first chunk's in a form that can be looked
        at. One that other chunks draw from too, or that is no iterator, stays as it is."""
        first = given[0]
        if not is_iterator(first) or shared(given):
            return [*given]
        ahead = self._known.get(id(first))
        if ahead is None:
            left = {key: each for key, each in self._known.items() if each.waiting}
            if left and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "--admit plan: the training loop came with another data iterator, and %d items "
                    "that were drawn ahead wait for the one before; give one iterator for the "
                    "whole run, or choose --admit pyramid",
                    sum(len(each.waiting) for each in left.values()),
                )
            ahead = AheadIterator(first)
            self._known = left | {id(first): ahead}
        return [ahead, *given[1:]]
