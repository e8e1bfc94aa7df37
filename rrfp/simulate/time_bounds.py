"""Bounds on a step's time: the floor that no schedule can beat, and the paper's upper bound.

Every microbatch passes through one chain: F of stage 0, 1, .., S-1, then B of stage S-1, .., 1, 0.
Between two tasks of the chain on different ranks there is a message. If the backward is split, a W
follows each B, and nothing follows a W. Two facts bound every schedule from below, whatever its
order, chunks and placement:

1. *A rank's load.* A rank runs one task at a time. Its first task is on its first stage in the
   chain, no earlier than the shortest *way in*: the time that some microbatch takes to reach it.
   It ends its part of the chain (F and B) with a task at its last place in the chain, no earlier
   than `way in + F and B`. Then some microbatch must still pass through the rest of the chain,
   where each B may have a W beside it: no less than the shortest *way out*. And all of the rank's
   own W must run: those before that end delay it by as much, those after it take their time.
   Together: `way in + F and B + max(way out, W)`.
2. *The critical path.* The chain of one microbatch, with the W that ends last.

A message counts with the time that it takes alone. Waiting for a link or for the other end of a
blocking transfer only adds to it, as do bounds on memory, rounds of agreement and any delay.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import TaskTimes, Transfer


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound on a step's time, in nanoseconds, and what it is made of."""

    load_ns: int
    """The largest load of a rank, alone."""
    way_ns: int
    """The largest sum, over ranks, of way in, load and way out."""
    critical_path_ns: int
    """The longest chain of dependent tasks."""

    @property
    def ns(self) -> int:
        """The lower bound that results are compared with: the larger of `way_ns` and the critical
        path."""
        return max(self.way_ns, self.critical_path_ns)


@dataclass(frozen=True, slots=True)
class _Place:
    """One place in the chain; lists are by microbatch, in nanoseconds."""

    rank: int
    message_ns: Sequence[int]
    """The message before the task."""
    task_ns: Sequence[int]
    aside_ns: Sequence[int]
    """The W that may start when the task ends; the chain does not wait for it."""


def floor(shape: Shape, times: TaskTimes, transfer: Transfer | None = None) -> Floor:
    """Compute lower bounds on one pipeline's step, which no schedule can beat: the largest load of
    a rank, that with the shortest way to and from the rank, and the longest chain of one
    microbatch. The shape says whether its backward is split.

    `transfer` gives the time of each message between two ranks; without it messages take none.
    """
    places = _chain(shape, times, transfer)
    chain_ns: defaultdict[int, int] = defaultdict(int)
    aside_ns: defaultdict[int, int] = defaultdict(int)
    for place in places:
        chain_ns[place.rank] += sum(place.task_ns)
        aside_ns[place.rank] += sum(place.aside_ns)

    way_in_ns: dict[int, int] = {}
    before_ns: Sequence[int] = [0] * shape.num_microbatches
    for place in places:
        start_ns = list(map(add, before_ns, place.message_ns))
        way_in_ns.setdefault(place.rank, min(start_ns))
        before_ns = list(map(add, start_ns, place.task_ns))

    way_out_ns: dict[int, int] = {}
    after_ns: Sequence[int] = [0] * shape.num_microbatches
    for place in reversed(places):
        left_ns = list(map(max, after_ns, place.aside_ns))
        way_out_ns.setdefault(place.rank, min(left_ns))
        after_ns = list(map(sum, zip(place.message_ns, place.task_ns, left_ns, strict=True)))

    ranks = range(shape.num_ranks)
    return Floor(
        load_ns=max(chain_ns[rank] + aside_ns[rank] for rank in ranks),
        way_ns=max(
            way_in_ns[rank] + chain_ns[rank] + max(way_out_ns[rank], aside_ns[rank])
            for rank in ranks
        ),
        critical_path_ns=max(after_ns),
    )


def _chain(shape: Shape, times: TaskTimes, transfer: Transfer | None) -> list[_Place]:
    """Return the places of the chain that each microbatch passes, in sequence: the forwards of all
    stages, then their backwards. A step without backwards ends with its forwards."""
    microbatches = range(shape.num_microbatches)
    stages = range(shape.num_stages)
    nothing = [0] * shape.num_microbatches
    times_ns = times.by_kind(split=shape.splits_backward)
    places = []
    for kind, in_sequence in ((Kind.F, stages), (Kind.B, reversed(stages))):
        if kind not in shape.kinds:
            continue
        for stage in in_sequence:
            rank = shape.rank_of(stage)
            link = shape.link(Task(stage, kind, 0))
            message_ns = nothing
            if transfer is not None and link is not None:
                message_ns = [transfer(*link, Task(stage, kind, m)) for m in microbatches]
            is_split = kind is Kind.B and shape.splits_backward
            aside_ns = times_ns[Kind.W][stage] if is_split else nothing
            places.append(_Place(rank, message_ns, times_ns[kind][stage], aside_ns))
    return places


def paper_bound_ns(shape: Shape, times: TaskTimes) -> int:
    """The paper's upper bound on a step under `bf` or `bfw`.

        forwards + backwards + sum_{j=1}^{M-1} (F^j_max - F^j_last)
                             + sum_{j=0}^{M-2} (B^j_max - B^j_last)

    `forwards` is the makespan of the forwards alone, `backwards` that of the backwards alone with
    all their inputs present from the start. F^j_max is the longest forward of microbatch j on any
    stage, F^j_last the one on the last stage. A backward is B and W together, split or not (paper
    section 6, appendix B; for `bfw` the bound is our observation, not proven there). It holds if
    messages take no time and no bound on memory withholds anything. Raises UsageError if ranks have
    several chunks, for which there is no such bound.
    """
    if shape.num_chunks > 1:
        raise UsageError(
            f"the paper's bound is for one chunk per rank, not {shape.num_chunks}; "
            "compare with the floor, or use --chunks 1"
        )
    whole = times.by_kind(split=False)
    forwards, backwards = whole[Kind.F], whole[Kind.B]
    return (
        one_way_ns(forwards)
        + one_way_ns(backwards[::-1])
        + sum(_excess_ns(forwards)[1:])
        + sum(_excess_ns(backwards)[:-1])
    )


def one_way_ns(times: Sequence[Sequence[int]]) -> int:
    """Return the makespan of a pipeline in one direction. `times` are `[stage][microbatch]`, first
    stage first; microbatches are all present at the start and pass in sequence, and messages take
    no time."""
    ends_ns = [0] * len(times[0])
    for of_stage in times:
        free_ns = 0
        for microbatch, time_ns in enumerate(of_stage):
            free_ns = ends_ns[microbatch] = max(free_ns, ends_ns[microbatch]) + time_ns
    return ends_ns[-1]


def _excess_ns(times: Sequence[Sequence[int]]) -> list[int]:
    """Return how much longer each microbatch takes on its slowest stage than on the last."""
    return [max(by_stage) - by_stage[-1] for by_stage in zip(*times, strict=True)]
