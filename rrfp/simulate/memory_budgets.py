"""The price of a memory bound that is too low to fill the pipeline, and holds relative to 1F1B.

The price is found by simulating a step of equal tasks: F, B and W of one length, and free messages.
The measure is 1F1B of the same chunks (interleaved, if there are several), whose time is known:
with C chunks on each of N ranks, M microbatches take C * max(M, N) + min(M, N) - 1 times as long as
one microbatch takes on one chunk. A hint that takes longer even without a bound is measured against
that, so that the price covers only the bound itself.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import sqrt

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import Order, OrderFile, kinds_of
from rrfp.schedule.policy import Bytes, Dispatch, Policy, ShareOf1F1B, filling_limit, format_bytes
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import play

_log = logging.getLogger(__name__)

_TASK_NS = 1000

_TOLERANCE = 1.01
"""How many times as long as 1F1B a step may take under a bound that fills the pipeline."""

_MOST_FORWARDS = 2**15
"""The largest number of forwards of a simulated step, which then takes some 60 ms. A larger step is
simulated with fewer ranks and a bound that is lower in proportion. Where ranks of several chunks
drain, more of them pay more."""

_NUM_ROUNDS = 8
"""The most microbatches of a simulated step, for each rank; more hardly change the price."""


@dataclass(frozen=True, slots=True)
class UnfilledPipeline:
    """A bound that cannot fill the pipeline."""

    flag: str
    """The name of the bound: limit or hold."""
    bound: int
    num_stages: int
    price: float
    """How many times as long a step takes."""
    enough: int | None
    """A higher bound, which fills the pipeline; None if no bound does under this hint."""

    def describe(self) -> str:
        """Format a sentence with the bound, its price and a remedy: the bound that is enough or, if
        there is none, another hint."""
        instead = (
            "choose a hint that needs less, such as bfw-deep"
            if self.enough is None
            else f"use {self.enough} or more"
        )
        return (
            f"{self.flag} {self.bound} cannot fill a pipeline of {self.num_stages} stages: a step "
            f"takes about {self.price:.3g} times as long (simulated, equal tasks); {instead}, or "
            f"leave --{self.flag} out"
        )


class BoundWarning:
    """The warning about a bound of a run's policy, which is logged at most once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._has_checked = False

    def warn_once(self, shape: Shape) -> None:
        """Warn if a bound cannot fill the pipeline of this shape, or about the memory that it takes
        without one. Only the first call checks, at the first training step."""
        if not self._has_checked:
            self._has_checked = True
            found = unfilled(self._policy, shape)
            warning = unbounded(self._policy, shape) if found is None else found.describe()
            if warning is not None:
                _log.warning("%s", warning)


