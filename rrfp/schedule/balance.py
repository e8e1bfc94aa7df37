"""Deals the items of a global batch to the data-parallel replicas, by what they are known to cost.

A step ends with its slowest replica. How long a replica takes follows its load, and its heaviest
item too: that one passes all stages one after the other, and the others fill the gaps only in part.
So replicas are balanced by the sum of their load and half of their heaviest item's time through all
stages. Each gets as many items as the others, because a schedule has one number of microbatches.

The items of a global batch are numbered replica by replica, as the data give them: with M
microbatches a step, item i of replica r has number r * M + i.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Value

Times = Sequence[float]
"""What an item takes on each pipeline rank, in any unit."""

Hands = Sequence[Sequence[int]]
"""The numbers of the items that each replica gets."""


class AdmitAcross(StrEnum):
    """Among whom the items of a global batch are dealt, by name."""

    NONE = "none"
    """Every replica keeps what the data give it."""
    REPLICAS = "replicas"


@dataclass(frozen=True, slots=True)
class ListedDealings(Value):
    """The dealings of a file, one per step; after the last they start over."""

    name: str
    """The file's name."""
    steps: tuple[Hands, ...]
    """Each replica's items in the order in which they enter."""

    def of_step(self, step: int, num_replicas: int, num_microbatches: int) -> Hands:
        """Raises UsageError for a dealing to another number of replicas or of microbatches."""
        hands = self.steps[step % len(self.steps)]
        if (len(hands), len(hands[0])) != (num_replicas, num_microbatches):
            raise UsageError(
                f"{self.name} deals {len(hands[0])} microbatches to each of {len(hands)} replicas, "
                f"and step {step} has {num_microbatches} for each of {num_replicas}; give it "
                "lines of that many"
            )
        return hands


Dealing = AdmitAcross | ListedDealings


def deal(items: Sequence[Times], num_replicas: int) -> list[list[int]]:
    """The numbers of the items that each replica gets, ascending.

    The number of items is a multiple of `num_replicas`. Heavy items are dealt first, each to the
    replica that is the fastest with it. Then the slowest replica swaps items with others, as long
    as that leaves both faster than it was. Equal arguments give equal dealings.
    """
    num_each = len(items) // num_replicas
    hands = [_Hand(items) for _ in range(num_replicas)]
    for number in sorted(range(len(items)), key=lambda each: -sum(items[each])):
        open_hands = [hand for hand in hands if len(hand.numbers) < num_each]
        min(open_hands, key=lambda hand: hand.score_with(number)).add(number)
    for _ in range(_MOST_SWAPS_PER_ITEM * len(items)):
        if not _swap_from_slowest(hands):
            break
    return [sorted(hand.numbers) for hand in hands]


def even_times(weights: Sequence[float], num_ranks: int) -> list[Times]:
    """The times of items that are known by one number each: all ranks take equally long."""
    return [[weight] * num_ranks for weight in weights]


def format_dealing(hands: Hands) -> str:
    """The line of a step, which `parse_dealings` reads back."""
    return "; ".join(" ".join(map(str, hand)) for hand in hands) + "\n"


def parse_dealings(text: str, name: str) -> ListedDealings:
    """Read a file of dealings: a line per step, with the items of each replica in the order in
    which they enter, separated by commas or spaces, and the replicas by semicolons. Empty lines are
    ignored.

    Raises UsageError, with the line, for one that does not deal each item of a global batch once,
    or not as many to each replica.
    """
    steps = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [hand.replace(",", " ").split() for hand in line.split(";")]
        if any(cells):
            steps.append(_parse_line(cells, f"{name}, line {number}"))
    if not steps:
        raise UsageError(f"{name} deals nothing; write a line of items, such as 0 3; 1 2")
    return ListedDealings(name, tuple(steps))


def _parse_line(cells: list[list[str]], where: str) -> Hands:
    counts = sorted({len(hand) for hand in cells})
    if len(counts) > 1:
        raise UsageError(
            f"{where} deals {counts[0]} items to one replica and {counts[-1]} to another; deal as "
            "many to each"
        )
    num_items = len(cells) * counts[0]
    seen: set[int] = set()
    for cell in (cell for hand in cells for cell in hand):
        if not re.fullmatch(r"\d{1,9}", cell, re.ASCII) or int(cell) >= num_items:
            told = cell if len(cell) <= 20 else f"{cell[:20]}..."
            raise UsageError(
                f"{where}: '{told}' is not one of the {num_items} items; write their numbers, from "
                f"0 to {num_items - 1}"
            )
        if int(cell) in seen:
            raise UsageError(f"{where}: {int(cell)} is dealt twice; deal each item once")
        seen.add(int(cell))
    return tuple(tuple(map(int, hand)) for hand in cells)


_MOST_SWAPS_PER_ITEM = 4
"""Later ones gain next to nothing."""


class _Hand:
    """The items of one replica."""

    def __init__(self, items: Sequence[Times]) -> None:
        self.items = items
        self.numbers: list[int] = []
        self.loads: Times = [0] * len(items[0])
        self.heaviest = 0.0
        self.score = 0.0

    def add(self, number: int) -> None:
        self.numbers.append(number)
        self._count()

    def swap(self, number: int, other: "_Hand", others: int) -> None:
        """Give away an item for one of another replica's."""
        self.numbers[self.numbers.index(number)] = others
        other.numbers[other.numbers.index(others)] = number
        self._count()
        other._count()

    def _count(self) -> None:
        own = [self.items[number] for number in self.numbers]
        self.loads = [sum(of_rank) for of_rank in zip(*own, strict=True)]
        self.heaviest = max(map(sum, own))
        self.score = 2 * max(self.loads) + self.heaviest

    def score_with(self, number: int) -> float:
        """The score with one more item."""
        item = self.items[number]
        loads = (load + time for load, time in zip(self.loads, item, strict=True))
        return 2 * max(loads) + max(self.heaviest, sum(item))

    def without_each(self) -> list[tuple[int, Times, float]]:
        """Each item, the loads without it, and the heaviest of the others."""
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


def _swap_from_slowest(hands: list[_Hand]) -> bool:
    """Make the swap of the slowest replica with the fastest one possible that helps it most; False
    if no swap helps."""
    by_score = sorted(hands, key=lambda hand: hand.score)
    slowest = by_score.pop()
    given = slowest.without_each()
    for hand in by_score:
        found = _best_swap(given, hand, slowest)
        if found is not None:
            slowest.swap(found[0], hand, found[1])
            return True
    return False


def _best_swap(
    given: list[tuple[int, Times, float]], hand: _Hand, slowest: _Hand
) -> tuple[int, int] | None:
    """The two items whose swap leaves the slower of both hands the fastest, and faster than the
    slowest was."""
    items = slowest.items
    sums = {number: sum(items[number]) for number in (*slowest.numbers, *hand.numbers)}
    least, found = slowest.score, None
    busiest = slowest.loads.index(max(slowest.loads))
    taken = hand.without_each()
    for number, loads, heaviest in given:
        item, total = items[number], sums[number]
        for other, other_loads, other_heaviest in taken:
            others, other_total = items[other], sums[other]
            # One rank's load, to leave out most swaps at little cost.
            if 2 * (loads[busiest] + others[busiest]) + max(heaviest, other_total) >= least:
                continue
            own = 2 * max(map(add, loads, others)) + max(heaviest, other_total)
            if own < least:
                its = 2 * max(map(add, other_loads, item)) + max(other_heaviest, total)
                if its < least:
                    least, found = max(own, its), (number, other)
    return found
