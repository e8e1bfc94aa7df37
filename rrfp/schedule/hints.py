"""Hints, which rank ready tasks (paper section 5), and orders, which are hints that list all tasks.

A dispatcher asks its hint for two things: `keys` rank tasks among each other, and `rounds` say
which kinds go first. To add a hint, write a class with the members of `Hint`, and add a line to
`HINTS` in `rrfp.schedule.named_hints`.
"""

import csv
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from rrfp.errors import UsageError
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Kind, Task, Value, format_task, parse_task

Tier = tuple[Kind, ...]
"""Kinds whose ready tasks compete by their keys. A tier is tried when no task of the tiers before
it may run."""


class WeightGradients(StrEnum):
    """The time at which an order used as a hint runs split-off weight gradients."""

    IDLE = "idle"
    """While no forward or backward may run; the order ranks them among themselves."""
    RANKED = "ranked"
    """At their positions in the order, like any other task."""


@dataclass(frozen=True, slots=True)
class Rounds(Value):
    """The tiers that a hint tries, in sequence, at each point of a round."""

    top: tuple[Tier, ...]
    """At the start of the step and of each round, and after a wait."""
    after: Mapping[Kind, tuple[Tier, ...]]
    """After a task of a kind; a kind that is not listed starts a new round."""

    def tiers(self, ran: Kind | None = None) -> tuple[Tier, ...]:
        """Return the tiers to try after a task of kind `ran`, or, with None, at the top of a round.
        A kind that is not listed starts a new round.

        Weight gradients fill idle time: unless the hint ranks them among other tasks, this appends
        them as the last tier.
        """
        tiers = self.top if ran is None else self.after.get(ran, self.top)
        ranks_weight_gradients = any(Kind.W in tier for tier in tiers)
        return tiers if ranks_weight_gradients else (*tiers, (Kind.W,))


class Hint(Protocol):
    """A ranking of ready tasks."""

    @property
    def name(self) -> str: ...

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are separate tasks."""
        ...

    @property
    def ranks_weight_gradients(self) -> bool:
        """True if the hint ranks weight gradients among the other tasks."""
        ...

    def for_shape(self, shape: Shape) -> "Hint":
        """Return the hint for a pipeline of this shape; the shape's kinds are ignored. Raises
        UsageError, saying what to change, for a shape that the hint does not support."""
        ...

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Return a key for each of a rank's tasks, in the order of `Shape.tasks_of`: an integer
        from 0 to the number of the rank's tasks - 1. Within a tier the smallest key wins."""
        ...

    def rounds(self, w: WeightGradients) -> Rounds:
        """Return the kinds that go first at each point of a round; `w` says when an order runs
        weight gradients."""
        ...


def kinds_of(hint: Hint) -> tuple[Kind, ...]:
    """Return the kinds of task that a training step has under this hint: F and B, and W if it
    splits backwards."""
    return SPLIT_BACKWARD if hint.splits_backward else WHOLE_BACKWARD


# Orders: a sequence of tasks for every pipeline rank, and their CSV form.
#
# An order file is torch.distributed.pipelining's CSV: one line per rank, one task per cell in
# torch's letters (`2F0`), empty cells ignored.


