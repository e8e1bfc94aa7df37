"""Gives each microbatch the data that it has under Megatron's schedule, in any order of tasks.

Megatron passes the training loop's data object to one microbatch after the other, alternating
between chunks, under the loop's random states. The drop-in gives every microbatch the same data:

- If a rank has one chunk whose microbatches keep their order, `forward_step_func` gets the object
  itself, of any type. As in Megatron, all code outside of the model uses the loop's random states.
- Otherwise (several chunks, reordered microbatches, an admission order) it gets a view of an
  iterator with the microbatch's own items. These are drawn under the loop's random states; all
  other random numbers of the forward come from its task's states.
- Items are always drawn in sequence. If tasks run out of order, items wait for their microbatch.
  Between chunks, items are drawn in Megatron's order if that can matter: if drawing has advanced
  the loop's random states, or if two chunks share an iterator.
- If a rank has several chunks whose microbatches keep their order, an object that is not an
  iterator is passed itself, and must not advance the loop's random states.

A step learns only while it runs which chunks draw data, and how many items a microbatch takes.
Until then it assumes that all are alike. If the assumption fails, the step fails, because it would
train on other data than under Megatron's own schedule.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from rrfp.errors import UsageError

if TYPE_CHECKING:
    from rrfp.megatron.step.random_streams import TaskStreams


class MismatchedDataError(UsageError, RuntimeError):
    """Data iterators do not match the model chunks. Megatron raises a RuntimeError here."""


@dataclass(slots=True)
class DataHabits:
    """Properties of a training loop's data, learned from its steps so far."""

    order_matters: bool = False
    """True if a chunk's items depend on earlier draws of the rank's other chunks."""
    idle_chunks: set[int] = field(default_factory=set)
    """The chunks that have an iterator and do not draw from it."""
    num_items: int = 1
    """The number of items that a microbatch takes."""


@dataclass(slots=True)
class _Slot:
    """The items drawn for one microbatch of a chunk."""

    items: deque[Any] = field(default_factory=deque)
    num_taken: int = 0
    is_ahead: bool = False
    """True if items were drawn ahead and the microbatch has not taken one yet."""


