"""The blocking transfers of a recorded run, reconstructed message by message.

A transfer begins when both its ranks are ready, and blocks both until it is done. Megatron's own
schedules record only that a rank waited. The messages of a wait follow from the tasks around it: a
rank sends a task's output right after the task, or after a later one, and receives a task's input
right before the task, or before an earlier one.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp.replay.recorded import Members, RankStep
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Task
from rrfp.trace.records import WaitRecord, task_of

Span = tuple[int, int]
"""Start and end, in ns."""


class End(NamedTuple):
    """One of the two sides of a transfer."""

    pp_rank: int
    gap: int
    """The number of the task before which the rank was ready to transfer."""
    there_ns: int
    """The time at which it was ready: the end of its previous task and transfers."""
    free_ns: int
    """The end of its previous task."""


class BlockingTransfer(NamedTuple):
    """A message between ranks with blocking transfers."""

    task: Task
    """The task that consumes it."""
    sender: End
    receiver: End
    began_ns: int
    """The time at which both sides were ready."""
    passed_ns: int

    @property
    def last(self) -> End:
        """The side that was ready last, for which the other one waited; of equals the one whose
        previous task ended later, else the receiver."""
        return max(self.receiver, self.sender, key=lambda end: (end.there_ns, end.free_ns))


@dataclass(slots=True)
class BlockingRank:
    """The tasks of a rank, and its waits for transfers in the gaps before, between and after
    them."""

    pp_rank: int
    spans: dict[Task, Span]
    """The time of each task, from the last member's start to the last member's end, in sequence."""
    free_ns: list[int]
    """By gap: the end of the task before it; for the first gap, the time at which the rank could
    begin."""
    waits: list[list[WaitRecord]]
    """By gap, in order of time."""
    transfers: list[list[BlockingTransfer]] = field(default_factory=list)
    """By gap, in the order in which they passed."""


def find_transfers(
    shape: Shape, replica: Sequence[Members], entries_ns: Sequence[int], *, are_recorded: bool
) -> list[BlockingRank]:
    """Reconstruct the transfers of one replica's step; return its pipeline ranks with them.
    `entries_ns` is the time at which each rank could begin.

    If the messages themselves `are_recorded` (as `ReceiveRecord`, from the time at which both sides
    were ready), the leaders' times count. Otherwise a transfer ends when the first of its ranks
    goes on, but not before the task that sends it.
    """
    return _Replica(shape, replica, entries_ns, are_recorded=are_recorded).ranks


class _Place(NamedTuple):
    """A wait of a rank: its gap, and its number among the gap's waits; -1 without a wait."""

    pp_rank: int
    gap: int
    wait: int


class _Message(NamedTuple):
    """A message and its times."""

    task: Task
    link: tuple[int, int]
    """The sender and the receiver."""
    began_ns: int
    passed_ns: int
    asked: int = 0
    """The gap in which the receiver waits for it, if known. A small message may leave earlier, if
    the transport buffers it."""


