"""Agreement in a group: ranks that share a collective inside a task run the same sequence.

Members report arrived inputs to the leader over the transport's links. The leader's dispatcher
counts the reports and decides by the group's rule: the intersection of the ready sets, or the
paper's unanimous first picks (section 4.2). The leader sends each decision with its position in the
step's sequence, and members run the tasks in that sequence.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.protocols import Clock, InputReported, Links, TaskDecided, monotonic
from rrfp.schedule.dispatcher import Group
from rrfp.schedule.punctuality import Durations
from rrfp.schedule.tasks import InputArrived, Kind, Task
from rrfp.trace.records import AgreementRecord, Record


class GroupAgreement:
    """One rank's side of the agreement by which the ranks of a group run their tasks in one order;
    the first member leads. Except for `report`, only the thread that holds the dispatcher calls it.
    A rank that has nothing to agree on has no `group`."""

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
        self._decisions: deque[TaskDecided] = deque()
        self._position = 0
        self.group = Group(len(members), self._leader == rank) if self._followers else None

    def start_step(self) -> None:
        """Restart the step's sequence at position 0. Queued decisions stay."""
        self._position = 0

    def report(self, step: int, task: Task) -> None:
        """Report to the group's leader that a task's input has arrived, perhaps for a later step;
        does nothing on the leader and without a group. A link's thread calls it, because the leader
        may decide while a task runs here."""
        if self.group is not None and not self.group.leads:
            self._links.report(self._leader, step, task)

    def stimulus_of(self, event: InputReported) -> InputArrived:
        """Convert a follower's report to the stimulus `InputArrived` of the leader's dispatcher,
        with the follower's index in the group."""
        return InputArrived(event.task, self._member_of[event.peer])

    def add_decision(self, event: TaskDecided) -> None:
        """Append a decision of the leader to the queue; decisions arrive in the order in which they
        run."""
        self._decisions.append(event)

    def next(self) -> Task | None:
        """Return the first queued decision's task, without removing it; None without one, and
        always on a rank that decides itself."""
        return self._decisions[0].task if self._decisions else None

    def pending_messages(self, missing_members: int) -> dict[int, str]:
        """Describe the group's messages that this rank waits for, by the sending rank. The leader
        waits for reports of the followers whose bit in `missing_members` is set (bit 0 is the
        leader), a follower for the next decision. Empty without a group."""
        if self.group is None:
            return {}
        if self.group.leads:
            return {
                follower: "reports of what has arrived there"
                for follower in self._followers
                if missing_members >> self._member_of[follower] & 1
            }
        return {self._leader: "the group's next decision"}

    def note_dispatch(self, step: int, task: Task) -> None:
        """Record that this rank dispatched a task at the next position of the sequence. The leader
        sends the decision to all followers; a follower removes it from its queue, and raises
        RrfpError if it has another position. Does nothing without a group."""
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


_LONGEST_LEAD_NS = 1_000_000


class AheadThread:
    """Thread of a group's leader that calls `decide` at most once for each task, shortly before the
    task should end.

    A late decision can use more of the arrivals, but a decision before the end of the task hides
    the time that it needs to reach the members. `decide` runs on this thread, and only within
    `while_running`: at all other times its state belongs to the compute thread.
    """

    def __init__(self, decide: Callable[[], None], clock: Clock) -> None:
        self._decide = decide
        self._clock = clock
        self._durations = Durations()
        # Held while `decide` runs, and by the compute thread at a task's start and end.
        self._condition = Condition()
        self._due_ns: float | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="rrfp-ahead", daemon=True)

    def start(self) -> None:
        """Start the thread; `close` ends it."""
        self._thread.start()

    @contextmanager
    def while_running(self, kind: Kind, chunk: int) -> Iterator[None]:
        """Wrap the running of a task, and let `decide` run 1 ms before its expected end, or halfway
        if it is shorter than 2 ms; not if this kind and chunk have not run yet. After a task that
        succeeds, raise what `decide` raised, or else learn the duration. The error of a task that
        fails gets a note about that of `decide`, if any."""
        start_ns = self._clock()
        expected_ns = self._durations.expected_ns(kind, chunk)
        if expected_ns is not None:
            lead_ns = min(_LONGEST_LEAD_NS, expected_ns / 2)
            with self._condition:
                self._due_ns = start_ns + expected_ns - lead_ns
                self._condition.notify()
        try:
            yield
        except BaseException as error:
            self._end_task()
            if (failure := self._failure) is not None:
                what = first_line(str(failure))
                error.add_note(f"Deciding ahead failed, too: {type(failure).__name__}: {what}")
            raise
        self._end_task()
        if self._failure is not None:
            raise self._failure
        self._durations.took(kind, chunk, self._clock() - start_ns)

    def _end_task(self) -> None:
        """Let no decision begin any more, and wait for the end of one that has begun."""
        with self._condition:
            self._due_ns = None

    def close(self) -> None:
        """End the thread and wait for its end. Call it between two tasks."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        """Call `decide` at each due time, with the condition held, until `close`. An exception of
        `decide` is stored for `while_running`, and ends the thread."""
        with self._condition:
            while not self._is_closed:
                if self._due_ns is None:
                    self._condition.wait()
                    continue
                early_ns = self._due_ns - self._clock()
                if early_ns > 0:
                    self._condition.wait(early_ns / 1e9)
                    continue
                self._due_ns = None
                try:
                    self._decide()
                except BaseException as error:  # reraised on the compute thread
                    self._failure = error
                    return
