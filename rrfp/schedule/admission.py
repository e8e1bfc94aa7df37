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
        """The order of a replica in the step of this number, from 0."""
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
    """The admission order of a replica's step. `weigh` computes the microbatches' weights, and is
    called only if they matter. For `plan` this is the pyramid, from which planning starts.

    Raises UsageError when the order is listed for another number of microbatches.
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
    """The order that sorts microbatches by weight and puts them alternately at the front and the
    back. Of two equal microbatches the earlier counts as lighter."""
    lightest_first = sorted(range(len(weights)), key=weights.__getitem__)
    return lightest_first[::2] + lightest_first[1::2][::-1]


def parse_admission(text: str, name: str, num_microbatches: int | None = None) -> ListedOrders:
    """Read an admission file: a line per step, with its microbatches in the order in which they
    enter, separated by commas or spaces. Where data-parallel replicas differ, semicolons separate
    their orders. Empty lines are ignored.

    Raises UsageError, with the line, unless it names each of `num_microbatches` microbatches once,
    for as many replicas as the lines before. By default the first line sets the number of
    microbatches.
    """
    orders: list[tuple[int, ...]] = []
    num_replicas: int | None = None
    for of_replicas, where in _cells_of_lines(text, name):
        if len(of_replicas) != (num_replicas or len(of_replicas)):
            raise UsageError(
                f"{where} has orders for {_replicas(len(of_replicas))} and the lines before it for "
                f"{num_replicas}; give each line as many"
            )
        num_replicas = len(of_replicas)
        for cells in of_replicas:
            num_microbatches = num_microbatches or len(cells)
            orders.append(_parse_order(cells, num_microbatches, where))
    if not orders:
        raise UsageError(f"{name} admits nothing; write a line of microbatches, such as 1 0 2")
    return ListedOrders(name, tuple(orders), num_replicas or 1)


def check_replicas(admission: Admission, num_replicas: int) -> None:
    """Raise UsageError for orders that are listed for another number of replicas, unless all take
    the same."""
    if isinstance(admission, ListedOrders) and admission.num_replicas not in (1, num_replicas):
        raise UsageError(
            f"{admission.name} has orders for {_replicas(admission.num_replicas)} and there "
            f"{'is 1' if num_replicas == 1 else f'are {num_replicas}'}; give each line as many, or "
            "one order for all"
        )


def format_step(orders: Sequence[Sequence[int]]) -> str:
    """Format the line of a step, which `parse_admission` and `parse_assignments` read back: the
    numbers of each replica, or one order for all."""
    return "; ".join(" ".join(map(str, order)) for order in orders) + "\n"


def _replicas(num: int) -> str:
    return "1 replica" if num == 1 else f"{num} replicas"


def _cells_of_lines(text: str, name: str) -> Iterator[tuple[list[list[str]], str]]:
    """The cells of each line that is not empty, by replica, and what errors call the line."""
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [part.replace(",", " ").split() for part in line.split(";")]
        if any(cells):
            yield cells, f"{name}, line {number}"


def _parse_number(cell: str, num: int, noun: str, where: str) -> int:
    """Read a number below `num`. Raises UsageError for anything else."""
    if not re.fullmatch(r"\d{1,9}", cell, re.ASCII) or int(cell) >= num:
        quoted = cell if len(cell) <= 20 else f"{cell[:20]}..."
        raise UsageError(
            f"{where}: '{quoted}' is not one of the {num} {noun}; write their numbers, from 0 to "
            f"{num - 1}"
        )
    return int(cell)


def _parse_order(cells: list[str], num_microbatches: int, where: str) -> tuple[int, ...]:
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
        """The assignment of a step. Raises UsageError for another number of replicas or of
        microbatches."""
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
    """Assign the items of a global batch to replicas; return the numbers of each replica's items,
    ascending. Equal arguments give equal assignments.

    The number of items must be a multiple of `num_replicas`. Heavy items are assigned first, each
    to the replica that is the fastest with it. Then the slowest replica swaps items with others, as
    long as that leaves both faster than it was.
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
    """Give each item its weight as its time on every pipeline rank."""
    return [[weight] * num_ranks for weight in weights]


def parse_assignments(text: str, name: str) -> ListedAssignments:
    """Read an assignment file: a line per step, with the items of each replica in the order in
    which they enter, separated by commas or spaces, and the replicas by semicolons. Empty lines are
    ignored.

    Raises UsageError, with the line, unless it assigns each item of a global batch once and equally
    many to each replica.
    """
    steps = [_parse_assignment_line(cells, where) for cells, where in _cells_of_lines(text, name)]
    if not steps:
        raise UsageError(f"{name} assigns nothing; write a line of items, such as 0 3; 1 2")
    return ListedAssignments(name, tuple(steps))


def _parse_assignment_line(cells: list[list[str]], where: str) -> Assignment:
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
        self.numbers.append(number)
        self._update()

    def swap(self, number: int, other: "_ReplicaLoad", others: int) -> None:
        """Exchange an item for one of another replica's."""
        self.numbers[self.numbers.index(number)] = others
        other.numbers[other.numbers.index(others)] = number
        self._update()
        other._update()

    def _update(self) -> None:
        """Recompute the loads by pipeline rank, the heaviest item, and the score, which is smaller
        for a faster replica."""
        own = [self.items[number] for number in self.numbers]
        self.loads = [sum(of_rank) for of_rank in zip(*own, strict=True)]
        self.heaviest = max(map(sum, own))
        self.score = 2 * max(self.loads) + self.heaviest

    def score_with(self, number: int) -> float:
        """The score that the replica would have with one more item."""
        item = self.items[number]
        loads = (load + time for load, time in zip(self.loads, item, strict=True))
        return 2 * max(loads) + max(self.heaviest, sum(item))

    def without_each(self) -> list[tuple[int, Times, float]]:
        """For each item: its number, the loads without it, and the heaviest of the other items."""
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
    """Make the best swap of the slowest replica with the fastest replica for which one helps; False
    if no swap helps."""
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
    """The pair of items (the slowest replica's, the other's) whose swap minimizes the larger of
    both scores; None if no swap lowers it. `without_own` is `slowest.without_each()`."""
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
