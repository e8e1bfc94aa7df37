"""Clocks put right by causality: no task begins before the task that gives it its input ends."""

from collections.abc import Mapping

Link = tuple[int, int]
"""From one rank to another."""


def least_shifts(slacks_ns: Mapping[Link, int], ranks: list[int]) -> dict[int, int] | None:
    """The least to add to each rank's clock, from 0 on, so that no message comes before it is sent;
    None if no shift achieves that.

    `slacks_ns` is, by link, the least time that a message seems to have taken.
    """
    shifts_ns = dict.fromkeys(ranks, 0)
    for _ in ranks:
        is_settled = True
        for (source, destination), slack_ns in slacks_ns.items():
            least_ns = shifts_ns[source] - slack_ns
            if shifts_ns[destination] < least_ns:
                shifts_ns[destination] = least_ns
                is_settled = False
        if is_settled:
            return shifts_ns
    return None
