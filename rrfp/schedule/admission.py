"""The order in which a step's microbatches are admitted, fixed before anything is dispatched.

The order is a permutation: `order[i]` is the index, in the data, of the microbatch admitted as
number i.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rrfp.errors import UsageError


class Admit(StrEnum):
    """How a step's microbatches are ordered, by name."""

    GIVEN = "given"
    PYRAMID = "pyramid"
    """Light microbatches at both ends of the step, heavy ones in the middle."""


@dataclass(frozen=True, slots=True)
class ListedOrders:
    """The orders of an admission file, one per step; after the last they start over."""

    name: str
    """The file's name."""
    orders: tuple[tuple[int, ...], ...]

    def of_step(self, step: int) -> tuple[int, ...]:
        return self.orders[step % len(self.orders)]


Admission = Admit | ListedOrders


def admission_order(
    admission: Admission,
    step: int,
    num_microbatches: int,
    weigh: Callable[[], Sequence[float]],
) -> Sequence[int]:
    """The order of a step; `weigh` is called for its microbatches' weights only if they matter.

    Raises UsageError when the order is listed for another number of microbatches.
    """
    if isinstance(admission, ListedOrders):
        order = admission.of_step(step)
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
    separated by commas or spaces. Empty lines are ignored.

    Raises UsageError, with the line, for one that does not name each of `num_microbatches`
    microbatches once. By default the first line sets the number.
    """
    orders: list[tuple[int, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.replace(",", " ").split()
        if cells:
            num_microbatches = num_microbatches or len(cells)
            orders.append(_parse_line(cells, num_microbatches, f"{name}, line {number}"))
    if not orders:
        raise UsageError(f"{name} admits nothing; write a line of microbatches, such as 1 0 2")
    return ListedOrders(name, tuple(orders))


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
