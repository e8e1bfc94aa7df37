"""Whose fault it is that the steps of a run took as long as they did.

The critical path of a step says who ran or waited when, but not why that chain was so long. Here
its time is divided further, and still sums to the step:

- *Work* is as much as the stage in the middle has in a step; no order of the same tasks does
  without it.
- Of the path's tasks, what the mean of their rank and kind is above that of the rank in the middle
  belongs to a *slow stage*, and what they took above their own mean is *uneven* time.
- What then remains of them is *series*: stages that work one after another where they could have
  worked side by side. As far as a limit, a hold or a binding order withheld something ready from
  another rank at the time, it is theirs.
- Messages under way own the time between two tasks; from where one member of a group has its own
  to where the last one does, it is coordination.

Megatron's own transfers leave no messages behind, and there a wait for a slow stage looks like one
for a transfer: as much of it as the busiest rank works more than the one in the middle is the
stage's.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import NamedTuple

import polars as pl

from rrfp.analyze.critical_path import LINK, Stretch, critical_path
from rrfp.analyze.frames import Frames, windows
from rrfp.errors import RrfpError
from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind

_MOST_STEPS = 30
"""Walked, evenly over the run: a path takes a while to find, and steps are much alike."""


class Fault(StrEnum):
    """What may own a part of a step, beside the causes of waits that speak for themselves
    (`limit`, `hold`, `order`, `coordination`, `transfer`, `gradient_sync`)."""

    WORK = "work"
    SLOW_STAGE = "slow_stage"
    UNEVEN = "uneven"
    SERIES = "series"
    LINK = "link"
    ENTRY = "entry"
    """A rank had not entered the schedule yet."""
    OVERHEAD = "overhead"
    """What no record explains."""


class Owner(NamedTuple):
    """Who owns a part of the step."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """Where: of a link, who receives; of work and series, the busiest rank."""
    sender: int | None = None
    """Of a link, who sends."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Where the time of a run's steps went; means over the steps that were looked at."""

    num_steps: int
    step_ns: float
    busiest: int
    """The pipeline rank that has most work."""
    busiest_ns: float
    """Its work in a step."""
    owners_ns: dict[Owner, float]
    """The most first; they sum to `step_ns`."""


