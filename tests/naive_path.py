"""The longest path of a step, found a second time and more simply: from the last task to end, back
to what ended last of the things that each task needed.

It knows tasks and messages alone. Of a run with blocking transfers, and of an imported one, it
knows no messages, so that it is right only where a message passes as soon as its task has ended and
its receiver is free.
"""

from collections import defaultdict

from rrfp.trace.records import Recording

Path = dict[tuple[int, str], int]
"""Time on the path by pipeline rank and kind of task; `link` for what lies between tasks."""

_Key = tuple[int, str, int, int]
"""Replica, kind, stage and microbatch."""


def naive_path(recording: Recording, step: int) -> Path:
    """The owners of a step's path from the first task's start to the last one's end."""
    starts: dict[_Key, int] = {}
    ends: dict[_Key, int] = {}
    places: dict[_Key, int] = {}
    rows: defaultdict[int, list[_Key]] = defaultdict(list)
    arrivals: dict[_Key, int] = {}
    for rank in recording.ranks:
        dp_rank = rank.info.dp_rank
        for task in rank.tasks:
            if task.step == step:
                key = dp_rank, str(task.kind), task.stage, task.microbatch
                starts[key] = max(starts.get(key, 0), task.start_ns)
                ends[key] = max(ends.get(key, 0), task.end_ns)
                places[key] = rank.info.pp_rank
                if rank.info.tp_rank == 0:
                    rows[rank.info.rank].append(key)
        for receive in rank.receives:
            if receive.step == step and "imported" not in recording.settings:
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
            needed[giver] = arrivals.get(key, ends[giver])
        if not needed:
            return dict(found)
        last = max(needed, key=lambda each: needed[each])
        found[places[key], "link"] += starts[key] - ends[last]
        key = last
