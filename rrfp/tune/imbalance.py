"""Whether the ranks' loads are uneven for good, which no order of tasks mends."""

from collections.abc import Sequence
from statistics import fmean

from rrfp.schedule.shape import Shape
from rrfp.tune.candidate import Candidate
from rrfp.tune.source import Source
from rrfp.tune.splits import loads

_EVEN = 0.03
"""The most loaded rank may have so much more than the mean, as a share."""


def imbalance(
    source: Source, work: Sequence[float], best: Candidate, seeds: Sequence[int]
) -> str | None:
    """A sentence on the loads of the ranks as the costs have them, and what the best candidate's
    split makes of them; None where they are even. `work` is by unit, or empty."""
    found = _loads(source, seeds)
    excess = max(found) / fmean(found) - 1
    if excess <= _EVEN:
        return None
    rank = found.index(max(found))
    sentence = (
        f"Pipeline rank {rank} has {excess:.0%} more to do than the mean of all; no order of tasks "
        "fixes that, only the split of the layers"
    )
    if source.layered is None:
        return f"{sentence}, which --layers N lets be searched."
    if not source.moves_layers or best.split is None:
        return f"{sentence}, which cannot be changed here."
    shape = Shape(source.shape.num_ranks, 1, best.chunks, best.placement)
    after = loads(best.split, work, source.layered.slowness(shape.num_ranks), shape)
    left = max(after) / fmean(after) - 1
    return f"{sentence}: that of the first proposal leaves {left:.0%}."


def _loads(source: Source, seeds: Sequence[int]) -> list[float]:
    """The mean time of each pipeline rank in a step."""
    shape = source.shape
    totals = [0.0] * shape.num_ranks
    for seed in seeds:
        times = source.costs.step(shape, seed, 0).times
        for rows in (times.forward, times.input_gradient, times.weight_gradient):
            for stage, row in enumerate(rows):
                totals[shape.rank_of(stage)] += sum(row)
    return totals
