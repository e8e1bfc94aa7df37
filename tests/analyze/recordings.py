"""Synthetic recordings: a plausible small run, for tests of what reads runs."""

from collections import defaultdict
from dataclasses import dataclass, field

from rrfp.trace.records import (
    CostRecord,
    PhaseRecord,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    SendRecord,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
)

US = 1_000


@dataclass
class _Rank:
    """One rank while its run is made up: what is to run, and since when it is free."""

    records: RankRecords
    order: list[tuple[str, int]]
    free_ns: int = 0
    forwards: int = 0
    backwards: int = 0
    arrived: dict[tuple[str, int], int] = field(default_factory=dict)


def make_recording(
    num_ranks: int = 4,
    num_microbatches: int = 6,
    num_steps: int = 3,
    *,
    forward_ns: int = 100 * US,
    backward_ns: int = 200 * US,
    latency_ns: int = 5 * US,
) -> Recording:
    """A run of 1F1B over asynchronous links: tasks, waits, messages, phases, stimuli and costs."""
    run = Recording(
        {
            "hint": "1f1b",
            "pp": num_ranks,
            "microbatches": num_microbatches,
            "world": num_ranks,
            "ranks": [
                {"rank": rank, "host": "node", "pid": 100 + rank} for rank in range(num_ranks)
            ],
        },
        [
            RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", 100 + rank))
            for rank in range(num_ranks)
        ],
    )
    sequences: defaultdict[tuple[int, int], int] = defaultdict(int)
    start_ns = 10 * US
    for step in range(num_steps):
        start_ns = _run_step(
            run, step, start_ns, num_microbatches, forward_ns, backward_ns, latency_ns, sequences
        )
    return run


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[tuple[str, int]]:
    warmup = min(num_ranks - rank - 1, num_microbatches)
    order = [("F", m) for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        order += [("F", warmup + m), ("B", m)]
    return order + [("B", m) for m in range(num_microbatches - warmup, num_microbatches)]


def _run_step(
    run: Recording,
    step: int,
    start_ns: int,
    num_microbatches: int,
    forward_ns: int,
    backward_ns: int,
    latency_ns: int,
    sequences: defaultdict[tuple[int, int], int],
) -> int:
    last = len(run.ranks) - 1
    ranks = [
        _Rank(records, _order(rank, last + 1, num_microbatches), start_ns + rank * US)
        for rank, records in enumerate(run.ranks)
    ]
    entries = [rank.free_ns for rank in ranks]
    for m in range(num_microbatches):
        ranks[0].arrived["F", m] = entries[0]
    progress = True
    while progress:
        progress = False
        for index, rank in enumerate(ranks):
            while rank.order and rank.order[0] in _runnable(rank, index == last):
                kind, microbatch = rank.order.pop(0)
                progress = True
                ready_ns = rank.arrived.get((kind, microbatch), 0)
                begin_ns = max(rank.free_ns, ready_ns) + US
                end_ns = begin_ns + (forward_ns if kind == "F" else backward_ns)
                _run_task(rank, step, index, kind, microbatch, begin_ns, end_ns)
                target = index + (1 if kind == "F" else -1)
                if 0 <= target <= last:
                    message = (step, kind, target, microbatch)
                    arrives_ns = end_ns + latency_ns
                    sequence = sequences[index, target]
                    sequences[index, target] += 1
                    rank.records.sends.append(
                        SendRecord(end_ns, end_ns + US, *message, target, sequence, 64)
                    )
                    ranks[target].records.receives.append(
                        ReceiveRecord(arrives_ns - US, arrives_ns, *message, index, sequence, 64)
                    )
                    ranks[target].records.stimuli.append(
                        StimulusRecord(arrives_ns, step, "Arrived", kind, target, microbatch, 0)
                    )
                    ranks[target].arrived[kind, microbatch] = arrives_ns
    end_ns = max(rank.free_ns for rank in ranks) + 10 * US
    for index, rank in enumerate(ranks):
        return_ns = end_ns - index * US
        records = rank.records
        records.waits.append(WaitRecord(rank.free_ns, return_ns - US, step, "drain"))
        records.phases.append(PhaseRecord(entries[index], return_ns, step, "schedule"))
        records.phases.append(PhaseRecord(end_ns, end_ns + 20 * US, step, "optimizer"))
        records.costs.append(CostRecord(end_ns, step, 100 * (step + 1), 900 * (step + 1)))
    return end_ns + 30 * US


def _runnable(rank: _Rank, is_last: bool) -> set[tuple[str, int]]:
    ready = set(rank.arrived)
    if is_last:
        ready |= {("B", task.microbatch) for task in rank.records.tasks if task.kind == "F"}
    return ready


def _run_task(
    rank: _Rank, step: int, stage: int, kind: str, microbatch: int, begin_ns: int, end_ns: int
) -> None:
    if begin_ns - US > rank.free_ns:
        cause = "forward_input" if kind == "F" else "backward_input"
        is_first = not (rank.forwards or rank.backwards)
        rank.records.waits.append(
            WaitRecord(rank.free_ns, begin_ns - US, step, "warmup" if is_first else cause)
        )
    position = rank.forwards + rank.backwards
    rank.forwards += kind == "F"
    rank.backwards += kind == "B"
    depth = rank.forwards - rank.backwards
    rank.records.tasks.append(
        TaskRecord(
            begin_ns,
            end_ns,
            step,
            kind,
            stage,
            0,
            microbatch,
            position,
            1,
            0,
            depth,
            depth + (kind == "B"),
            int(kind == "F"),
            int(kind == "B"),
        )
    )
    rank.free_ns = end_ns
