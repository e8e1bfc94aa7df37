"""How one rank's step is divided, an interval at a time: what the tables' way is held against."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rrfp.analyze.bubbles import CAUSES, OVERHEAD
from rrfp.schedule.tasks import Cause
from rrfp.trace.records import TaskRecord, WaitRecord

Interval = tuple[int, int]


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
