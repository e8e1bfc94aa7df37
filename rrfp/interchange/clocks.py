"""Clocks put right by causality: no task begins before what it takes has ended."""

from collections.abc import Mapping

Link = tuple[int, int]
"""From one rank to another."""


def least_shifts(slacks_ns: Mapping[Link, int], ranks: list[int]) -> dict[int, int] | None:
    """What to add to each rank's clock so that no message comes before it is sent; as little as
    does it, and never less than 0. None: no shift does.

    `slacks_ns` is, by link, the least time in which a message seems to have come.
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
