"""Where a step's time goes: work, idle time by cause, and what is neither.

The window of a step runs from the first rank's entry into the schedule to the last rank's return
from it, on one clock, and is the same for every rank. A rank is busy in it while it runs a task.
The rest is its bubble, and every nanosecond of that has one cause:

- `warmup`: all of it before the rank's first task, its late entry included, whatever was recorded;
- between two tasks the cause of the recorded wait;
- after its last task a recorded `gradient_sync`, else `drain`, to the end of the window;
- `overhead`: the remainder between two tasks.

So work and causes sum to the window exactly.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.causes import Cause
from rrfp.trace.records import NS_PER_S, RankInfo, RankRecords, Recording, TaskRecord, WaitRecord
from rrfp.trace.steps import step_windows

OVERHEAD = "overhead"
CAUSES = (*(cause.value for cause in Cause), OVERHEAD)
"""Every part of a bubble, in the order in which reports show them."""


Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankBubbles:
    """One rank's time, summed over the steps asked for."""

    info: RankInfo
    window_ns: int
    busy_ns: int
    causes_ns: dict[str, int]
    """Idle time by cause; every one of `CAUSES`, and with `busy_ns` they sum to `window_ns`."""

    @property
    def bubble_fraction(self) -> float:
        return 1 - self.busy_ns / self.window_ns