def unfilled(policy: Policy, shape: Shape) -> UnfilledPipeline | None:
    """Find out by simulating equal tasks whether a limit or hold that a user set as a number is too
    low to fill a pipeline of this shape: a step takes over 1% longer than 1F1B's and than without
    the bound. None if not, for any other policy, and for an order file, or an order made for the
    shape, with over 2**15 forwards. Raises UsageError for a hint that does not fit the shape."""
    flag, bound = ("limit", policy.limit) if policy.hold is None else ("hold", policy.hold)
    is_asked = policy.dispatch is Dispatch.READY and not policy.limits_by_shape
    if not is_asked or not isinstance(bound, int) or not _withholds(flag, bound, shape):
        return None
    if isinstance(policy.hint, Order | OrderFile):  # It is of this shape alone.
        if shape.num_ranks * _num_forwards_of_a_rank(shape) > _MOST_FORWARDS:
            return None
        small = shape
        policy = replace(policy, hint=policy.hint.for_shape(shape))
    else:
        small = _smaller(shape)

    def time_ns(asked: int | None) -> int:
        scaled = None if asked is None else max(1, asked * small.num_ranks // shape.num_ranks)
        if flag == "limit":
            return _time_ns(replace(policy, limit=scaled), small)
        return _time_ns(replace(policy, hold=scaled), small)

    best_ns, under_it_ns = _time_of_1f1b_ns(small), time_ns(bound)
    if under_it_ns <= _TOLERANCE * best_ns:
        return None
    best_ns = max(best_ns, time_ns(None))
    price = under_it_ns / best_ns
    if price <= _TOLERANCE:
        return None
    return UnfilledPipeline(
        flag, bound, shape.num_stages, price, _enough(policy, flag, bound, shape)
    )


def unbounded(policy: Policy, shape: Shape) -> str | None:
    """Return a warning that ranks may keep nearly all microbatches, if the usual limit is to be
    chosen but none fills the pipeline; None otherwise, and for at most twice as many microbatches
    as interleaved 1F1B keeps. Raises UsageError for a hint that does not fit the shape."""
    if not policy.limits_by_shape or policy.of_shape(shape).limit is not None:
        return None
    # 1F1B runs N (C + 1) - 1 forwards ahead (docs/decisions/0036-usual-limit.md).
    usual = -(-(shape.num_ranks * (shape.num_chunks + 1) - 1) // shape.num_chunks)
    if shape.num_microbatches <= 2 * usual:
        return None
    return (
        f"{policy.hint.name} over {shape.num_chunks} chunks fills the pipeline only without a "
        f"limit, so a rank may keep the activations of nearly all {shape.num_microbatches} "
        f"microbatches, where interleaved 1F1B keeps those of about {usual}; if memory is short, "
        "use --hint interleaved or --hint bfw-deep, which have limits, or set --hold"
    )


def _enough(policy: Policy, flag: str, bound: int, shape: Shape) -> int | None:
    """Return a limit or hold that fills the pipeline, by a formula; None if none does, or if it is
    not above `bound`."""
    limit = filling_limit(policy.hint.for_shape(shape), shape)
    if limit is None:
        return None
    enough = limit if flag == "limit" else -(-limit // shape.num_chunks)
    return enough if enough > bound else None


def _num_forwards_of_a_rank(shape: Shape) -> int:
    """Return the number of chunks times that of microbatches."""
    return shape.num_chunks * shape.num_microbatches


def _withholds(flag: str, bound: int, shape: Shape) -> bool:
    """True if a bound can withhold a forward: it is below the rank's number of microbatches (hold)
    or of forwards (limit)."""
    num = shape.num_microbatches if flag == "hold" else _num_forwards_of_a_rank(shape)
    return bound < num


def _smaller(shape: Shape) -> Shape:
    """Return a shape like this one that is quick to simulate: at most 8 microbatches per rank, and
    fewer ranks if there are too many forwards."""
    num_ranks = shape.num_ranks
    num_microbatches = min(shape.num_microbatches, _NUM_ROUNDS * num_ranks)
    num_forwards = num_ranks * shape.num_chunks * num_microbatches
    if num_forwards > _MOST_FORWARDS:
        num_ranks = max(2, int(num_ranks * sqrt(_MOST_FORWARDS / num_forwards)))
    num_microbatches = max(1, num_microbatches * num_ranks // shape.num_ranks)
    return replace(shape, num_ranks=num_ranks, num_microbatches=num_microbatches)


def _time_of_1f1b_ns(shape: Shape) -> int:
    """Return 1F1B's time for a step of equal tasks of 1000 ns by formula, without simulating it."""
    fewer, more = sorted((shape.num_ranks, shape.num_microbatches))
    return 3 * _TASK_NS * (shape.num_chunks * more + fewer - 1)


def _time_ns(policy: Policy, shape: Shape) -> int:
    """Simulate a step of equal tasks of 1000 ns and free messages under a policy; return its
    time."""
    hint = policy.hint.for_shape(shape)
    shape = replace(shape, kinds=kinds_of(hint))
    rows = [[_TASK_NS] * shape.num_microbatches] * shape.num_stages
    world = StepConditions(TaskTimes(rows, rows, rows))
    return play(shape, replace(policy, hint=hint, order=None), world).makespan_ns


# Budgets in bytes that are given as a multiple of what 1F1B keeps.


def resolved(
    policy: Policy, shape: Shape, costs: Costs, steps: Sequence[tuple[int, int]]
) -> Policy:
    """Return the policy with a share of 1F1B's peak resolved to a number; any other policy as it
    is.

    The peak is the largest over ranks and `steps`, which are (seed, replica) pairs; it is in bytes,
    or in microbatches (then the hold is at least one) if the costs say nothing of memory. Raises
    UsageError for a hold in bytes where they say nothing, and for one below what some step needs.
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
    """Raise UsageError if the costs say nothing of memory, and for a hold with which a rank could
    get stuck in one of the steps; the error names the least one that is enough for all."""
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
            f"the hold of {format_bytes(hold.num)} ({hold.num} bytes) is below the "
            f"{format_bytes(least)} that the heaviest microbatches of these steps take on "
            f"their way through a rank's chunks; set it to {least}B or more"
        )


def peak_of_1f1b(costs: Costs, shape: Shape, seed: int, replica: int) -> int | None:
    """Return the most bytes that 1F1B keeps at once on any rank in a step with as many ranks and
    microbatches, in the order given by the data; None if the costs say nothing of memory.

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
    return peak_bytes_of_1f1b(whole)


def peak_bytes_of_1f1b(whole: ActivationSizes) -> int:
    """Return the most bytes that 1F1B keeps at once on any rank; `whole` has a row for each rank.
    Rank r of N keeps at most N - r consecutive microbatches."""
    num_ranks = len(whole.activations)
    # Rank r starts the microbatch num_ranks - r places after the one whose backward it ends.
    return max(_widest(row, num_ranks - rank) for rank, row in enumerate(whole.activations))


def by_rank(sizes: ActivationSizes, shape: Shape) -> ActivationSizes:
    """Return activation sizes of whole ranks: all chunks of a rank added up, without the bytes
    pending for W."""
    return ActivationSizes(
        [
            [sum(each) for each in zip(*sizes.of(shape.stages_of(rank)).activations, strict=True)]
            for rank in range(shape.num_ranks)
        ]
    )


def _widest(row: Sequence[int], width: int) -> int:
    """Return the largest sum of at most `width` consecutive entries."""
    sums = [0, *accumulate(row)]
    return max(sums[end] - sums[max(0, end - width)] for end in range(1, len(sums)))
