"""Pipelines in virtual time: one dispatcher per member of a rank, and a heap of events.

All arrivals of an instant are processed before its decisions. Messages on a directed link keep
their sequence; messages on different links may overtake each other.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import Order
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import (
    Announced,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Instruction,
    Kind,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Wait,
    Waited,
)

Sets = Sequence[Sequence[int]]
"""The members of a rank, each in exactly one set."""


class Node(NamedTuple):
    """A member of a pipeline rank: the process with that rank in pipeline number `member`."""

    rank: int
    member: int


class Decider(Protocol):
    """A `Dispatcher`, or a deliberately wrong one."""

    def handle(self, now_ns: int, stimulus: Stimulus) -> tuple[Instruction, ...]: ...


class Ran(NamedTuple):
    start_ns: int
    end_ns: int
    run: RunTask


@dataclass(slots=True)
class NodeHistory:
    """The events of one node, each list in order of time."""

    arrivals: list[tuple[int, Task]] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    is_done: bool = False

    @property
    def tasks(self) -> list[Task]:
        return [ran.run.task for ran in self.ran]


@dataclass(slots=True)
class History:
    """The events of one step on all nodes."""

    shape: Shape
    groups: Sequence[Sets]
    nodes: dict[Node, NodeHistory]

    @property
    def makespan_ns(self) -> int:
        return max(ran.end_ns for node in self.nodes.values() for ran in node.ran)

    @property
    def is_whole(self) -> bool:
        return all(node.is_done for node in self.nodes.values())


Duration = Callable[[Node, Task], int]
"""Nanoseconds, at least 1, that a task takes on a node."""
Latency = Callable[[Node, Node], int]
"""Nanoseconds, at least 0, that the next message between two nodes takes."""
Ahead = Callable[[Node], int | None]
"""Nanoseconds after a task's start at which the node decides on its next task; None: at its end."""


Announcer = Callable[[Node, Task, int], tuple[int, int] | None]
"""The announcement that a starting task sends to the receiver of its output, given the ns that it
will take: the ns until the output is expected, and the patience in ns. None: no announcement."""


@dataclass(frozen=True, slots=True)
class VirtualConditions:
    """The conditions of a step: times, latencies, announcements, groups and collectives."""

    duration: Duration
    latency: Latency = lambda _sender, _receiver: 0
    ahead: Ahead = lambda _node: None
    announcer: Announcer = lambda _node, _task, _duration: None
    groups: Sequence[Sets] | None = None
    """The groups of members that run one order, by rank; the first member of a group leads. None:
    all members form one group."""
    collectives: Sequence[Sets] | None = None
    """The members that share a collective inside each task, by stage. The task ends when the last
    of these members, which must all start it, has spent its time on it. None: no shared
    collectives."""


def play(
    shape: Shape, deciders: Sequence[Sequence[Decider]], conditions: VirtualConditions | Duration
) -> History:
    """Run one step with `deciders[rank][member]` until no event is left.

    Member i of a rank receives from member i of the neighboring ranks. Followers report arrivals to
    their leader, and run its decisions. A duration stands for conditions with only that duration.
    """
    return _Step(
        shape,
        deciders,
        conditions if isinstance(conditions, VirtualConditions) else VirtualConditions(conditions),
    ).play()