class _Replica:
    """Reconstructs the transfers of one replica's step."""

    def __init__(
        self,
        shape: Shape,
        replica: Sequence[Members],
        entries_ns: Sequence[int],
        *,
        are_recorded: bool,
    ) -> None:
        self.ranks = [
            _rank(pp_rank, members, entry_ns)
            for pp_rank, (members, entry_ns) in enumerate(zip(replica, entries_ns, strict=True))
        ]
        self._numbers = [{task: n for n, task in enumerate(rank.spans)} for rank in self.ranks]
        self._starts_ns = [[start_ns for start_ns, _ in rank.spans.values()] for rank in self.ranks]
        recorded: dict[Task, Span] = {
            task_of(receive): receive[:2]
            for members in replica
            for receive in members[0].receives
            if are_recorded
        }
        messages = []
        untimed = []
        for task in (task for rank in self.ranks for task in rank.spans):
            sender, link = shape.sender(task), shape.link(task)
            if sender is None or link is None or sender not in self._numbers[link[0]]:
                continue
            if task in recorded:
                messages.append(_Message(task, link, *recorded[task]))
            else:
                untimed.append((task, self._sends(link[0], sender), self._receives(link[1], task)))
        messages += self._timed(untimed, shape)
        self._keep(messages)

    def _timed(
        self, untimed: Sequence[tuple[Task, _Place, _Place]], shape: Shape
    ) -> Iterator[_Message]:
        """Derive the times of messages from the waits of both sides, and yield them: a message
        passes when the first of the two ranks goes on, but not before the task that sends it has
        ended. It begins when both are free of earlier tasks and transfers."""
        passed_ns: dict[Task, int] = {}
        # The end of the transfers that a rank waited for at each place.
        place_passed_ns: defaultdict[_Place, int] = defaultdict(int)
        for task, sends, receives in untimed:
            sender = shape.sender(task)
            assert sender is not None
            goes_on_ns = [
                self.ranks[place.pp_rank].waits[place.gap][place.wait].end_ns
                for place in (sends, receives)
                if place.wait >= 0
            ]
            left_ns = self.ranks[sends.pp_rank].spans[sender][1]
            passed_ns[task] = max(left_ns, min(goes_on_ns, default=0))
            for place in (sends, receives):
                place_passed_ns[place] = max(place_passed_ns[place], passed_ns[task])
        for task, sends, receives in untimed:
            began_ns = max(
                max(
                    self.ranks[place.pp_rank].free_ns[place.gap],
                    *(place_passed_ns[place._replace(wait=n)] for n in range(place.wait)),
                    0,
                )
                for place in (sends, receives)
            )
            link = sends.pp_rank, receives.pp_rank
            began_ns = min(began_ns, passed_ns[task])
            yield _Message(task, link, began_ns, passed_ns[task], receives.gap)

    def _keep(self, messages: list[_Message]) -> None:
        """Replace the ranks' transfers by these messages', each in the gap of waits in which it
        passed; on the receiver's side only if that is not before the gap in which it waits for it.
        The list is sorted by the time of passing."""
        messages.sort(key=lambda each: each.passed_ns)
        passed: list[list[_Message]] = [[] for _ in self.ranks]
        for message in messages:
            for pp_rank in message.link:
                passed[pp_rank].append(message)
        for rank in self.ranks:
            rank.transfers = [[] for _ in rank.waits]
        for message in messages:
            sender, receiver = (
                self._end(message, pp_rank, passed[pp_rank]) for pp_rank in message.link
            )
            transfer = BlockingTransfer(
                message.task, sender, receiver, message.began_ns, message.passed_ns
            )
            for pp_rank in message.link:
                gap = self._gap_at(pp_rank, message.passed_ns)
                if pp_rank == message.link[0] or gap >= message.asked:
                    self.ranks[pp_rank].transfers[gap].append(transfer)

    def _end(self, message: _Message, pp_rank: int, passed: Sequence[_Message]) -> End:
        """Return one side of a message. It was ready at the end of its previous task or transfer,
        whichever is later."""
        gap = self._gap_at(pp_rank, message.began_ns)
        free_ns = self.ranks[pp_rank].free_ns
        num_before = bisect_right(passed, message.began_ns, key=lambda each: each.passed_ns)
        before = passed[max(0, num_before - 2) : num_before]
        last = next((each for each in reversed(before) if each != message), None)
        there_ns = free_ns[gap] if last is None else max(free_ns[gap], last.passed_ns)
        return End(pp_rank, gap, there_ns, free_ns[gap])

    def _gap_at(self, pp_rank: int, time_ns: int) -> int:
        """Return the gap in which a rank is at a time. While it runs a task (a weight gradient,
        which overlaps with transfers), it is the gap before that."""
        gap = bisect_left(self._starts_ns[pp_rank], time_ns)
        while gap > 0 and self.ranks[pp_rank].free_ns[gap] > time_ns:
            gap -= 1
        return gap

    def _receives(self, pp_rank: int, task: Task) -> _Place:
        """Return the last wait of a rank that may be for a task's input: right before the task, or
        before an earlier one. Without any wait, its number is -1."""
        waits, own = self.ranks[pp_rank].waits, self._numbers[pp_rank][task]
        gap = next((gap for gap in range(own, -1, -1) if waits[gap]), own)
        return _Place(pp_rank, gap, len(waits[gap]) - 1)

    def _sends(self, pp_rank: int, task: Task) -> _Place:
        """Return the first wait of a rank that may be for sending a task's output: right after the
        task, or after a later one. Without any wait, its number is -1."""
        waits, after = self.ranks[pp_rank].waits, self._numbers[pp_rank][task] + 1
        gap = next((gap for gap in range(after, len(waits)) if waits[gap]), after)
        return _Place(pp_rank, gap, 0 if waits[gap] else -1)


def _rank(pp_rank: int, members: Members, entry_ns: int) -> BlockingRank:
    """Collect the tasks of a rank and its waits by gap. Of several members, the waits of the one
    whose last wait in the gap ends latest count, from the time at which the last member was
    free."""
    spans = spans_of(members)
    free_ns = [entry_ns, *(end_ns for _, end_ns in spans.values())]
    of_members = [_waits(member, len(free_ns)) for member in members]
    waits = [
        # The member that waits longest, from when the last one was free.
        [
            wait._replace(start_ns=max(wait.start_ns, free), end_ns=max(wait.end_ns, free))
            for wait in max(of_gap, key=lambda each: max((w.end_ns for w in each), default=0))
        ]
        for free, of_gap in zip(free_ns, zip(*of_members, strict=True), strict=True)
    ]
    return BlockingRank(pp_rank, spans, free_ns, waits)


def _waits(member: RankStep, num_gaps: int) -> list[list[WaitRecord]]:
    """Return the waits of a member for transfers, by gap and in order of time; waits for gradient
    reduction are left out."""
    starts_ns = sorted(task.start_ns for task in member.tasks)
    waits: list[list[WaitRecord]] = [[] for _ in range(num_gaps)]
    for wait in sorted(member.waits):
        if wait.cause != Cause.GRADIENT_SYNC:
            waits[min(bisect_left(starts_ns, wait.end_ns), num_gaps - 1)].append(wait)
    return waits


def spans_of(members: Members) -> dict[Task, Span]:
    """Return the time of each task of a group, from the last member's start to the last member's
    end, in the sequence in which the tasks ran."""
    spans: dict[Task, Span] = {}
    for rank in members:
        for record in rank.tasks:
            task = task_of(record)
            start_ns, end_ns = spans.get(task, (record.start_ns, record.end_ns))
            spans[task] = max(start_ns, record.start_ns), max(end_ns, record.end_ns)
    return dict(sorted(spans.items(), key=lambda item: item[1]))
