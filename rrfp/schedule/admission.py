"""The order in which a step's microbatches are admitted, fixed before anything is dispatched.

The order is a permutation: `order[i]` is the index, in the data, of the microbatch admitted as
number i.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Value


class Admit(StrEnum):
    """How a step's microbatches are ordered, by name."""

    GIVEN = "given"
    PYRAMID = "pyramid"
    """Light microbatches at both ends of the step, heavy ones in the middle."""
    PLAN = "plan"
    """The order that simulations find before the step, at worst the pyramid
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
    """The order of a replica's step; `weigh` is called for its microbatches' weights only if they
    matter. A plan is made elsewhere, and is the pyramid here.

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
    """Sort by weight and deal alternately to the front and the back. Of two equal microbatches the
    earlier counts as lighter."""
    lightest_first = sorted(range(len(weights)), key=weights.__getitem__)
    return lightest_first[::2] + lightest_first[1::2][::-1]


def parse_admission(text: str, name: str, num_microbatches: int | None = None) -> ListedOrders:
    """Read an admission file: a line per step, its microbatches in the order in which they enter,
    separated by commas or spaces. Where data-parallel replicas differ, their orders follow one
    another, separated by semicolons. Empty lines are ignored.

    Raises UsageError, with the line, for one that does not name each of `num_microbatches`
    microbatches once, and for one with another number of replicas. By default the first line sets
    the number of microbatches.
    """
    orders: list[tuple[int, ...]] = []
    num_replicas: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{name}, line {number}"
        of_replicas = [part.replace(",", " ").split() for part in line.split(";")]
        if not any(of_replicas):
            continue
        if len(of_replicas) != (num_replicas or len(of_replicas)):
            raise UsageError(
                f"{where} has orders for {_replicas(len(of_replicas))} and the lines before it for "
                f"{num_replicas}; give each line as many"
            )
        num_replicas = len(of_replicas)
        for cells in of_replicas:
            num_microbatches = num_microbatches or len(cells)
            orders.append(_parse_line(cells, num_microbatches, where))
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


def format_admission(orders: Sequence[Sequence[int]]) -> str:
    """The line of a step, which `parse_admission` reads back: an order for each replica, or one for
    all."""
    return "; ".join(" ".join(map(str, order)) for order in orders) + "\n"


def _replicas(num: int) -> str:
    return "1 replica" if num == 1 else f"{num} replicas"


def _parse_line(cells: list[str], num_microbatches: int, where: str) -> tuple[int, ...]:
    order: dict[int, None] = {}
    for cell in cells:
        if not re.fullmatch(r"\d{1,9}", cell, re.ASCII) or int(cell) >= num_microbatches:
            raise UsageError(
                f"{where}: '{_shortened(cell)}' is not one of the {num_microbatches} microbatches; "
                f"write their numbers, from 0 to {num_microbatches - 1}"
            )
        if int(cell) in order:
            raise UsageError(f"{where}: {int(cell)} is listed twice; admit each microbatch once")
        order[int(cell)] = None
    if len(order) < num_microbatches:
        missing = next(each for each in range(num_microbatches) if each not in order)
        raise UsageError(
            f"{where} admits {len(order)} of {num_microbatches} microbatches; {missing} is "
            "missing, add it"
        )
    return tuple(order)


def _shortened(cell: str) -> str:
    return cell if len(cell) <= 20 else f"{cell[:20]}..."