def blame(frames: Frames) -> Blame:
    """Divide the steps that every rank finished, or thirty of them.

    Raises RrfpError when there is none, or one has no tasks.
    """
    finished = windows(frames)["step"].to_list()
    if not finished:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    num_steps = min(len(finished), _MOST_STEPS)
    chosen = [finished[index * len(finished) // num_steps] for index in range(num_steps)]
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
        self._has_messages = not frames.messages.is_empty()
        self._first_came_ns = _first_came_ns(frames)
        self._waits = frames.waits.select("step", "pp_rank", "cause", "start_ns", "end_ns")
        self._paths = {step: critical_path(frames, step).stretches for step in steps}

    def blame(self) -> Blame:
        owners_ns: defaultdict[Owner, float] = defaultdict(float)
        uneven_ns: defaultdict[int, float] = defaultdict(float)
        for step, path in self._paths.items():
            for index, stretch in enumerate(path):
                if stretch.kind in list(Kind):
                    self._divide_work(stretch, owners_ns, uneven_ns)
                elif stretch.kind == LINK:
                    sender = path[index - 1].pp_rank if index else None
                    self._divide_link(step, stretch, sender, owners_ns)
                else:
                    own = _OWN.get(stretch.kind, stretch.kind)
                    owners_ns[Owner(own, stretch.pp_rank)] += stretch.end_ns - stretch.start_ns
        num_steps = len(self._steps)
        owners_ns = defaultdict(float, {o: ns / num_steps for o, ns in owners_ns.items()})
        self._settle_uneven(owners_ns, {r: ns / num_steps for r, ns in uneven_ns.items()})
        self._settle_transfers(owners_ns)
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
        task: Stretch,
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
        stretch: Stretch,
        sender: int | None,
        owners_ns: defaultdict[Owner, float],
    ) -> None:
        """A message for a group is under way until one member has its own; then they wait for each
        other."""
        start_ns, end_ns, pp_rank, _ = stretch
        first_ns = self._first_came_ns.get((step, pp_rank, end_ns), end_ns)
        shared_ns = end_ns - max(first_ns, start_ns)
        owners_ns[Owner(Cause.COORDINATION, pp_rank)] += shared_ns
        owners_ns[Owner(Fault.LINK, pp_rank, sender)] += end_ns - start_ns - shared_ns

    def _settle_uneven(
        self, owners_ns: defaultdict[Owner, float], uneven_ns: dict[int, float]
    ) -> None:
        """Uneven time is what remains once the ranks whose tasks were short have paid theirs."""
        total_ns = sum(uneven_ns.values())
        long_ns = {rank: ns for rank, ns in uneven_ns.items() if ns > 0}
        if total_ns <= 0:
            owners_ns[Owner(Fault.WORK, self._busiest)] += total_ns
            return
        for rank, ns in long_ns.items():
            owners_ns[Owner(Fault.UNEVEN, rank)] = ns * total_ns / sum(long_ns.values())

    def _settle_transfers(self, owners_ns: defaultdict[Owner, float]) -> None:
        """Without messages, what a slow stage adds was counted as transfers."""
        if self._has_messages:
            return
        slow = Owner(Fault.SLOW_STAGE, self._busiest)
        extra_ns = self._busy_ns[self._busiest] - self._usual_ns - owners_ns[slow]
        transfers = [owner for owner in owners_ns if owner.what == Cause.TRANSFER]
        owners_ns[slow] += _take(owners_ns, transfers, extra_ns)

    def _settle_work(self, owners_ns: defaultdict[Owner, float]) -> None:
        """More work in a row than the stage in the middle has is series, or withheld."""
        work, series = Owner(Fault.WORK, self._busiest), Owner(Fault.SERIES, self._busiest)
        owners_ns[series] = max(0.0, owners_ns[work] - self._usual_ns)
        owners_ns[work] -= owners_ns[series]
        uneven = [owner for owner in owners_ns if owner.what == Fault.UNEVEN]
        for owner, withheld_ns in self._withheld().items():
            # What is bound to an order cannot step in for a task that takes long.
            payers = [series, *uneven] if owner.what == Cause.ORDER else [series]
            owners_ns[owner] += _take(owners_ns, payers, withheld_ns)

    def _withheld(self) -> dict[Owner, float]:
        """For how long, while others were on the path, something ready was withheld from the rank
        from which most was; means over the steps, the most first."""
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
    """When the first member of a group had its message for a task, by the step, the pipeline rank,
    and when the last one had its own."""
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


_WITHHELD = (Cause.LIMIT, Cause.HOLD, Cause.ORDER)
_OWN: dict[str, str] = {
    Cause.WARMUP: Fault.ENTRY,
    # The message was there when these waits went on.
    Cause.FORWARD_INPUT: Fault.OVERHEAD,
    Cause.BACKWARD_INPUT: Fault.OVERHEAD,
    Cause.DRAIN: Fault.OVERHEAD,
}
"""What is to be said of a wait that stands on the path itself."""


def _take(owners_ns: defaultdict[Owner, float], payers: Iterable[Owner], wanted_ns: float) -> float:
    """Take as much time from its owners as they have, one after the other."""
    taken_ns = 0.0
    for payer in payers:
        part_ns = max(0.0, min(owners_ns[payer], wanted_ns - taken_ns))
        owners_ns[payer] -= part_ns
        taken_ns += part_ns
    return taken_ns


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time in disjoint spans, in order."""
    union: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if union and start_ns <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_ns)
        else:
            union.append((start_ns, end_ns))
    return union


def _overlap_ns(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """For how long both of two lists of disjoint spans, in order, are there."""
    overlap_ns = i = j = 0
    while i < len(first) and j < len(second):
        overlap_ns += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return overlap_ns
