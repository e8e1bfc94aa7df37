"""The microbatches that each replica runs in a step, and the order in which they are admitted.

Both are fixed before anything is dispatched.

The order is a permutation: `order[i]` is the index, in the data, of the microbatch admitted as
number i.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Value


class Admit(StrEnum):
    """The named orders in which a step's microbatches are admitted."""

    GIVEN = "given"
    PYRAMID = "pyramid"
    """Light microbatches at both ends of the step, heavy ones in the middle."""
    PLAN = "plan"
    """The best order that simulations find before the step, at least as good as the pyramid
    (`rrfp.planning`)."""


@dataclass(frozen=True, slots=True)
class ListedOrders(Value):
    """The orders of an admission file, one per step; after the last they start over."""

    name: str
    """The file's name."""
    orders: tuple[tuple[int, ...], ...]
    """By step and, where replicas have their own, by replica within the step."""
    num_replicas: int = 1
    """Replicas with an order of their own; with 1, all take the same."""

    def of_step(self, step: int, replica: int = 0) -> tuple[int, ...]:
        """Return a replica's order in step `step` (from 0). After the last listed step the orders
        start over. Replica numbers wrap around at `num_replicas`; with 1, all replicas take the
        same order."""
        place = step * self.num_replicas + replica % self.num_replicas
        return self.orders[place % len(self.orders)]


Admission = Admit | ListedOrders


def admission_order(
    admission: Admission,
    step: int,
    num_microbatches: int,
    weigh: Callable[[], Sequence[float]],
    replica: int = 0,
) -> Sequence[int]:
    """Return the order in which a replica admits the microbatches of a step: the listed one, 0, 1,
    2, ... for `given`, else the pyramid (for `plan` it is only where planning starts).

    `weigh` computes the microbatches' weights, and is called only for the pyramid. Raises
    UsageError if the listed order has another number of microbatches.
    """
    if isinstance(admission, ListedOrders):
        order = admission.of_step(step, replica)
        if len(order) != num_microbatches:
            raise UsageError(
                f"the order in {admission.name} admits {len(order)} microbatches and step {step} "
                f"has {num_microbatches}; list that many in each line"
            )
        return order
    return range(num_microbatches) if admission is Admit.GIVEN else pyramid(weigh())


def pyramid(weights: Sequence[float]) -> list[int]:
    """Return the microbatches' indices in an order with light ones at both ends and heavy ones in
    the middle: sorted by weight, they alternately take the next place at the front and at the back.
    Of two equal microbatches the earlier counts as lighter."""
    lightest_first = sorted(range(len(weights)), key=weights.__getitem__)
    return lightest_first[::2] + lightest_first[1::2][::-1]


def parse_admission(text: str, name: str, num_microbatches: int | None = None) -> ListedOrders:
    """Parse the text of an admission file: a line per step, with its microbatches in the order in
    which they enter, separated by commas or spaces. Semicolons separate the orders of data-parallel
    replicas. Empty lines are skipped.

    Raises UsageError unless each line names each of `num_microbatches` microbatches once (None: as
    many as the first line), for equally many replicas, and for a file without lines.
    """
    orders: list[tuple[int, ...]] = []
    num_replicas: int | None = None
    for of_replicas, where in _cells_of_lines(text, name):
        if len(of_replicas) != (num_replicas or len(of_replicas)):
            raise UsageError(
                f"{where} has orders for {_format_replicas(len(of_replicas))} and the lines before "
                f"it for {num_replicas}; give each line as many"
            )
        num_replicas = len(of_replicas)
        for cells in of_replicas:
            num_microbatches = num_microbatches or len(cells)
            orders.append(_parse_order(cells, num_microbatches, where))
    if not orders:
        raise UsageError(f"{name} admits nothing; write a line of microbatches, such as 1 0 2")
    return ListedOrders(name, tuple(orders), num_replicas or 1)


def check_replicas(admission: Admission, num_replicas: int) -> None:
    """Raise UsageError if a listed admission has orders for another number of replicas. One order
    for all replicas passes, and so do the named admissions."""
    if isinstance(admission, ListedOrders) and admission.num_replicas not in (1, num_replicas):
        raise UsageError(
            f"{admission.name} has orders for {_format_replicas(admission.num_replicas)} and there "
            f"{'is 1' if num_replicas == 1 else f'are {num_replicas}'}; give each line as many, or "
            "one order for all"
        )


def format_step(orders: Sequence[Sequence[int]]) -> str:
    """Format one step as a line, which `parse_admission` and `parse_assignments` read back: numbers
    separated by spaces, replicas by semicolons. A single order stands for all replicas."""
    return "; ".join(" ".join(map(str, order)) for order in orders) + "\n"


def _format_replicas(num: int) -> str:
    """Format a number of replicas as text: `1 replica` or `3 replicas`."""
    return "1 replica" if num == 1 else f"{num} replicas"


