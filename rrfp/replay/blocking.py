"""Where the ranks of a run with blocking transfers met, message by message.

A transfer begins when both its ranks are there, and neither goes on until it has passed. Megatron's
own schedules record only that a rank waited. Which messages a wait was for follows from the tasks
around it: a rank sends what a task gave right after it, or after a later one, and receives what a
task takes right before it, or before an earlier one.
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
"""From and to, in ns."""


class End(NamedTuple):
    """One of the two ranks of a message."""

    pp_rank: int
    gap: int
    """Before its task of that number the rank was there."""
    there_ns: int
    """When it was: its task before, and its transfers before, had ended."""
    free_ns: int
    """When its task before had ended."""


class Meeting(NamedTuple):
    """A message of a blocking run."""

    task: Task
    """The task that takes it."""
    sender: End
    receiver: End
    began_ns: int
    """When both ends were there."""
    passed_ns: int

    @property
    def last(self) -> End:
        """The end that came last: who was waited for."""
        return max(self.receiver, self.sender, key=lambda end: (end.there_ns, end.free_ns))


@dataclass(slots=True)
class BlockingRank:
    """The tasks of a rank, and its waits for transfers in the gaps before, between and after."""

    pp_rank: int
    spans: dict[Task, Span]
    """From when the last member began each task to when the last one ended it, in sequence."""
    free_ns: list[int]
    """By gap: when the rank has ended the task before; in the first one, when it can begin."""
    waits: list[list[WaitRecord]]
    """By gap, in order of time."""
    meetings: list[list[Meeting]] = field(default_factory=list)
    """By gap, in the order in which they passed."""


def meet(
    shape: Shape, replica: Sequence[Members], entries_ns: Sequence[int], *, are_recorded: bool
) -> list[BlockingRank]:
    """The pipeline ranks of one replica's step, with their meetings. `entries_ns` is when each of
    them is free to begin.

    Where the messages themselves `are_recorded` (`ReceiveRecord`, from when both ends were there),
    they are taken so. Otherwise a message has passed when the first of its ranks goes on.
    """
    return _Replica(shape, replica, entries_ns, are_recorded=are_recorded).ranks


class _Place(NamedTuple):
    """A wait of a rank: the gap that it is in, and which of the gap's waits; -1 if it has none."""

    pp_rank: int
    gap: int
    wait: int


class _Message(NamedTuple):
    """A message and its times."""

    task: Task
    link: tuple[int, int]
    """Its sender and its receiver."""
    began_ns: int
    passed_ns: int
    asked: int = 0
    """The receiver's gap in which it waits for it, if that is known. A small message may leave
    before, where the transport keeps it."""


class _Replica:
    """Finds the meetings of one replica's step."""

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
        """Messages whose times follow from the waits of their ends."""
        passed_ns: dict[Task, int] = {}
        # When the messages that a rank waited for at a place had passed.
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
        """Make meetings of messages."""
        messages.sort(key=lambda each: each.passed_ns)
        passed: list[list[_Message]] = [[] for _ in self.ranks]
        for message in messages:
            for pp_rank in message.link:
                passed[pp_rank].append(message)
        for rank in self.ranks:
            rank.meetings = [[] for _ in rank.waits]
        for message in messages:
            sender, receiver = (
                self._end(message, pp_rank, passed[pp_rank]) for pp_rank in message.link
            )
            meeting = Meeting(message.task, sender, receiver, message.began_ns, message.passed_ns)
            for pp_rank in message.link:
                gap = self._gap_at(pp_rank, message.passed_ns)
                if pp_rank == message.link[0] or gap >= message.asked:
                    self.ranks[pp_rank].meetings[gap].append(meeting)

    def _end(self, message: _Message, pp_rank: int, passed: Sequence[_Message]) -> End:
        """An end of a message. It came when the last thing that it did before had ended: its task,
        or another transfer."""
        gap = self._gap_at(pp_rank, message.began_ns)
        free_ns = self.ranks[pp_rank].free_ns
        num_before = bisect_right(passed, message.began_ns, key=lambda each: each.passed_ns)
        before = passed[max(0, num_before - 2) : num_before]
        last = next((each for each in reversed(before) if each != message), None)
        there_ns = free_ns[gap] if last is None else max(free_ns[gap], last.passed_ns)
        return End(pp_rank, gap, there_ns, free_ns[gap])

    def _gap_at(self, pp_rank: int, time_ns: int) -> int:
        """The gap that a rank is in at a time. If it runs a task then, a weight gradient that
        transfers pass beside, the one before."""
        gap = bisect_left(self._starts_ns[pp_rank], time_ns)
        while gap > 0 and self.ranks[pp_rank].free_ns[gap] > time_ns:
            gap -= 1
        return gap

    def _receives(self, pp_rank: int, task: Task) -> _Place:
        """Where a rank waits for a task's input: right before it, or before an earlier task."""
        waits, own = self.ranks[pp_rank].waits, self._numbers[pp_rank][task]
        gap = next((gap for gap in range(own, -1, -1) if waits[gap]), own)
        return _Place(pp_rank, gap, len(waits[gap]) - 1)

    def _sends(self, pp_rank: int, task: Task) -> _Place:
        """Where a rank waits for a task's output to go: right after it, or after a later task."""
        waits, after = self.ranks[pp_rank].waits, self._numbers[pp_rank][task] + 1
        gap = next((gap for gap in range(after, len(waits)) if waits[gap]), after)
        return _Place(pp_rank, gap, 0 if waits[gap] else -1)


def _rank(pp_rank: int, members: Members, entry_ns: int) -> BlockingRank:
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
    """A member's waits for transfers, by gap."""
    starts_ns = sorted(task.start_ns for task in member.tasks)
    waits: list[list[WaitRecord]] = [[] for _ in range(num_gaps)]
    for wait in sorted(member.waits):
        if wait.cause != Cause.GRADIENT_SYNC:
            waits[min(bisect_left(starts_ns, wait.end_ns), num_gaps - 1)].append(wait)
    return waits


def spans_of(members: Members) -> dict[Task, Span]:
    """From when the last member began each task to when the last one ended it, in the sequence in
    which they ran."""
    spans: dict[Task, Span] = {}
    for rank in members:
        for record in rank.tasks:
            task = task_of(record)
            start_ns, end_ns = spans.get(task, (record.start_ns, record.end_ns))
            spans[task] = max(start_ns, record.start_ns), max(end_ns, record.end_ns)
    return dict(sorted(spans.items(), key=lambda item: item[1]))
