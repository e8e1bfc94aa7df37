"""Naive versions of analyses: the division of a step into causes, and its longest path.

They use only tasks and messages. Runs with blocking transfers and imported runs have no messages
for them. On these runs they are correct only if every message passes as soon as its task has ended
and its receiver is free.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rrfp.analyze.bubbles import CAUSES, OVERHEAD
from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.frames import frames_of
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import Recording, TaskRecord, WaitRecord

# The division of one rank's step, one interval at a time; tests compare rrfp.analyze with it.


Interval = tuple[int, int]


def divide_step(
    window: Interval, tasks: Sequence[TaskRecord], waits: Sequence[WaitRecord]
) -> dict[str, int]:
    """Return one rank's idle time in a step's window, in ns, for each of `CAUSES`."""
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
    """Yield the intervals of the window in which the rank worked, disjoint and in order."""
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
    """Add the time of the gaps to the causes of their waits; return the ns without a wait.

    Gaps and waits are in order of time. If waits overlap, the earlier one counts.
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


Path = dict[tuple[int, str], int]
"""Time in ns on the path by pipeline rank and kind of task; `link` is the time between tasks."""

_Key = tuple[int, str, int, int]
"""Replica, kind, stage and microbatch."""


def naive_path(recording: Recording, step: int) -> Path:
    """Return the time on a step's path, from the first task's start to the last task's end."""
    is_imported = "imported" in recording.settings
    starts: dict[_Key, int] = {}
    ends: dict[_Key, int] = {}
    places: dict[_Key, int] = {}
    rows: defaultdict[int, list[_Key]] = defaultdict(list)
    arrivals: dict[_Key, int] = {}
    entries: defaultdict[tuple[int, int], int] = defaultdict(int)
    for rank in recording.ranks:
        dp_rank = rank.info.dp_rank
        for phase in rank.phases:
            # An imported run does not contain the time at which a rank entered the step.
            if (phase.step, phase.phase) == (step, "schedule") and not is_imported:
                place = rank.info.pp_rank, dp_rank
                entries[place] = max(entries[place], phase.start_ns)
        for task in rank.tasks:
            if task.step == step:
                key = dp_rank, str(task.kind), task.stage, task.microbatch
                starts[key] = max(starts.get(key, 0), task.start_ns)
                ends[key] = max(ends.get(key, 0), task.end_ns)
                places[key] = rank.info.pp_rank
                if rank.info.tp_rank == 0:
                    rows[rank.info.rank].append(key)
        for receive in rank.receives:
            if receive.step == step and not is_imported:
                key = dp_rank, str(receive.kind), receive.stage, receive.microbatch
                arrivals[key] = max(arrivals.get(key, 0), receive.end_ns)
    before: dict[_Key, _Key] = {}
    for row in rows.values():
        row.sort(key=lambda key: starts[key])
        before |= dict(zip(row[1:], row, strict=False))
    found: defaultdict[tuple[int, str], int] = defaultdict(int)
    key = max(ends, key=lambda each: ends[each])
    while True:
        dp_rank, kind, stage, microbatch = key
        found[places[key], kind] += ends[key] - starts[key]
        giver = dp_rank, kind, stage + (-1 if kind == "F" else 1), microbatch
        needed = {}
        if key in before:
            needed[before[key]] = ends[before[key]]
        if kind != "W" and giver in ends:
            came_ns = arrivals.get(key, ends[giver])
            if key in before or came_ns > entries[places[key], dp_rank]:
                needed[giver] = came_ns
        if not needed:
            return dict(found)
        last = max(needed, key=lambda each: needed[each])
        found[places[key], "link"] += starts[key] - ends[last]
        key = last


def naive_work(recording: Recording, step: int) -> Path:
    """Return the time of tasks on the naive path."""
    path = naive_path(recording, step)
    return {(pp_rank, kind): ns for (pp_rank, kind), ns in path.items() if kind != "link" and ns}


def work_on_path(recording: Recording, step: int) -> Path:
    """Return the time of tasks on the path that rrfp's analysis finds."""
    owners = critical_path(frames_of(recording), step).owners
    return {
        (owner.pp_rank, str(owner.kind)): owner.time_ns
        for owner in owners
        if owner.kind in list(Kind)
    }
