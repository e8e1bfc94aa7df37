"""The items of a step before any is used, and those of the next step before it begins.

Items that are drawn ahead of their step wait in their iterator, and reach the training loop in its
own sequence. So training sees the same data as without looking ahead, with two exceptions: an
iterator whose draws advance the loop's random states is not looked at any further, and one that the
loop replaces keeps the items that were drawn from it, in case it comes back.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import (
    LoopRandomStates,
    StepData,
    is_iterator,
    shared_objects,
)
from rrfp.schedule.admission import AdmitAcross
from rrfp.schedule.policy import hold_as_json

_log = logging.getLogger(__name__)


class AheadIterator:
    """An iterator whose next items can be looked at."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.waiting: deque[Any] = deque()
        """Items that were looked at and not yet drawn by the loop."""
        self._failure: BaseException | None = None
        self._is_random = False

    def __iter__(self) -> "AheadIterator":
        return self

    def __next__(self) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        if self._failure is not None:
            # Raise the error of an early draw at the draw at which the loop would have met it.
            failure, self._failure = self._failure, None
            raise failure
        return next(self.source)

    def look(self, num: int) -> list[Any] | None:
        """Return the next items without removing them. None if there are fewer than `num`, or if
        drawing them advances random states that the loop may use."""
        if self._failure is not None or self._is_random:
            return None
        before = LoopRandomStates()
        while len(self.waiting) < num:
            try:
                self.waiting.append(next(self.source))
            except Exception as error:
                self._failure = error
                return None
            if LoopRandomStates() != before:
                self._is_random = True
                return None
        return [*self.waiting][:num]


class AheadIterators:
    """The `AheadIterator` of each iterator of a training loop that was looked at."""

    def __init__(self) -> None:
        self._known: dict[int, AheadIterator] = {}
        """By the id of the loop's own iterator, which they keep alive."""
        self._has_warned = False

    def wrap(self, given: Sequence[Any]) -> list[Any]:
        """Return a step's data objects, by chunk, with the first chunk's wrapped in an
        `AheadIterator`. An object that other chunks draw from too, or that is no iterator, is
        returned as it is."""
        first = given[0]
        if not is_iterator(first) or shared_objects(given):
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


class StepDataItems:
    """The `StepItems` of a step's data."""

    def __init__(self, data: StepData, num_microbatches: int, reason: str) -> None:
        """`reason` begins the error about a first rank without data."""
        self._data = data
        self._num = num_microbatches
        self._reason = reason

    def items(self) -> Sequence[Any]:
        """The step's items, in the order of the data. Raises UsageError if there is no iterator."""
        if self._data.given(0) is None:
            raise UsageError(
                f"{self._reason} the step's items and the first rank of this replica has no data "
                "iterator; pass one there or leave it out"
            )
        return self._data.first(0, self._num)

    def next_items(self) -> Sequence[Any] | None:
        """The next step's items, or None if they cannot be looked at."""
        given = self._data.given(0)
        # Draw all items of this step first, so that they stay in sequence.
        self.items()
        return given.look(self._num) if isinstance(given, AheadIterator) else None


def reason_to_look(settings: DispatchSettings, *, admits_given: bool) -> str:
    """The setting for which items are drawn before they are used."""
    if admits_given:
        return f"hold {hold_as_json(settings.policy.hold)}"
    if settings.admit_across != AdmitAcross.NONE:
        return f"admit_across '{settings.admit_across}'"
    return f"admit '{settings.admit}'"
