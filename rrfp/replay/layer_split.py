"""Which split of a model's layers over its stages evens out their work."""

from collections.abc import Sequence
from statistics import median_low

from rrfp.schedule.shape import Shape


def work_after(work_ns: Sequence[int], split: Sequence[int], even: Sequence[int]) -> list[float]:
    """What stages with so much work under one split would have under another, both in layers a
    stage.

    A stage in the middle consists of its layers. In the first and in the last one a layer takes as
    long as in the median stage of the middle, and the rest, the embedding or the loss, stays.
    """
    return [
        rest + rate * layers
        for (rest, rate), layers in zip(_costs(work_ns, split), even, strict=True)
    ]


def even_split(work_ns: Sequence[int], split: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """The split of the same layers whose busiest pipeline rank has least to do, by the costs of
    `work_after`. Every stage keeps a layer. `work_ns` is by stage, under `split`."""
    costs = _costs(work_ns, split)
    found = [1] * len(split)

    def load_with_another(stage: int) -> tuple[float, float]:
        """That of its rank; of equals, the stage with less itself."""
        rank = shape.rank_of(stage)
        of_rank = [each for each in range(len(split)) if shape.rank_of(each) == rank]
        loads = [costs[each][0] + costs[each][1] * found[each] for each in of_rank]
        return sum(loads) + costs[stage][1], loads[of_rank.index(stage)]

    for _ in range(sum(split) - len(split)):
        found[min(range(len(split)), key=load_with_another)] += 1
    return tuple(found)


def _costs(work_ns: Sequence[int], split: Sequence[int]) -> list[tuple[float, float]]:
    """By stage, what it does besides layers, and what a layer takes."""
    rates = [ns / layers for ns, layers in zip(work_ns, split, strict=True)]
    usual = median_low(rates[1:-1] or [min(rates)])
    last = len(rates) - 1
    return [
        (ns - min(usual, rate) * layers, min(usual, rate)) if stage in (0, last) else (0.0, rate)
        for stage, (ns, rate, layers) in enumerate(zip(work_ns, rates, split, strict=True))
    ]