class StepData:
    """The data of one step on this rank."""

    def __init__(
        self,
        given: Sequence[Any],
        num_microbatches: int,
        habits: DataHabits,
        *,
        keeps_order: bool,
        group_size: int,
    ) -> None:
        """`given` has the loop's data object for each chunk, or None. With `keeps_order`, every
        chunk runs its microbatches in sequence; otherwise all objects must be iterators. Megatron
        alternates between chunks after `group_size` microbatches.
        """
        self._given = given
        self._habits = habits
        self._keeps_order = keeps_order
        self._has_several = len(given) > 1
        self._slots: list[list[_Slot]] = [[] for _ in given]
        """Drawn items by chunk and microbatch, in the sequence of the data."""
        self._places = _places(num_microbatches, len(given), group_size)
        self._last_moved = -1
        """The latest place in Megatron's order whose draw advanced the loop's random states."""
        self._idle: set[tuple[int, int]] = set()
        """The (chunk, microbatch) pairs that have run and drew nothing."""
        self._is_shared = bool(shared_objects(given))
        self._replaced: set[int] = set()

    @property
    def _must_order(self) -> bool:
        """True if items must be drawn in Megatron's order between chunks: chunks share an iterator,
        or drawing has advanced the loop's random states."""
        return self._is_shared or (self._has_several and self._habits.order_matters)

    def given(self, chunk: int) -> Any:
        """The loop's data object for a chunk, or None."""
        return self._given[chunk]

    def first(self, chunk: int, num_microbatches: int) -> list[Any]:
        """Draw and return a chunk's items, one per microbatch, before any is used. If the order
        between chunks matters, items of other chunks are drawn, too. Raise UsageError if the
        iterator ends."""
        self._habits.num_items = 1
        for number in range(num_microbatches):
            self._draw_up_to(chunk, number)
        return [slot.items[0] for slot in self._slots[chunk]]

    @property
    def drawing_chunks(self) -> list[int]:
        """The chunks with a data object, without those known to draw nothing."""
        idle = self._habits.idle_chunks
        return [
            chunk
            for chunk, given in enumerate(self._given)
            if given is not None and chunk not in idle
        ]

    def replace(self, chunk: int, items: Sequence[Any]) -> None:
        """Replace the items drawn for a chunk's microbatches, one each. Call it after `first`."""
        self._replaced.add(chunk)
        for slot, item in zip(self._slots[chunk], items, strict=True):
            slot.items = deque([item])

    @contextmanager
    def of(self, chunk: int, number: int, model: Any, streams: "TaskStreams") -> Iterator[Any]:
        """Give the data object for the forward of microbatch `number`, which runs inside the block:
        the loop's object itself, or a view of its iterator with this microbatch's items. The
        model's random numbers come from `streams`; so do those of the forward's other code, except
        with a single chunk in order, and with an object that is neither iterator nor sequence.

        Raise UsageError if the iterator ends, if the forward leaves items over, and if it advances
        the loop's random states where they cannot be kept in Megatron's order.
        """
        given = self._given[chunk]
        if self._keeps_order and not self._has_several:
            with streams.active_in_calls_of(model):
                try:
                    yield given
                except StopIteration:
                    _raise_ended(number)
        elif given is None or isinstance(given, Sequence):
            # A sequence's items already exist: drawing them does not advance random states.
            with streams.active():
                yield given
        elif is_iterator(given):
            with streams.active():
                yield _MicrobatchIterator(self, chunk, number, streams)
            self._update_habits(chunk, number)
        else:
            before = LoopRandomStates()
            with streams.active_in_calls_of(model):
                yield given
            if LoopRandomStates() != before:
                raise UsageError(
                    f"the forward of chunk {chunk} draws from the training loop's random states, "
                    f"and its data, a {type(given).__name__}, have no __next__ to draw them in "
                    "Megatron's order; pass an iterator, or draw from separate generators, one per "
                    "chunk"
                )

    def take(self, chunk: int, number: int) -> Any:
        """Return and remove the next item of a microbatch, drawn if needed.

        Raise UsageError if the iterator has ended, or if drawing now would change the order of the
        loop's data.
        """
        slots = self._slots[chunk]
        if number >= len(slots):
            self._draw_up_to(chunk, number)
        elif not slots[number].items:
            self._check_may_draw_on(chunk, number)
            if not self._draw(chunk, number):
                _raise_ended(number)
        slot = slots[number]
        slot.is_ahead = False
        slot.num_taken += 1
        return slot.items.popleft()

    def _update_habits(self, chunk: int, number: int) -> None:
        """Learn from the draws of a finished microbatch how many items one takes, and whether the
        chunk draws at all. Raise UsageError if the microbatch left items over."""
        slots = self._slots[chunk]
        # Items are replaced for all chunks that may draw, also for those that do not.
        is_left = chunk in self._replaced and slots[number].num_taken == 0
        if number >= len(slots) or is_left:
            self._idle.add((chunk, number))
            self._habits.idle_chunks.add(chunk)
            return
        slot = slots[number]
        if slot.items:
            raise UsageError(
                f"forward_step_func took {slot.num_taken} of the "
                f"{slot.num_taken + len(slot.items)} items that were drawn for microbatch {number} "
                f"of chunk {chunk}, because others take as many; let it take as many for each, and "
                "pass None as the iterator of a chunk that takes no data"
            )
        self._habits.num_items = slot.num_taken

    def _draw_up_to(self, chunk: int, number: int) -> None:
        """Draw all items that Megatron would have drawn by now, up to this microbatch's first.
        Another chunk whose iterator has ended is taken for one that never draws. Raise UsageError
        if this chunk's iterator ends, or another's between the items of a microbatch."""
        self._habits.idle_chunks.discard(chunk)
        while number >= len(self._slots[chunk]):
            each = self._next_in_order() if self._must_order else chunk
            slots = self._slots[each]
            slots.append(_Slot(is_ahead=True))
            this = each, len(slots) - 1
            if this in self._idle:
                slots[-1].is_ahead = False
                continue
            num_items = 1 if this == (chunk, number) else self._habits.num_items
            for _ in range(num_items):
                if self._draw(*this):
                    continue
                if each == chunk or slots[-1].items:
                    _raise_ended(this[1])
                # The iterator may be a placeholder for a chunk that never draws.
                slots.pop()
                self._habits.idle_chunks.add(each)
                break

    def _next_in_order(self) -> int:
        """The chunk for which Megatron would draw next."""
        due = (
            (place, chunk)
            for chunk, slots in enumerate(self._slots)
            if chunk not in self._habits.idle_chunks
            and is_iterator(self._given[chunk])
            and (place := self._places.get((chunk, len(slots)))) is not None
        )
        return min(due)[1]

    def _draw(self, chunk: int, number: int) -> bool:
        """Draw an item for a microbatch and store it. Return False if the iterator has ended. Raise
        UsageError if the draw advances the loop's random states out of Megatron's order."""
        with self._checking_random_states(chunk, number):
            try:
                item = next(self._given[chunk])
            except StopIteration:
                return False
        self._slots[chunk][number].items.append(item)
        return True

    def _check_may_draw_on(self, chunk: int, number: int) -> None:
        """Raise UsageError if another item for this microbatch would come out of Megatron's order:
        items were drawn for a later microbatch, or ahead for any while this one takes more than
        usual."""
        own = self._places[chunk, number]
        # Microbatches drawn ahead were assumed to need as many items as others.
        is_more = self._slots[chunk][number].num_taken >= self._habits.num_items
        chunks = range(len(self._slots)) if self._must_order else (chunk,)
        for each in chunks:
            for other, slot in enumerate(self._slots[each]):
                if (slot.is_ahead and is_more) or self._places[each, other] > own:
                    raise UsageError(
                        "forward_step_func asked for another item for microbatch "
                        f"{number}, after others had been given theirs; put all that a microbatch "
                        "needs into one item, or take microbatches in order, as hint bf does"
                    )

    @contextmanager
    def _checking_random_states(self, chunk: int, number: int) -> Iterator[None]:
        """Wrap a draw. With several chunks, detect whether it advances the loop's random states,
        and raise UsageError if it then comes out of Megatron's order."""
        if not self._has_several:
            yield
            return
        before = LoopRandomStates()
        yield
        if LoopRandomStates() == before:
            return
        place = self._places[chunk, number]
        if place < self._last_moved:
            raise UsageError(
                f"the data of chunk {chunk} are drawn from the training loop's own random states, "
                "and not in Megatron's order, because another chunk drew first; draw them from "
                "separate generators, one per chunk"
            )
        self._last_moved = place
        self._habits.order_matters = True