class _Step:
    def __init__(
        self, shape: Shape, deciders: Sequence[Sequence[Decider]], conditions: VirtualConditions
    ) -> None:
        members = range(len(deciders[0]))
        groups = conditions.groups or [[members]] * shape.num_ranks
        collectives = conditions.collectives or [[[each] for each in members]] * shape.num_stages
        self._shape = shape
        self._conditions = conditions
        self._deciders = {
            Node(rank, member): decider
            for rank, of_rank in enumerate(deciders)
            for member, decider in enumerate(of_rank)
        }
        self._group = {
            Node(rank, member): [Node(rank, each) for each in group]
            for rank, of_rank in enumerate(groups)
            for group in of_rank
            for member in group
        }
        self._sharers = {
            (stage, member): tuple(sharers)
            for stage, of_stage in enumerate(collectives)
            for sharers in of_stage
            for member in sharers
        }
        self._history = History(shape, groups, {node: NodeHistory() for node in self._deciders})
        self._heap: list[tuple[int, int, int, Callable[[int], None]]] = []
        self._num_events = 0
        self._link_free_at: dict[tuple[Node, Node], int] = {}
        self._to_ask: set[Node] = set()
        self._running: dict[Node, RunTask] = {}
        self._decided_ahead: dict[Node, RunTask] = {}
        self._begun: dict[tuple[Task, tuple[int, ...]], list[tuple[Node, int, RunTask]]] = {}
        self._decisions: dict[Node, deque[Task]] = {node: deque() for node in self._deciders}

    def play(self) -> History:
        for node in self._deciders:
            self._ask_at(0, node)
        while self._heap:
            now, _, _, happen = heappop(self._heap)
            happen(now)
        return self._history

    def _at(self, time: int, priority: int, happen: Callable[[int], None]) -> None:
        self._num_events += 1
        heappush(self._heap, (time, priority, self._num_events, happen))

    def _ask_at(self, now: int, node: Node) -> None:
        if node not in self._to_ask and node not in self._running:
            self._to_ask.add(node)
            self._at(now, 1, partial(self._ask, node))

    def _send(self, now: int, sender: Node, receiver: Node, arrive: Callable[[int], None]) -> None:
        link = (sender, receiver)
        arrival = now + self._conditions.latency(sender, receiver)
        arrival = max(arrival, self._link_free_at.get(link, 0))
        self._link_free_at[link] = arrival
        self._at(arrival, 0, arrive)

    # Arrivals.

    def _input(self, node: Node, task: Task, now: int) -> None:
        self._history.nodes[node].arrivals.append((now, task))
        self._take_in(node, InputArrived(task), now)
        leader, *followers = self._group[node]
        if node in followers:
            report = InputArrived(task, 1 + followers.index(node))
            self._send(now, node, leader, partial(self._take_in, leader, report))

    def _take_in(self, node: Node, arrival: InputArrived | Announced, now: int) -> None:
        assert self._deciders[node].handle(now, arrival) == ()
        self._ask_at(now, node)

    def _announcement(self, node: Node, task: Task, announced: tuple[int, int], now: int) -> None:
        left, patience = announced
        self._take_in(node, Announced(task, now + left, patience), now)

    def _decision(self, node: Node, task: Task, now: int) -> None:
        self._decisions[node].append(task)
        self._ask_at(now, node)

    # Decisions.

    def _ask(self, node: Node, now: int) -> None:
        self._to_ask.discard(node)
        if node in self._decided_ahead:
            self._start(now, node, self._decided_ahead.pop(node))
            return
        decisions = self._decisions[node]
        stimulus = TaskAgreed(decisions.popleft()) if decisions else ComputeIdle()
        for instruction in self._deciders[node].handle(now, stimulus):
            match instruction:
                case RunTask():
                    self._send_decision(now, node, instruction.task)
                    self._start(now, node, instruction)
                case Waited():
                    self._history.nodes[node].waits.append(instruction)
                case Wait(_, deadline) if deadline is not None:
                    assert deadline > now, "a wait whose deadline is over"
                    self._at(deadline, 0, partial(self._end_patience, node))
                case StepDone():
                    self._history.nodes[node].is_done = True

    def _end_patience(self, node: Node, now: int) -> None:
        self._ask_at(now, node)

    def _ask_ahead(self, node: Node, running: RunTask, now: int) -> None:
        if self._running.get(node) is not running:
            return  # The task has ended, so the node has already decided.
        for instruction in self._deciders[node].handle(now, DecideAhead()):
            assert isinstance(instruction, RunTask)
            self._send_decision(now, node, instruction.task)
            self._decided_ahead[node] = instruction

    def _send_decision(self, now: int, node: Node, task: Task) -> None:
        leader, *followers = self._group[node]
        if node == leader:
            for follower in followers:
                self._send(now, node, follower, partial(self._decision, follower, task))

    # Tasks.

    def _start(self, now: int, node: Node, run: RunTask) -> None:
        self._running[node] = run
        ahead = self._conditions.ahead(node) if node == self._group[node][0] else None
        if ahead is not None:
            self._at(now + ahead, 1, partial(self._ask_ahead, node, run))
        # A member that starts another task than its sharers never ends it.
        sharers = self._sharers.get((run.task.stage, node.member), (node.member,))
        begun = self._begun.setdefault((run.task, sharers), [])
        begun.append((node, now, run))
        if len(begun) == len(sharers):
            duration = self._conditions.duration
            end = max(start + duration(each, run.task) for each, start, _ in begun)
            for each, start, its_run in begun:
                self._history.nodes[each].ran.append(Ran(start, end, its_run))
                self._announce(now, each, run.task, end - now)
                self._at(end, 0, partial(self._finish, each, run.task))

    def _announce(self, now: int, node: Node, task: Task, duration: int) -> None:
        consumer = self._shape.receiver(task)
        announced = self._conditions.announcer(node, task, duration)
        if consumer is None or announced is None:
            return
        receiver = Node(self._shape.rank_of(consumer.stage), node.member)
        if receiver.rank != node.rank:
            # Announcements are not in sequence with messages, so one may arrive after its message.
            latency = self._conditions.latency(node, receiver)
            self._at(now + latency, 0, partial(self._announcement, receiver, consumer, announced))

    def _finish(self, node: Node, task: Task, now: int) -> None:
        del self._running[node]
        self._ask_at(now, node)
        consumer = self._shape.receiver(task)
        if consumer is None:
            return
        receiver = Node(self._shape.rank_of(consumer.stage), node.member)
        if receiver.rank != node.rank:
            self._send(now, node, receiver, partial(self._input, receiver, consumer))


# Checks that apply to every step under any policy, from its history only.


F, B, W = Kind.F, Kind.B, Kind.W