@dataclass(frozen=True, slots=True)
class Order(Value):
    """The tasks of every rank, in sequence. As a hint it ranks tasks by position: the first ready
    one is best. Under fixed dispatch it binds."""

    name: str
    shape: Shape
    rows: tuple[tuple[Task, ...], ...]
    _numbers: dict[int, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _keys: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are separate tasks of the order."""
        return self.shape.splits_backward

    @property
    def ranks_weight_gradients(self) -> bool:
        """True if the order splits backwards; then it places the weight gradients, too."""
        return self.splits_backward

    def for_shape(self, shape: Shape) -> "Order":
        """Return itself. Raises UsageError for a shape other than its own; the kinds of tasks are
        ignored."""
        if replace(shape, kinds=self.shape.kinds) != self.shape:
            raise UsageError(
                f"order {self.name} is for {self.shape}, not for {shape}; choose another hint"
            )
        return self

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Return the position of each task in the rank's row, by task number; cached by rank. Only
        the number of tasks is taken from `shape`."""
        keys = self._keys.get(rank)
        if keys is None:
            keys = self._keys[rank] = [0] * shape.num_tasks_of_a_rank
            for place, number in enumerate(self.numbers(rank)):
                keys[number] = place
        return keys

    def numbers(self, rank: int) -> list[int]:
        """Return a rank's row as task numbers (`Shape.index_of`); cached by rank."""
        numbers = self._numbers.get(rank)
        if numbers is None:
            numbers = self._numbers[rank] = [self.shape.index_of(task) for task in self.rows[rank]]
        return numbers

    def rounds(self, w: WeightGradients) -> Rounds:
        """Let all kinds compete by position, or with `idle` run weight gradients only when no other
        task may."""
        return order_rounds(w)

    def peak_depth(self, rank: int) -> int:
        """Return the largest D (chunk-forwards minus chunk-backwards run) that a rank reaches in
        its row."""
        return _peak(self.rows[rank], ends=Kind.B)

    def peak_held(self, rank: int) -> int:
        """Return the most activations that a rank keeps at once, from F until W (until B where B is
        whole), in slots of one chunk and one microbatch."""
        return _peak(self.rows[rank], ends=Kind.W if self.shape.splits_backward else Kind.B)

    def forwards(self) -> "Order":
        """Return this order with its forwards alone, for steps without backwards."""
        rows = tuple(tuple(task for task in row if task.kind is Kind.F) for row in self.rows)
        return Order(self.name, replace(self.shape, kinds=FORWARD_ONLY), rows)


def order_rounds(w: WeightGradients) -> Rounds:
    """Return the rounds of an order: with `ranked`, all kinds compete by position; otherwise
    forwards and backwards do, and weight gradients run only when neither may."""
    if w is WeightGradients.RANKED:
        return Rounds(((Kind.F, Kind.B, Kind.W),), {})
    return Rounds(((Kind.F, Kind.B),), {})


def _peak(row: tuple[Task, ...], ends: Kind) -> int:
    """Return the largest number, at any point of a row, of forwards run minus tasks of kind `ends`
    run."""
    steps = {Kind.F: 1, ends: -1}
    return max(accumulate((steps.get(task.kind, 0) for task in row), initial=0))


class OrderProgress:
    """Tracks a rank's progress through an order whose tasks may run out of sequence."""

    def __init__(self, numbers: list[int], positions: list[int], unmet: list[int]) -> None:
        """`numbers` are the order's tasks in sequence, `positions` the place of each number there,
        and `unmet` is `ReadyTracker.unmet`: negative for tasks that were dispatched."""
        self._numbers = numbers
        self._positions = positions
        self._unmet = unmet
        self._best = 0
        # `take` has counted all positions before `_first`, and those in `_taken_ahead` (sorted).
        self._first = 0
        self._taken_ahead: list[int] = []

    @property
    def best(self) -> int:
        """The number of the first task in the order that was not dispatched. At least one must be
        left."""
        while self._unmet[self._numbers[self._best]] < 0:
            self._best += 1
        return self._numbers[self._best]

    def unfinished(self) -> Iterator[int]:
        """Yield the numbers of the tasks that were not dispatched, in the order's sequence."""
        return (number for number in self._numbers if self._unmet[number] >= 0)

    def take(self, number: int) -> tuple[int, int]:
        """Count a dispatched task. Return its position in the order, and the number of uncounted
        tasks before it, which it skips."""
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


def parse_order(text: str, shape: Shape, name: str) -> Order:
    """Parse the text of an order file for a pipeline of this shape: a line per rank, whose empty
    cells and trailing empty lines are ignored. The file, not the shape, says whether backwards are
    split.

    If any backward is split into I and W, a whole one (B) is read as I immediately followed by W.
    Raises UsageError for another number of lines than ranks, for a cell that is no task, is on the
    wrong rank's line, repeats a task or contradicts how it is split, for a missing task, and for a
    text that is not CSV.
    """
    lines = _cells(text, name)
    while lines and not any(lines[-1]):
        lines.pop()
    if len(lines) != shape.num_ranks:
        raise UsageError(
            f"{name} has {len(lines)} lines for {shape.num_ranks} pipeline ranks; "
            "an order file has one line per rank"
        )
    shape = replace(shape, kinds=SPLIT_BACKWARD if _splits(lines) else WHOLE_BACKWARD)
    rows = tuple(
        _parse_row(cells, shape, rank, f"{name}, line {rank + 1}")
        for rank, cells in enumerate(lines)
    )
    return Order(name, shape, rows)


def _cells(text: str, name: str) -> list[list[str]]:
    """Return the stripped cells of each line of a CSV text; empty lines are kept, as lists without
    cells. Raises UsageError, with the line, if the text is not CSV."""
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        return [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise UsageError(f"{name}, line {reader.line_num}: {error}; write plain CSV") from None


def _splits(lines: list[list[str]]) -> bool:
    """True if any cell contains the letter I or W, which name the parts of a split backward."""
    return any("I" in cell or "W" in cell for cells in lines for cell in cells)


def _parse_row(cells: list[str], shape: Shape, rank: int, where: str) -> tuple[Task, ...]:
    """Parse one rank's line into its tasks, in sequence; empty cells are skipped. Raises UsageError
    for a wrong cell, and for a missing or repeated task."""
    cell_of: dict[Task, str] = {}
    for cell in filter(None, cells):
        for task in _parse_cell(cell, shape, rank, where):
            if task in cell_of:
                raise UsageError(f"{where}: {_repeated(cell_of[task], cell)}")
            cell_of[task] = cell
    for task in shape.tasks_of(rank):
        if task not in cell_of:
            missing = format_task(task, split=shape.splits_backward)
            raise UsageError(f"{where}: {missing} is missing; add it to the line")
    return tuple(cell_of)


def _parse_cell(cell: str, shape: Shape, rank: int, where: str) -> tuple[Task, ...]:
    """Parse a cell into its task. A whole backward in an order that splits others becomes I and W.
    Raises UsageError if it is not a task, or not one of this rank."""
    try:
        task, split = parse_task(cell)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if not shape.holds(rank, task):
        raise UsageError(
            f"{where}: {cell} is not a task of rank {rank}, which has stages "
            f"{', '.join(map(str, shape.stages_of(rank)))} and microbatches "
            f"0 to {shape.num_microbatches - 1}"
        )
    if shape.splits_backward and task.kind is Kind.B and not split:
        return task, task._replace(kind=Kind.W)
    return (task,)


def _repeated(before: str, cell: str) -> str:
    """Return the error text for two cells with the same task: the second repeats it, or one has the
    backward whole (B) and the other split (I or W)."""
    if ("B" in before) != ("B" in cell):
        return (
            f"{before} and {cell} cannot both be there; the backward of a microbatch on a stage "
            "is either B, or I and W"
        )
    return f"{cell} is listed twice; a task runs once"


def format_order(order: Order) -> str:
    """Format an order as CSV text, a line per rank, which `parse_order` reads back."""
    split = order.shape.splits_backward
    lines = (",".join(format_task(task, split=split) for task in row) for row in order.rows)
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class OrderFile(Value):
    """A hint from an order file, which is parsed once the step's shape is known."""

    name: str
    """The file's path."""
    text: str

    @property
    def splits_backward(self) -> bool:
        """True if the file splits its backwards. Raises UsageError if the text is not CSV."""
        return _splits(_cells(self.text, self.name))

    @property
    def ranks_weight_gradients(self) -> bool:
        """True if the file splits its backwards; then it places the weight gradients, too. Raises
        UsageError if the text is not CSV."""
        return self.splits_backward

    def for_shape(self, shape: Shape) -> Order:
        """Parse the file's text into an order. Raises UsageError, with the line, if it does not
        hold an order of this shape."""
        return parse_order(self.text, shape, self.name)

    def keys(self, shape: Shape, rank: int) -> list[int]:
        """Parse the file for this shape, and return the position of each task in the rank's row, by
        task number. Raises UsageError as `for_shape`."""
        return self.for_shape(shape).keys(shape, rank)

    def rounds(self, w: WeightGradients) -> Rounds:
        """Let all kinds compete by position, or with `idle` run weight gradients only when no other
        task may."""
        return order_rounds(w)