@dataclass(frozen=True, slots=True)
class Bubbles:
    """A run's time, rank by rank, summed over the steps asked for."""

    steps: tuple[int, ...]
    """The steps that every rank finished: those that are counted."""
    dropped_steps: tuple[int, ...]
    """Steps asked for that some rank did not finish; they are left out for all."""
    window_ns: int
    ranks: tuple[RankBubbles, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that is no work."""
        return 1 - sum(rank.busy_ns for rank in self.ranks) / (self.window_ns * len(self.ranks))

    @property
    def causes_ns(self) -> dict[str, int]:
        """Idle time by cause, over all ranks."""
        return {cause: sum(rank.causes_ns[cause] for rank in self.ranks) for cause in CAUSES}

    def as_json(self) -> dict[str, object]:
        """The object that `rrfp analyze bubbles --format json` prints."""
        return {
            "bubble_fraction": self.bubble_fraction,
            "window_s": self.window_ns / NS_PER_S,
            "ranks": [
                {
                    "rank": rank.info.rank,
                    "pp_rank": rank.info.pp_rank,
                    "stages": list(rank.info.stages),
                    "bubble_fraction": rank.bubble_fraction,
                    "busy_s": rank.busy_ns / NS_PER_S,
                    "causes": {
                        cause: cause_ns / NS_PER_S for cause, cause_ns in rank.causes_ns.items()
                    },
                }
                for rank in self.ranks
            ],
        }


def bubbles(recording: Recording, steps: range | None = None) -> Bubbles:
    """Divide the time of a run's steps; None means all of them.

    Raises UsageError when the run has none of the steps asked for, RrfpError when no rank finished
    any of them.
    """
    asked = _select(recording, steps)
    finished = step_windows(recording)
    windows = {step: finished[step] for step in asked if step in finished}
    if not windows:
        raise RrfpError(f"none of the steps {_span(asked)} was finished by every rank")
    window_ns = sum(end_ns - start_ns for start_ns, end_ns in windows.values())
    if window_ns <= 0:
        raise RrfpError(f"the steps {_span(tuple(windows))} take no time in this trace")
    return Bubbles(
        steps=tuple(windows),
        dropped_steps=tuple(step for step in asked if step not in windows),
        window_ns=window_ns,
        ranks=tuple(_RankSteps(records).divide(windows) for records in recording.ranks),
    )


def divide_step(
    window: Interval, tasks: Sequence[TaskRecord], waits: Sequence[WaitRecord]
) -> dict[str, int]:
    """One rank's idle time in a step's window, in nanoseconds, for each of `CAUSES`."""
    causes_ns = dict.fromkeys(CAUSES, 0)
    start_ns, end_ns = window
    work = list(_merged(tasks, window))
    if not work:
        causes_ns[Cause.WARMUP] = end_ns - start_ns
        return causes_ns
    causes_ns[Cause.WARMUP] = work[0][0] - start_ns
    by_start = sorted(waits)
    between = [(end, start) for (_, end), (start, _) in pairwise(work)]
    causes_ns[OVERHEAD] = _share(between, by_start, causes_ns)
    syncs = [wait for wait in by_start if wait.cause == Cause.GRADIENT_SYNC]
    causes_ns[Cause.DRAIN] += _share([(work[-1][1], end_ns)], syncs, causes_ns)
    return causes_ns


def _merged(tasks: Sequence[TaskRecord], window: Interval) -> Iterator[Interval]:
    """When the rank was at work in the window: disjoint intervals in order of time."""
    start_ns, end_ns = window
    current: Interval | None = None
    for task in sorted(tasks):
        begin, end = max(task.start_ns, start_ns), min(task.end_ns, end_ns)
        if begin >= end:
            continue
        if current is not None and begin <= current[1]:
            current = (current[0], max(current[1], end))
            continue
        if current is not None:
            yield current
        current = (begin, end)
    if current is not None:
        yield current


def _share(gaps: Sequence[Interval], waits: Sequence[WaitRecord], causes_ns: dict[str, int]) -> int:
    """Add the parts of the gaps that a wait explains to its cause; give what none explains.

    Gaps and waits come in order of time; where waits overlap, the earlier one counts.
    """
    unexplained_ns = 0
    index = 0
    for start_ns, end_ns in gaps:
        position_ns = start_ns
        while index < len(waits) and waits[index].start_ns < end_ns:
            wait = waits[index]
            begin_ns = max(wait.start_ns, position_ns)
            stop_ns = min(wait.end_ns, end_ns)
            if begin_ns < stop_ns:
                unexplained_ns += begin_ns - position_ns
                causes_ns[wait.cause] += stop_ns - begin_ns
                position_ns = stop_ns
            if wait.end_ns > end_ns:
                break
            index += 1
        unexplained_ns += end_ns - position_ns
    return unexplained_ns


class _RankSteps:
    """One rank's records, by step."""

    def __init__(self, records: RankRecords) -> None:
        self.info = records.info
        self._tasks: defaultdict[int, list[TaskRecord]] = defaultdict(list)
        self._waits: defaultdict[int, list[WaitRecord]] = defaultdict(list)
        for task in records.tasks:
            self._tasks[task.step].append(task)
        for wait in records.waits:
            if wait.cause not in CAUSES:
                raise RrfpError(
                    f"rank {records.info.rank} waited in step {wait.step} for '{wait.cause}', "
                    f"which is none of {', '.join(CAUSES)}"
                )
            self._waits[wait.step].append(wait)

    def divide(self, windows: dict[int, Interval]) -> RankBubbles:
        """Sum this rank's time over the steps whose windows are given."""
        totals_ns = dict.fromkeys(CAUSES, 0)
        for step, window in windows.items():
            for cause, time_ns in divide_step(window, self._tasks[step], self._waits[step]).items():
                totals_ns[cause] += time_ns
        window_ns = sum(end_ns - start_ns for start_ns, end_ns in windows.values())
        return RankBubbles(self.info, window_ns, window_ns - sum(totals_ns.values()), totals_ns)


def _select(recording: Recording, steps: range | None) -> list[int]:
    """The steps of the run that are asked for, in order."""
    present = sorted(
        {
            record.step
            for records in recording.ranks
            for found in (records.phases, records.tasks)
            for record in found
        }
    )
    if not present:
        raise RrfpError("the trace has no steps; the run ended before its first one did")
    if steps is None:
        return present
    asked = [step for step in present if step in steps]
    if not asked:
        raise UsageError(
            f"the trace has no steps {steps.start}:{steps.stop}; it has {_span(present)}"
        )
    return asked


def _span(steps: Sequence[int]) -> str:
    """`3:10` for the steps from 3 to 9."""
    return f"{steps[0]}:{steps[-1] + 1}"
