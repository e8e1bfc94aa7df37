"""Splits of a model's layers over stages, by the work of each rank alone."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.units import Layered


def loads(
    split: Sequence[int], work: Sequence[float], slowness: Sequence[float], shape: Shape
) -> list[float]:
    """The work of each pipeline rank; `work` is by unit, embedding and head included."""
    sums = list(accumulate(work, initial=0.0))
    ends = list(accumulate(split, initial=1))
    ends[0], ends[-1] = 0, len(work)
    found = [0.0] * shape.num_ranks
    for stage in range(shape.num_stages):
        rank = shape.rank_of(stage)
        found[rank] += slowness[rank] * (sums[ends[stage + 1]] - sums[ends[stage]])
    return found


def work_of(
    layered: Layered, num_ranks: int, num_microbatches: int, seeds: Sequence[int]
) -> list[float]:
    """The mean time of a microbatch for each unit, all kinds together, on a rank of speed 1."""
    totals: list[float] = []
    for seed in seeds:
        units = layered.units(num_ranks, num_microbatches, seed, 0)
        of_step = sum(rows.mean(axis=1) for rows in units.times_ns.values())
        found = [float(each) for each in of_step]
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return [each / len(seeds) for each in totals]


def moves(split: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every split with one layer moved from a stage to another."""
    last = len(split) - 1
    for giver, layers in enumerate(split):
        # Only the first and the last stage have something else to do.
        if layers <= (0 if giver in (0, last) else 1):
            continue
        for taker in range(len(split)):
            if taker != giver:
                moved = list(split)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


def balanced(
    begin: Sequence[int], work: Sequence[float], slowness: Sequence[float], shape: Shape
) -> tuple[int, ...]:
    """The split in which the most loaded rank has least to do, found from `begin` by moving one
    layer after the other; of equals, the one with the most even loads."""

    def badness(split: Sequence[int]) -> tuple[float, float]:
        found = loads(split, work, slowness, shape)
        return max(found), sum(each * each for each in found)

    best, least = tuple(begin), badness(begin)
    while True:
        better = min((badness(each), each) for each in (best, *moves(best)))
        if better[0] >= least:
            return best
        least, best = better
