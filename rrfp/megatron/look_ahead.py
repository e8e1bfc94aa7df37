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
        """Return the next `num` items without removing them, drawing those that are missing. Return
        None if a draw fails or the source ends; the loop's own draw raises that error later. Also
        return None, now and in later calls, once a draw advances random states that the loop may
        use. Items drawn so far wait for the loop."""
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
        """Return a step's data objects, by chunk, with the first chunk's wrapped in its
        `AheadIterator`, the same one in every step. All stay as they are if the first is no
        iterator or if chunks share an object.

        If the loop comes with another iterator while items drawn from an earlier one still wait,
        warn once and keep them.
        """
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
    """The items of a step and of the next one, drawn from the data of the first chunk (a
    `StepItems`)."""

    def __init__(self, data: StepData, num_microbatches: int, reason: str) -> None:
        """`reason` begins the error about a first rank without data."""
        self._data = data
        self._num = num_microbatches
        self._reason = reason

    def items(self) -> Sequence[Any]:
        """Draw and return the items of the first chunk, one per microbatch, in the order of the
        data. Raise UsageError if the first chunk has no data iterator, or if it ends."""
        if self._data.given(0) is None:
            raise UsageError(
                f"{self._reason} the step's items and the first rank of this replica has no data "
                "iterator; pass one there or leave it out"
            )
        return self._data.first(0, self._num)

    def next_items(self) -> Sequence[Any] | None:
        """Return the next step's items without removing them, or None if they cannot be looked at.
        First draws all items of this step, so that they stay in sequence."""
        given = self._data.given(0)
        self.items()
        return given.look(self._num) if isinstance(given, AheadIterator) else None


def reason_to_look(settings: DispatchSettings, *, admits_given: bool) -> str:
    """Name the setting because of which items are drawn before they are used, with its value, for
    error messages: `hold` if items enter in the given order (`admits_given`), else `admit_across`
    if it is set, else `admit`."""
    if admits_given:
        return f"hold {hold_as_json(settings.policy.hold)}"
    if settings.admit_across != AdmitAcross.NONE:
        return f"admit_across '{settings.admit_across}'"
    return f"admit '{settings.admit}'"