class _MicrobatchIterator:
    """An iterator over one microbatch's items."""

    def __init__(self, data: StepData, chunk: int, number: int, streams: "TaskStreams") -> None:
        self._data = data
        self._chunk = chunk
        self._number = number
        self._streams = streams

    def __iter__(self) -> "_MicrobatchIterator":
        return self

    def __next__(self) -> Any:
        with self._streams.inactive():
            return self._data.take(self._chunk, self._number)


class LoopRandomStates:
    """A snapshot of the random states that a training loop may use to draw data."""

    def __init__(self) -> None:
        self._torch = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._torch.append(torch.cuda.get_rng_state())
        self._python = random.getstate()
        numpy_state: Any = np.random.get_state()
        self._numpy = (numpy_state[1].tobytes(), *numpy_state[2:])

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, LoopRandomStates)
        return (
            self._python == other._python
            and self._numpy == other._numpy
            and all(map(torch.equal, self._torch, other._torch))
        )

    __hash__ = None  # type: ignore[assignment]


def data_per_chunk(given: Any, num_chunks: int) -> list[Any]:
    """The data object of each chunk, None for all if None is given. Megatron passes one object or a
    list by chunk. Raise MismatchedDataError if their number is not that of the chunks."""
    if given is None:
        return [None] * num_chunks
    objects = given if isinstance(given, list) else [given]
    if len(objects) != num_chunks:
        raise MismatchedDataError(
            f"{len(objects)} data iterators came with {num_chunks} model chunks; "
            "pass a list of one per chunk"
        )
    return objects


def shared_objects(given: Sequence[Any]) -> list[Any]:
    """The data objects that several chunks draw from, once for each of these chunks. None and
    sequences do not count."""
    drawn_from = [each for each in given if each is not None and not isinstance(each, Sequence)]
    counts = Counter(map(id, drawn_from))
    return [each for each in drawn_from if counts[id(each)] > 1]


def is_iterator(given: Any) -> bool:
    """True if a data object's type has `__next__`."""
    return hasattr(type(given), "__next__")


def _raise_ended(number: int) -> NoReturn:
    """Raise UsageError: the data iterator ended after `number` microbatches of this step."""
    raise UsageError(
        f"the data iterator ended after {number} microbatches of this step; give it an item for "
        "each microbatch"
    ) from None


@lru_cache(maxsize=16)
def _places(num_microbatches: int, num_chunks: int, group_size: int) -> dict[tuple[int, int], int]:
    """The place of each (chunk, microbatch) in Megatron's order of forwards on a rank, which
    alternates between chunks after `group_size` microbatches."""
    order = (
        (chunk, number)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for number in range(start, min(start + group_size, num_microbatches))
    )
    return {slot: place for place, slot in enumerate(order)}
