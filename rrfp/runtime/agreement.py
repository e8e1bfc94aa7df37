"""Agreement in a group: ranks that share a collective inside a task run the same sequence.

A star over the transport's links. Members report arrived inputs to the leader. Its dispatcher
counts the reports and decides by the group's rule: the intersection of the ready sets, or the
paper's unanimous first picks (section 4.2). The leader sends each decision with its position in the
step's sequence, and members run the tasks in that sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import Clock, Decided, Links, Reported, monotonic
from rrfp.schedule.dispatcher import Group
from rrfp.schedule.stimuli import InputArrived
from rrfp.schedule.tasks import Task
from rrfp.trace.records import AgreementRecord, Record


class StarAgreement:
    """One rank's side of its group's agreement (`rrfp.runtime.protocols.Agreement`)."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        links: Links,
        record: Callable[[Record], None],
        clock: Clock = monotonic,
    ) -> None:
        """`members` are the group's global ranks, in the same order everywhere; the first leads."""
        self._links = links
        self._record = record
        self._clock = clock
        self._leader, *self._followers = members
        self._member_of = {member: index for index, member in enumerate(members)}
        self._decisions: deque[Decided] = deque()
        self._position = 0
        self.group = Group(len(members), self._leader == rank) if self._followers else None

    def start_step(self) -> None:
        self._position = 0

    def report(self, step: int, task: Task) -> None:
        """A task's input has arrived; a follower reports it to its leader."""
        if self.group is not None and not self.group.leads:
            self._links.report(self._leader, step, task)

    def reported(self, event: Reported) -> InputArrived:
        """A follower's report as a stimulus for the leader's dispatcher."""
        return InputArrived(event.task, self._member_of[event.peer])

    def decided(self, event: Decided) -> None:
        """The leader has decided; decisions arrive in the order in which they run."""
        self._decisions.append(event)

    def next(self) -> Task | None:
        """The next task of the group's sequence, if this rank is a follower and knows it yet."""
        return self._decisions[0].task if self._decisions else None

    def owed(self, missing_members: int) -> dict[int, str]:
        """By rank: what it owes tasks whose input is missing at these members (bits)."""
        if self.group is None:
            return {}
        if self.group.leads:
            return {
                follower: "reports of what has arrived there"
                for follower in self._followers
                if missing_members >> self._member_of[follower] & 1
            }
        return {self._leader: "the group's next decision"}

    def dispatched(self, step: int, task: Task) -> None:
        """A task was dispatched: the leader sends the decision, a follower ticks it off."""
        if self.group is None:
            return
        start_ns = self._clock()
        if self.group.leads:
            for follower in self._followers:
                self._links.decide(follower, step, self._position, task)
        else:
            decision = self._decisions.popleft()
            if decision.position != self._position:
                raise RrfpError(
                    f"decision {decision.position} of rank {self._leader} came in place of "
                    f"{self._position}; the sequence of its group is broken"
                )
        stage, kind, microbatch = task
        self._record(
            AgreementRecord(start_ns, self._clock(), step, kind, stage, microbatch, self._position)
        )
        self._position += 1
