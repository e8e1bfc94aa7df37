"""What microbatches keep once a replay has evened them, or the stages. Their sums stay."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median_low

from rrfp.schedule.sizes import Rows, Sizes


def evened(of_replicas: Sequence[Sizes | None]) -> list[Sizes | None]:
    """The sizes of replicas whose microbatches all keep the same on a stage, to the byte."""
    known = [sizes for sizes in of_replicas if sizes is not None]
    if len(known) < len(of_replicas):
        return list(of_replicas)
    kept = _evened([sizes.kept for sizes in known])
    owed = [sizes.owed for sizes in known if sizes.owed is not None]
    if not owed:
        return [Sizes(rows) for rows in kept]
    return [Sizes(*rows) for rows in zip(kept, _evened(owed), strict=True)]


def without_heavy(sizes: Sizes) -> Sizes:
    """No microbatch keeps more on a stage than the median one does."""

    def rows(of: Rows) -> Rows:
        return [[min(size, median_low(row)) for size in row] for row in of]

    return Sizes(rows(sizes.kept), None if sizes.owed is None else rows(sizes.owed))


def divided(sizes: Sizes, divide: Callable[[Sequence[int]], Sequence[float]]) -> Sizes:
    """Each microbatch's bytes divided anew over the stages; `divide` gives the shares of one, from
    what it keeps by stage."""
    kept = _divided(sizes.kept, divide)
    if sizes.owed is None:
        return Sizes(kept)
    owed = [
        [min(pair) for pair in zip(*rows, strict=True)]
        for rows in zip(_divided(sizes.owed, divide), kept, strict=True)
    ]
    return Sizes(kept, owed)


def _evened(of_replicas: Sequence[Rows]) -> list[Rows]:
    replicas = range(len(of_replicas))
    found: list[list[Sequence[int]]] = [[] for _ in replicas]
    for rows in zip(*of_replicas, strict=True):
        num = len(rows[0])
        total = sum(map(sum, rows))
        parts = [(total + place) // (num * len(rows)) for place in range(num * len(rows))]
        for replica in replicas:
            found[replica].append(parts[replica * num : (replica + 1) * num])
    return list(found)


def _divided(rows: Rows, divide: Callable[[Sequence[int]], Sequence[float]]) -> list[list[int]]:
    columns = [_apportioned(sum(column), divide(column)) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """A whole number in whole parts, as near to these shares as their sum allows."""
    whole = sum(shares)
    if not whole:
        return [0] * len(shares)
    ends = [round(total * part / whole) for part in accumulate(shares, initial=0.0)]
    return [end - start for start, end in pairwise(ends)]
