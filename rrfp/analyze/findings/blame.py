"""Why the steps of a run took as long as they did.

A step's critical path says who ran or waited when, but not why the chain was so long. Here its time
is divided further, and the parts still sum to the step:

- *Work*: as much as the median stage has in a step. No order of the same tasks avoids it.
- *Slow stage*: by how much the path's tasks exceed those of the median rank, each kind at its mean.
- *Uneven*: by how much the path's tasks exceed the mean of their own rank and kind.
- *Series*: the rest of the path's tasks. Stages worked one after another where they could have
  worked side by side. Where a limit, a hold, a binding order or patience withheld something ready
  from another rank meanwhile, that time is theirs instead.
- *Link*: messages under way between two tasks. From the moment one member of a group has its
  message until the last one has, the time is *coordination*.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import NamedTuple

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.analyze.path.critical_path import critical_path
from rrfp.analyze.path.segments import LINK, Segment
from rrfp.errors import RrfpError
from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind
from rrfp.trace.steps import spread_evenly

_MOST_STEPS = 30
"""Finding a path takes a while, and steps are much alike."""


class Fault(StrEnum):
    """What may own a part of a step, besides the causes of waits that explain themselves (`limit`,
    `hold`, `order`, `patience`, `coordination`, `transfer`, `gradient_sync`)."""

    WORK = "work"
    SLOW_STAGE = "slow_stage"
    UNEVEN = "uneven"
    SERIES = "series"
    LINK = "link"
    ENTRY = "entry"
    """A rank entered the schedule late."""
    OVERHEAD = "overhead"
    """Time that no record explains."""


class Owner(NamedTuple):
    """Who owns a part of the step."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """Where: the receiver of a link; for work and series, the busiest rank."""
    sender: int | None = None
    """The sender of a link."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Where the time of a run's steps went; means over the steps examined."""

    num_steps: int
    step_ns: float
    busiest: int
    """The pipeline rank with the most work."""
    busiest_ns: float
    """Its work in a step."""
    owners_ns: dict[Owner, float]
    """The largest first; they sum to `step_ns`."""


def blame(frames: Frames) -> Blame:
    """Divide the steps that every rank finished, or thirty of them.

    Raises RrfpError when no step was finished, or one has no tasks.
    """
    finished = frames.windows["step"].to_list()
    if not finished:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    chosen = spread_evenly(finished, _MOST_STEPS)
    return _Division(frames.of_steps(chosen), chosen).blame()


