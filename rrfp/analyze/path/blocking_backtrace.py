"""Follows the chain of one step whose transfers block, from meeting to meeting.

A transfer begins when both its ranks are there, and the chain goes on with the one that came last:
the other one waited for it. That may be a rank that neither sends nor takes what the chain is at,
as where a rank was held up by an earlier transfer of its own.
"""

from collections.abc import Collection, Iterator

from rrfp.analyze.bubbles import OVERHEAD
from rrfp.analyze.frames import Frames
from rrfp.analyze.meetings import MetReplica, met_replicas
from rrfp.analyze.path.backtrace import Backtrace, ChainTask
from rrfp.analyze.path.segments import LINK, Segment, idle
from rrfp.replay.meetings import BlockingRank, Meeting
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.steps import Window


class BlockingBacktrace(Backtrace):
    """Follows the chain of a step whose transfers block."""

    def __init__(self, frames: Frames, step: int, window: Window) -> None:
        super().__init__(frames, step, window)
        ((_, replicas),) = met_replicas(frames, {step: window})
        self._replicas = {
            rank: replica for replica in replicas for members in replica.members for rank in members
        }

    def chain(self, last: ChainTask) -> Iterator[Segment]:
        replica = self._replicas[last.rank]
        rank = replica.ranks[self._ranks[last.rank].pp_rank]
        tasks = {each.pp_rank: list(each.spans.items()) for each in replica.ranks}
        gap = list(rank.spans).index(Task(last.stage, Kind(last.kind), last.microbatch))
        until_ns = last.end_ns
        passed: set[Task] = set()
        while gap >= 0:
            task, (start_ns, _) = tasks[rank.pp_rank][gap]
            begin_ns = min(start_ns, until_ns)
            yield Segment(begin_ns, until_ns, rank.pp_rank, task.kind)
            until_ns = begin_ns
            while (meeting := _latest(rank, gap, until_ns, passed)) is not None:
                passed.add(meeting.task)
                yield from self._idle(replica, rank, meeting.passed_ns, until_ns)
                until_ns = meeting.began_ns
                ends = meeting.receiver.pp_rank, LINK, meeting.sender.pp_rank
                yield Segment(until_ns, meeting.passed_ns, *ends)
                rank, gap = replica.ranks[meeting.last.pp_rank], meeting.last.gap
            free_ns = min(rank.free_ns[gap], until_ns)
            yield from self._idle(replica, rank, free_ns, until_ns)
            until_ns = free_ns
            gap -= 1

    def _idle(
        self, replica: MetReplica, rank: BlockingRank, start_ns: int, end_ns: int
    ) -> Iterator[Segment]:
        waits = self._ranks[replica.members[rank.pp_rank][0]].waits
        return idle(rank.pp_rank, waits, start_ns, end_ns, OVERHEAD)


def _latest(
    rank: BlockingRank, gap: int, until_ns: int, passed: Collection[Task]
) -> Meeting | None:
    """The last message that a rank waited for in a gap before `until_ns`."""
    return max(
        (
            each
            for each in rank.meetings[gap]
            if rank.free_ns[gap] < each.passed_ns <= until_ns and each.task not in passed
        ),
        key=lambda each: each.passed_ns,
        default=None,
    )
