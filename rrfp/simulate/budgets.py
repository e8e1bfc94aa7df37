"""Budgets in bytes that are given as a multiple of what 1F1B keeps."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from rrfp.errors import UsageError
from rrfp.schedule.hold import Bytes, ShareOf1F1B, told_bytes
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.simulate.costs.model import Costs


def resolved(
    policy: Policy, shape: Shape, costs: Costs, steps: Sequence[tuple[int, int]]
) -> Policy:
    """The policy with its share of 1F1B's peak as a number; any other policy as it is.

    The peak is the largest over ranks and `steps`, which are (seed, replica) pairs. Where the costs
    say nothing of memory, microbatches are of one size, and the peak is theirs. Raises UsageError
    for a hold in bytes where they say nothing, and for one below what some step needs.
    """
    share = policy.hold
    if isinstance(share, Bytes):
        _check_suffices(share, shape, costs, steps)
    if not isinstance(share, ShareOf1F1B):
        return policy
    peaks = [peak_of_1f1b(costs, shape, seed, replica) for seed, replica in steps]
    known = [peak for peak in peaks if peak is not None]
    if len(known) == len(peaks):
        hold = Bytes(int(share.factor * max(known)))
        _check_suffices(hold, shape, costs, steps)
        return replace(policy, hold=hold)
    num_chunks = shape.num_chunks
    peak = min(shape.num_ranks, shape.num_microbatches) * num_chunks
    num_slots = max(num_chunks, int(share.factor * peak))
    return replace(policy, hold=Fraction(num_slots, num_chunks))


def _check_suffices(
    hold: Bytes, shape: Shape, costs: Costs, steps: Sequence[tuple[int, int]]
) -> None:
    """Raise UsageError for a hold with which a rank could get stuck in one of the steps, with the
    least one that is enough for all."""
    least = 0
    for seed, replica in steps:
        sizes = costs.step(shape, seed, replica).sizes
        if sizes is None:
            raise UsageError(
                f"a hold of {hold} needs to know what microbatches keep, and the costs do not say "
                "it; give the costs bytes, or the hold in microbatches"
            )
        of_ranks = (sizes.of(shape.stages_of(rank)) for rank in range(shape.num_ranks))
        least = max(least, *(each.least_budget for each in of_ranks))
    if hold.num < least:
        raise UsageError(
            f"the hold of {told_bytes(hold.num)} ({hold.num} bytes) is below the "
            f"{told_bytes(least)} that the heaviest microbatches of these steps take on their way "
            f"through a rank's chunks; set it to {least}B or more"
        )


def peak_of_1f1b(costs: Costs, shape: Shape, seed: int, replica: int) -> int | None:
    """The largest sum of bytes, over ranks, that 1F1B keeps at once in a step with as many ranks
    and microbatches, in the order given by the data; None if the costs say nothing of memory.

    1F1B has one chunk per rank. Costs that are given by chunk count a rank's chunks as one.
    """
    try:
        whole = costs.step(Shape(shape.num_ranks, shape.num_microbatches), seed, replica).sizes
    except UsageError:
        if shape.num_chunks == 1:
            raise
        whole = (
            None if (own := costs.step(shape, seed, replica).sizes) is None else by_rank(own, shape)
        )
    if whole is None:
        return None
    return widest_of_1f1b(whole)


def widest_of_1f1b(whole: Sizes) -> int:
    """The largest sum that 1F1B keeps at once on any rank; `whole` has a row for each."""
    num_ranks = len(whole.kept)
    # Rank r starts the microbatch num_ranks - r places after the one whose backward it ends.
    return max(_widest(row, num_ranks - rank) for rank, row in enumerate(whole.kept))


def by_rank(sizes: Sizes, shape: Shape) -> Sizes:
    """Sizes of whole ranks, all chunks of a rank added up."""
    return Sizes(
        [
            [sum(each) for each in zip(*sizes.of(shape.stages_of(rank)).kept, strict=True)]
            for rank in range(shape.num_ranks)
        ]
    )


def _widest(row: Sequence[int], width: int) -> int:
    """The largest sum of so many neighbours."""
    sums = [0, *accumulate(row)]
    return max(sums[end] - sums[max(0, end - width)] for end in range(1, len(sums)))