class _Division:
    """The time of some steps, divided."""

    def __init__(self, frames: Frames, steps: Sequence[int]) -> None:
        self._steps = steps
        time_ns = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
        tasks = frames.tasks.select("step", "rank", "pp_rank", "kind", time_ns)
        if tasks.is_empty():
            raise RrfpError("the finished steps have no tasks; see 'rrfp trace check'")
        of_a_step = pl.col("ns").sum() / (pl.col("rank").n_unique() * len(steps))
        self._busy_ns: dict[int, float] = dict(
            tasks.group_by("pp_rank").agg(of_a_step).sort("pp_rank").iter_rows()
        )
        self._usual_ns = median(self._busy_ns.values())
        self._busiest = max(self._busy_ns, key=lambda rank: (self._busy_ns[rank], -rank))
        self._mean_ns: dict[tuple[int, str], float] = {
            (pp_rank, kind): ns
            for pp_rank, kind, ns in tasks.group_by("pp_rank", "kind")
            .agg(pl.col("ns").mean())
            .iter_rows()
        }
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for (_, kind), ns in self._mean_ns.items():
            by_kind[kind].append(ns)
        self._middle_ns = {kind: median_low(means) for kind, means in by_kind.items()}
        self._first_came_ns = _first_came_ns(frames)
        self._waits = frames.waits.select("step", "pp_rank", "cause", "start_ns", "end_ns")
        self._paths = {step: critical_path(frames, step).segments for step in steps}

    def blame(self) -> Blame:
        owners_ns: defaultdict[Owner, float] = defaultdict(float)
        uneven_ns: defaultdict[int, float] = defaultdict(float)
        for step, path in self._paths.items():
            for segment in path:
                if segment.kind in list(Kind):
                    self._divide_work(segment, owners_ns, uneven_ns)
                elif segment.kind == LINK:
                    self._divide_link(step, segment, owners_ns)
                else:
                    own = _OWN.get(segment.kind, segment.kind)
                    owners_ns[Owner(own, segment.pp_rank)] += segment.end_ns - segment.start_ns
        num_steps = len(self._steps)
        owners_ns = defaultdict(float, {o: ns / num_steps for o, ns in owners_ns.items()})
        self._settle_uneven(owners_ns, {r: ns / num_steps for r, ns in uneven_ns.items()})
        self._settle_work(owners_ns)
        found = sorted(owners_ns.items(), key=lambda item: (-item[1], str(item[0])))
        return Blame(
            num_steps,
            sum(path[-1].end_ns - path[0].start_ns for path in self._paths.values()) / num_steps,
            self._busiest,
            self._busy_ns[self._busiest],
            {owner: ns for owner, ns in found if ns > 0},
        )

    def _divide_work(
        self,
        task: Segment,
        owners_ns: defaultdict[Owner, float],
        uneven_ns: defaultdict[int, float],
    ) -> None:
        mean_ns = self._mean_ns[task.pp_rank, task.kind]
        middle_ns = min(mean_ns, self._middle_ns[task.kind])
        owners_ns[Owner(Fault.WORK, self._busiest)] += middle_ns
        owners_ns[Owner(Fault.SLOW_STAGE, task.pp_rank)] += mean_ns - middle_ns
        uneven_ns[task.pp_rank] += task.end_ns - task.start_ns - mean_ns

    def _divide_link(
        self,
        step: int,
        segment: Segment,
        owners_ns: defaultdict[Owner, float],
    ) -> None:
        """A message for a group is under way until one member has its share; after that the members
        wait for each other."""
        start_ns, end_ns, pp_rank, _, sender = segment
        first_ns = self._first_came_ns.get((step, pp_rank, end_ns), end_ns)
        shared_ns = end_ns - max(first_ns, start_ns)
        owners_ns[Owner(Cause.COORDINATION, pp_rank)] += shared_ns
        owners_ns[Owner(Fault.LINK, pp_rank, sender)] += end_ns - start_ns - shared_ns

    def _settle_uneven(
        self, owners_ns: defaultdict[Owner, float], uneven_ns: dict[int, float]
    ) -> None:
        """Short tasks of some ranks make up for long ones of others; only the rest is uneven."""
        total_ns = sum(uneven_ns.values())
        long_ns = {rank: ns for rank, ns in uneven_ns.items() if ns > 0}
        if total_ns <= 0:
            owners_ns[Owner(Fault.WORK, self._busiest)] += total_ns
            return
        for rank, ns in long_ns.items():
            owners_ns[Owner(Fault.UNEVEN, rank)] = ns * total_ns / sum(long_ns.values())

    def _settle_work(self, owners_ns: defaultdict[Owner, float]) -> None:
        """Work beyond what the median stage has is series, or was withheld."""
        work, series = Owner(Fault.WORK, self._busiest), Owner(Fault.SERIES, self._busiest)
        owners_ns[series] = max(0.0, owners_ns[work] - self._usual_ns)
        owners_ns[work] -= owners_ns[series]
        uneven = [owner for owner in owners_ns if owner.what == Fault.UNEVEN]
        for owner, withheld_ns in self._withheld().items():
            # A rank bound to an order cannot run something else while a task takes long.
            payers = [series, *uneven] if owner.what == Cause.ORDER else [series]
            owners_ns[owner] += _take(owners_ns, payers, withheld_ns)

    def _withheld(self) -> dict[Owner, float]:
        """How long ready tasks were withheld while other ranks were on the path, of the one rank
        from which most was withheld; means over the steps, the largest first."""
        withheld = self._waits.filter(pl.col("cause").is_in(_WITHHELD))
        found_ns: defaultdict[Owner, float] = defaultdict(float)
        for (step, pp_rank, cause), waits in withheld.group_by("step", "pp_rank", "cause"):
            others = [s[:2] for s in self._paths[step] if s.pp_rank != pp_rank]
            spans = _union(waits.select("start_ns", "end_ns").iter_rows())
            found_ns[Owner(cause, pp_rank)] += _overlap_ns(spans, others) / len(self._steps)
        by_rank: defaultdict[int, float] = defaultdict(float)
        for owner, ns in found_ns.items():
            by_rank[owner.pp_rank] += ns
        if not by_rank:
            return {}
        most = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
        of_it = {owner: ns for owner, ns in found_ns.items() if owner.pp_rank == most}
        return dict(sorted(of_it.items(), key=lambda item: -item[1]))


def _first_came_ns(frames: Frames) -> dict[tuple[int, int, int], int]:
    """When the first member of a group had its message for a task, by step, pipeline rank and the
    time at which the last member had its own."""
    replicas = frames.run.select(pl.col("rank").alias("to_rank"), "dp_rank")
    of_groups = (
        frames.messages.join(replicas, on="to_rank")
        .group_by("step", "to_pp_rank", "dp_rank", "kind", "stage", "microbatch")
        .agg(pl.col("came_ns").max().alias("last_ns"), pl.col("came_ns").min().alias("first_ns"))
    )
    return {
        (step, pp_rank, last_ns): first_ns
        for step, pp_rank, last_ns, first_ns in of_groups.select(
            "step", "to_pp_rank", "last_ns", "first_ns"
        ).iter_rows()
    }


_WITHHELD = (Cause.LIMIT, Cause.HOLD, Cause.ORDER, Cause.PATIENCE)
_OWN: dict[str, str] = {
    Cause.WARMUP: Fault.ENTRY,
    # The message had come, and the rank still waited.
    Cause.FORWARD_INPUT: Fault.OVERHEAD,
    Cause.BACKWARD_INPUT: Fault.OVERHEAD,
    Cause.DRAIN: Fault.OVERHEAD,
}
"""What owns a wait that lies on the path itself, where its cause does not."""


def _take(owners_ns: defaultdict[Owner, float], payers: Iterable[Owner], wanted_ns: float) -> float:
    """Take up to so much time from its owners, one after the other; how much they had."""
    taken_ns = 0.0
    for payer in payers:
        part_ns = max(0.0, min(owners_ns[payer], wanted_ns - taken_ns))
        owners_ns[payer] -= part_ns
        taken_ns += part_ns
    return taken_ns


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as disjoint spans, in order."""
    union: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if union and start_ns <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_ns)
        else:
            union.append((start_ns, end_ns))
    return union


def _overlap_ns(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """How long two lists of disjoint spans, both in order, overlap."""
    overlap_ns = i = j = 0
    while i < len(first) and j < len(second):
        overlap_ns += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return overlap_ns