def check_step(
    history: History,
    *,
    limit: int | None = None,
    hold: int | None = None,
    order: Order | None = None,
    sizes: ActivationSizes | None = None,
    budgets: Sequence[int] | None = None,
) -> None:
    """Check that a step is valid and has ended.

    Each rank runs every task once, one at a time, after its prerequisites. D and the used slots
    stay within their bounds. Waits cover all idle time, reported counts are correct, and the
    members of a group run one sequence.

    `limit` is the limit on D (with several chunks, D may exceed it by their number), `hold` is in
    slots, `sizes` are by stage, and `budgets` in bytes by rank.
    """
    shape = history.shape
    # D exceeds the limit only while a rank finishes a microbatch that has forwards left.
    limit = limit if limit is None or shape.num_chunks == 1 else limit + shape.num_chunks
    for node, happened in history.nodes.items():
        assert len(set(happened.tasks)) == len(happened.tasks), f"{node} ran a task twice"
        assert set(happened.tasks) <= set(shape.tasks_of(node.rank)), f"{node} ran another's task"
        _check_time(happened)
        _check_counts(shape, node, happened, limit, hold)
        if sizes is not None:
            _check_bytes(shape, node, happened, sizes, budgets)
        if order is not None:
            _check_places(order.rows[node.rank], happened)
    _check_sequences(history)
    _check_prerequisites(history)
    for node, happened in history.nodes.items():
        missing = set(shape.tasks_of(node.rank)) - set(happened.tasks)
        assert not missing, f"the step stalled; {node} did not run {sorted(missing)}"
    assert history.is_whole


def _check_time(happened: NodeHistory) -> None:
    """Check that tasks and waits fill the time from 0 to the last end without gaps or overlaps."""
    intervals = [(start, end, 1) for start, end, _ in happened.ran]
    intervals += [(start, end, 0) for _, start, end in happened.waits]
    cursor = 0
    for start, end, _ in sorted(intervals):
        assert start == cursor, f"{cursor} to {start} is in no interval, or in two"
        cursor = end


def _check_counts(
    shape: Shape, node: Node, happened: NodeHistory, limit: int | None, hold: int | None
) -> None:
    depth = held = 0
    frees = W if shape.splits_backward else B
    keeps = B in shape.kinds  # A forward-only step holds no activations.
    for _, _, run in happened.ran:
        task = run.task
        depth += (task.kind is F) - (task.kind is B)
        held += (task.kind is F and keeps) - (task.kind is frees)
        counted = (run.depth, run.held)
        assert counted == (depth, held), f"{task} states {counted}, not {(depth, held)}"
        assert limit is None or depth <= limit, f"D is {depth} on {node}, above {limit}"
        assert hold is None or held <= hold, f"{node} uses {held} slots of {hold}"
        assert shape.stage_of(node.rank, run.chunk) == task.stage, f"{task} in chunk {run.chunk}"


def _check_bytes(
    shape: Shape,
    node: Node,
    happened: NodeHistory,
    sizes: ActivationSizes,
    budgets: Sequence[int] | None,
) -> None:
    held_bytes: dict[tuple[int, int], int] = {}
    for _, _, run in happened.ran:
        stage, kind, microbatch = run.task
        if kind is F and B in shape.kinds:
            held_bytes[stage, microbatch] = sizes.activations[stage][microbatch]
        elif kind is B and shape.splits_backward:
            if sizes.pending_w is not None:
                held_bytes[stage, microbatch] = sizes.pending_w[stage][microbatch]
        elif kind is not F:
            del held_bytes[stage, microbatch]
        used = sum(held_bytes.values())
        assert run.held_bytes == used, f"{run.task} states {run.held_bytes} bytes, not {used}"
        budget = None if budgets is None else budgets[node.rank]
        assert budget is None or used <= budget, f"{node} uses {used} bytes of {budget}"


def _check_places(row: tuple[Task, ...], happened: NodeHistory) -> None:
    unfinished = list(row)
    for _, _, run in happened.ran:
        place = (row.index(run.task), unfinished.index(run.task))
        unfinished.remove(run.task)
        stated = (run.hint_position, run.skipped)
        assert stated == place, f"{run.task} states place and skipped {stated}, not {place}"


def _check_sequences(history: History) -> None:
    for rank, groups in enumerate(history.groups):
        for leader, *followers in groups:
            sequence = history.nodes[Node(rank, leader)].tasks
            for member in followers:
                tasks = history.nodes[Node(rank, member)].tasks
                same = tasks == sequence[: len(tasks)]
                assert same, f"{Node(rank, member)} left its group's sequence"


def _check_prerequisites(history: History) -> None:
    ends_of: dict[int, dict[Task, int]] = {}
    for node, happened in history.nodes.items():
        ends = ends_of.setdefault(node.member, {})
        ends.update((ran.run.task, ran.end_ns) for ran in happened.ran)
    for node, happened in history.nodes.items():
        for start, _, run in happened.ran:
            for needed in history.shape.prerequisites(run.task):
                _check_prerequisite(ends_of[node.member], run.task, start, needed)


def _check_prerequisite(ends: Mapping[Task, int], task: Task, start: int, needed: Task) -> None:
    end = ends.get(needed)
    assert end is not None, f"{task} ran and {needed}, which it needs, did not"
    assert end <= start, f"{task} ran before {needed}, which it needs, had ended"