def _cells_of_lines(text: str, name: str) -> Iterator[tuple[list[list[str]], str]]:
    """Yield the cells of each line that is not empty, as a list per replica, with the name and line
    number by which errors refer to it."""
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [part.replace(",", " ").split() for part in line.split(";")]
        if any(cells):
            yield cells, f"{name}, line {number}"


def _parse_number(cell: str, num: int, noun: str, where: str) -> int:
    """Parse a whole number from 0 to `num` - 1. Raises UsageError for any other text; `noun` says
    in the error what is numbered."""
    if not re.fullmatch(r"\d{1,9}", cell, re.ASCII) or int(cell) >= num:
        quoted = cell if len(cell) <= 20 else f"{cell[:20]}..."
        raise UsageError(
            f"{where}: '{quoted}' is not one of the {num} {noun}; write their numbers, from 0 to "
            f"{num - 1}"
        )
    return int(cell)


def _parse_order(cells: list[str], num_microbatches: int, where: str) -> tuple[int, ...]:
    """Parse one replica's order. Raises UsageError unless the cells name each of `num_microbatches`
    microbatches exactly once."""
    order: dict[int, None] = {}
    for cell in cells:
        number = _parse_number(cell, num_microbatches, "microbatches", where)
        if number in order:
            raise UsageError(f"{where}: {number} is listed twice; admit each microbatch once")
        order[number] = None
    if len(order) < num_microbatches:
        missing = next(each for each in range(num_microbatches) if each not in order)
        raise UsageError(
            f"{where} admits {len(order)} of {num_microbatches} microbatches; {missing} is "
            "missing, add it"
        )
    return tuple(order)


# Balancing the items of a global batch over the data-parallel replicas, by what they are known to
# cost.
#
# A step ends with its slowest replica. The time of a replica depends on its load and on its
# heaviest item: that one passes all stages one after the other, and the others fill the gaps only
# in part. So replicas are balanced by the sum of their load and half of their heaviest item's time
# through all stages. Each gets as many items as the others, because a schedule has one number of
# microbatches.
#
# The items of a global batch are numbered replica by replica, as the data give them: with M
# microbatches a step, item i of replica r has number r * M + i.


Times = Sequence[float]
"""The times of an item on each pipeline rank, in any unit."""

Assignment = Sequence[Sequence[int]]
"""The numbers of the items that each replica gets."""


class AdmitAcross(StrEnum):
    """The named ways to balance the items of a global batch."""

    NONE = "none"
    """Every replica keeps the items that the data give it."""
    REPLICAS = "replicas"
    """Over the data-parallel replicas."""


@dataclass(frozen=True, slots=True)
class ListedAssignments(Value):
    """The assignments of a file, one per step; after the last they start over."""

    name: str
    """The file's name."""
    steps: tuple[Assignment, ...]
    """Each replica's items in the order in which they enter."""

    def of_step(self, step: int, num_replicas: int, num_microbatches: int) -> Assignment:
        """Return the assignment of step `step`; after the last listed step they start over. Raises
        UsageError if it is for another number of replicas, or of microbatches per replica."""
        assignment = self.steps[step % len(self.steps)]
        if (len(assignment), len(assignment[0])) != (num_replicas, num_microbatches):
            raise UsageError(
                f"{self.name} assigns {len(assignment[0])} microbatches to each of "
                f"{len(assignment)} replicas, and step {step} has {num_microbatches} for each of "
                f"{num_replicas}; give it lines of that many"
            )
        return assignment


Balancing = AdmitAcross | ListedAssignments


def balance_batch(items: Sequence[Times], num_replicas: int) -> list[list[int]]:
    """Assign the items of a global batch to replicas, equally many to each; return the numbers of
    each replica's items, ascending. Equal arguments give equal assignments.

    The number of items must be a multiple of `num_replicas` (not checked). Heavy items are assigned
    first, each to the replica that is the fastest with it. Then the slowest replica swaps items
    with others, at most 4 swaps per item, as long as that leaves both faster than it was.
    """
    num_each = len(items) // num_replicas
    replicas = [_ReplicaLoad(items) for _ in range(num_replicas)]
    for number in sorted(range(len(items)), key=lambda each: -sum(items[each])):
        not_full = [replica for replica in replicas if len(replica.numbers) < num_each]
        min(not_full, key=lambda replica: replica.score_with(number)).add(number)
    for _ in range(_MOST_SWAPS_PER_ITEM * len(items)):
        if not _swap_from_slowest(replicas):
            break
    return [sorted(replica.numbers) for replica in replicas]


def equal_times(weights: Sequence[float], num_ranks: int) -> list[Times]:
    """Return the times of items on pipeline ranks, where each item takes its weight on every
    rank."""
    return [[weight] * num_ranks for weight in weights]


def parse_assignments(text: str, name: str) -> ListedAssignments:
    """Parse the text of an assignment file: a line per step, with the items of each replica in the
    order in which they enter, separated by commas or spaces, and the replicas by semicolons. Empty
    lines are skipped.

    Raises UsageError, with the line, unless it assigns each item of a global batch once and equally
    many to each replica, and for a file without lines.
    """
    steps = [_parse_assignment_line(cells, where) for cells, where in _cells_of_lines(text, name)]
    if not steps:
        raise UsageError(f"{name} assigns nothing; write a line of items, such as 0 3; 1 2")
    return ListedAssignments(name, tuple(steps))


