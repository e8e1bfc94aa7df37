"""The records of an imported run: what its spans tell, and what follows from them.

- A rank that idles before a task waits for its input until the task that gives it has ended. The
  rest of the idle time is `transfer` while the trace shows the rank send or receive, and has no
  cause otherwise.
- A message leaves when the task that gives it ends. It has come when the last wait before the task
  that takes it ends, or at once if there is no such wait. Its size is unknown.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rrfp.errors import RrfpError
from rrfp.interchange.clocks import Link
from rrfp.interchange.run_spans import RunSpans
from rrfp.interchange.spans import RankSpans, TaskSpan, TransferSpan
from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind
from rrfp.trace.fixed_schedule import FixedScheduleCounts
from rrfp.trace.records import (
    RankInfo,
    RankRecords,
    ReceiveRecord,
    SendRecord,
    TaskRecord,
    WaitRecord,
)


def records_of(run: RunSpans) -> list[RankRecords]:
    """Everything recorded and derived, rank by rank."""
    records = {id(rank): _of_rank(run, rank) for rank in run.ranks}
    sequences: defaultdict[Link, int] = defaultdict(int)
    for message in sorted(_messages(run), key=lambda each: (each.left_ns, each.task)):
        link = message.sender.info.rank, message.receiver.info.rank
        sequence = sequences[link]
        sequences[link] += 1
        task = message.task
        of = task.step, task.kind, task.stage, task.microbatch
        records[id(message.sender)].sends.append(
            SendRecord(message.left_ns, message.left_ns, *of, link[1], sequence, 0)
        )
        records[id(message.receiver)].receives.append(
            ReceiveRecord(message.began_ns, message.came_ns, *of, link[0], sequence, 0)
        )
    return list(records.values())


def _of_rank(run: RunSpans, rank: RankSpans) -> RankRecords:
    tasks = _task_records(rank.info, rank.tasks)
    if not rank.tells_waits:
        rank.waits = sorted([*rank.waits, *_derived_waits(run, rank)])
    return RankRecords(rank.info, tasks, rank.waits, phases=sorted(rank.phases))


def _derived_waits(run: RunSpans, rank: RankSpans) -> Iterator[WaitRecord]:
    transfers = sorted(rank.transfers)
    ends_ns = list(_running_max(span.end_ns for span in transfers))
    for start_ns, task in run.gaps(rank):
        found = run.sender(rank, task)
        input_ns = start_ns
        if found is not None and found[1].end_ns > start_ns:
            input_ns = min(found[1].end_ns, task.start_ns)
            cause = Cause.FORWARD_INPUT if task.kind is Kind.F else Cause.BACKWARD_INPUT
            yield WaitRecord(start_ns, input_ns, task.step, cause)
        for begin_ns, end_ns in _parts(transfers, ends_ns, input_ns, task.start_ns):
            yield WaitRecord(begin_ns, end_ns, task.step, Cause.TRANSFER)


@dataclass(frozen=True, slots=True)
class _Message:
    """One task's output on its way to the next."""

    left_ns: int
    began_ns: int
    """When both its ranks were ready for it."""
    came_ns: int
    task: TaskSpan
    """The task that takes it."""
    sender: RankSpans
    receiver: RankSpans


def _messages(run: RunSpans) -> Iterator[_Message]:
    for rank in run.ranks:
        waits = sorted(rank.waits, key=lambda wait: wait.end_ns)
        ends_ns = [wait.end_ns for wait in waits]
        gaps = {task: start_ns for start_ns, task in run.gaps(rank)}
        for task in rank.tasks:
            if (found := run.sender(rank, task)) is None:
                continue
            sender, sent = found
            left_ns = min(sent.end_ns, task.start_ns)
            began_ns = came_ns = left_ns
            last = bisect_left(ends_ns, task.start_ns + 1) - 1
            # A wait that ended before the rank was free for the task says nothing about it.
            if last >= 0 and ends_ns[last] > gaps.get(task, task.start_ns):
                came_ns = max(left_ns, ends_ns[last])
                began_ns = min(came_ns, max(left_ns, waits[last].start_ns))
            yield _Message(left_ns, began_ns, came_ns, task, sender, rank)


def _running_max(values: Iterable[int]) -> Iterator[int]:
    most = 0
    for value in values:
        most = max(most, value)
        yield most


def _parts(
    spans: list[TransferSpan], ends_ns: list[int], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int]]:
    """The parts of an interval that spans cover; `ends_ns` has the latest end up to each span."""
    position_ns = start_ns
    index = bisect_left(ends_ns, start_ns + 1)
    while index < len(spans) and spans[index].start_ns < end_ns:
        begin_ns = max(position_ns, spans[index].start_ns)
        stop_ns = min(spans[index].end_ns, end_ns)
        if begin_ns < stop_ns:
            yield begin_ns, stop_ns
            position_ns = stop_ns
        index += 1


def _task_records(info: RankInfo, tasks: list[TaskSpan]) -> list[TaskRecord]:
    """The tasks with what a dispatcher would have counted."""
    release = Kind.W if any(task.kind is Kind.W for task in tasks) else Kind.B
    counts: defaultdict[int, FixedScheduleCounts] = defaultdict(
        lambda: FixedScheduleCounts(release)
    )
    records = []
    for task in tasks:
        if task.stage not in info.stages:
            raise RrfpError(
                f"rank {info.rank} ran a task of stage {task.stage} and says that it holds "
                f"{', '.join(map(str, info.stages))}; import one run at a time"
            )
        chunk = info.stages.index(task.stage)
        counted = counts[task.step].ran(task.kind)
        records.append(TaskRecord(*task[:4], task.stage, chunk, task.microbatch, *counted))
    return records