def _parse_assignment_line(cells: list[list[str]], where: str) -> Assignment:
    """Parse one step's assignment. Raises UsageError unless all replicas get equally many items and
    each item number appears once."""
    counts = sorted({len(of_replica) for of_replica in cells})
    if len(counts) > 1:
        raise UsageError(
            f"{where} assigns {counts[0]} items to one replica and {counts[-1]} to another; assign "
            "as many to each"
        )
    num_items = len(cells) * counts[0]
    seen: set[int] = set()
    for cell in (cell for of_replica in cells for cell in of_replica):
        number = _parse_number(cell, num_items, "items", where)
        if number in seen:
            raise UsageError(f"{where}: {number} is assigned twice; assign each item once")
        seen.add(number)
    return tuple(tuple(map(int, of_replica)) for of_replica in cells)


_MOST_SWAPS_PER_ITEM = 4
"""Further swaps gain next to nothing."""


class _ReplicaLoad:
    """The items assigned to one replica, and their load."""

    def __init__(self, items: Sequence[Times]) -> None:
        self.items = items
        self.numbers: list[int] = []
        self.loads: Times = [0] * len(items[0])
        self.heaviest = 0.0
        self.score = 0.0

    def add(self, number: int) -> None:
        """Add an item to the replica, and recompute its loads and score."""
        self.numbers.append(number)
        self._update()

    def swap(self, number: int, other: "_ReplicaLoad", others: int) -> None:
        """Exchange the own item `number` for item `others` of the replica `other`, and recompute
        the loads and scores of both."""
        self.numbers[self.numbers.index(number)] = others
        other.numbers[other.numbers.index(others)] = number
        self._update()
        other._update()

    def _update(self) -> None:
        """Recompute the loads by pipeline rank, the heaviest item's time, and the score (twice the
        largest load plus the heaviest item), which is smaller for a faster replica."""
        own = [self.items[number] for number in self.numbers]
        self.loads = [sum(of_rank) for of_rank in zip(*own, strict=True)]
        self.heaviest = max(map(sum, own))
        self.score = 2 * max(self.loads) + self.heaviest

    def score_with(self, number: int) -> float:
        """Return the score that the replica would have with one more item, without adding it."""
        item = self.items[number]
        loads = (load + time for load, time in zip(self.loads, item, strict=True))
        return 2 * max(loads) + max(self.heaviest, sum(item))

    def without_each(self) -> list[tuple[int, Times, float]]:
        """Return for each item of the replica: its number, the loads without it, and the total time
        of the heaviest other item (0 without others). Nothing is removed."""
        sums = [sum(self.items[number]) for number in self.numbers]
        second, first = sorted([0, *sums])[-2:]
        return [
            (
                number,
                [load - time for load, time in zip(self.loads, self.items[number], strict=True)],
                second if total == first else first,
            )
            for number, total in zip(self.numbers, sums, strict=True)
        ]


def _swap_from_slowest(replicas: list[_ReplicaLoad]) -> bool:
    """Swap one item of the slowest replica with one of another replica: the best swap with the
    fastest replica that has a helpful one. Returns False, with nothing changed, if no swap
    helps."""
    by_score = sorted(replicas, key=lambda replica: replica.score)
    slowest = by_score.pop()
    without_own = slowest.without_each()
    for replica in by_score:
        found = _best_swap(without_own, replica, slowest)
        if found is not None:
            slowest.swap(found[0], replica, found[1])
            return True
    return False


def _best_swap(
    without_own: list[tuple[int, Times, float]], replica: _ReplicaLoad, slowest: _ReplicaLoad
) -> tuple[int, int] | None:
    """Find the pair of items (the slowest replica's, the other's) whose swap minimizes the larger
    of both scores, without swapping them; None if no swap brings both below the slowest one's
    score. `without_own` is `slowest.without_each()`."""
    items = slowest.items
    sums = {number: sum(items[number]) for number in (*slowest.numbers, *replica.numbers)}
    least, found = slowest.score, None
    busiest = slowest.loads.index(max(slowest.loads))
    without_other = replica.without_each()
    for number, loads, heaviest in without_own:
        item, total = items[number], sums[number]
        for other, other_loads, other_heaviest in without_other:
            others, other_total = items[other], sums[other]
            # The busiest rank's load rules out most swaps at little cost.
            if 2 * (loads[busiest] + others[busiest]) + max(heaviest, other_total) >= least:
                continue
            own = 2 * max(map(add, loads, others)) + max(heaviest, other_total)
            if own < least:
                its = 2 * max(map(add, other_loads, item)) + max(other_heaviest, total)
                if its < least:
                    least, found = max(own, its), (number, other)
    return found
