"""Pipelines in virtual time: one dispatcher a rank, a heap of events, no clock and no thread.

All events of one instant are taken in before any decision of that instant. Messages keep their
sequence on a directed link and may overtake each other between links.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from rrfp.schedule.dispatcher import (
    ComputeIdle,
    InputArrived,
    Instruction,
    RunTask,
    StepDone,
    Stimulus,
    TaskAgreed,
    Waited,
)
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task


class Node(NamedTuple):
    """One member of one pipeline rank's group; member 0 leads."""

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
    """What happened on one node, each list in the order in which it happened."""

    arrivals: list[tuple[int, Task]] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    is_done: bool = False

    @property
    def tasks(self) -> list[Task]:
        return [ran.run.task for ran in self.ran]


@dataclass(slots=True)
class History:
    """What happened in one step."""

    shape: Shape
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


def play(
    shape: Shape,
    deciders: Sequence[Sequence[Decider]],
    duration: Duration,
    latency: Latency = lambda _sender, _receiver: 0,
) -> History:
    """Run one step with `deciders[rank][member]` until nothing happens any more.

    Member i of a rank receives from member i of the neighbouring ranks; followers report what
    arrived to their leader, and run what it decides.
    """
    return _Step(shape, deciders, duration, latency).play()


class _Step:
    def __init__(
        self,
        shape: Shape,
        deciders: Sequence[Sequence[Decider]],
        duration: Duration,
        latency: Latency,
    ) -> None:
        self._shape = shape
        self._deciders = {
            Node(rank, member): decider
            for rank, members in enumerate(deciders)
            for member, decider in enumerate(members)
        }
        self._members = range(len(deciders[0]))
        self._duration = duration
        self._latency = latency
        self._history = History(shape, {node: NodeHistory() for node in self._deciders})
        self._heap: list[tuple[int, int, int, Callable[[int], None]]] = []
        self._num_events = 0
        self._link_free_at: dict[tuple[Node, Node], int] = {}
        self._busy: set[Node] = set()
        self._to_ask: set[Node] = set()
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
        if node not in self._to_ask:
            self._to_ask.add(node)
            self._at(now, 1, lambda now: self._ask(now, node))

    def _send(self, now: int, sender: Node, receiver: Node, arrive: Callable[[int], None]) -> None:
        link = (sender, receiver)
        arrival = max(now + self._latency(sender, receiver), self._link_free_at.get(link, 0))
        self._link_free_at[link] = arrival
        self._at(arrival, 0, arrive)

    def _take_in(self, now: int, node: Node, stimulus: InputArrived) -> None:
        assert self._deciders[node].handle(now, stimulus) == ()
        self._ask_at(now, node)

    def _input(self, now: int, node: Node, task: Task) -> None:
        self._history.nodes[node].arrivals.append((now, task))
        self._take_in(now, node, InputArrived(task))
        if node.member > 0:
            leader, report = Node(node.rank, 0), InputArrived(task, node.member)
            self._send(now, node, leader, lambda now: self._take_in(now, leader, report))

    def _decision(self, now: int, node: Node, task: Task) -> None:
        self._decisions[node].append(task)
        self._ask_at(now, node)

    def _ask(self, now: int, node: Node) -> None:
        self._to_ask.discard(node)
        if node in self._busy:
            return
        decisions = self._decisions[node]
        stimulus = TaskAgreed(decisions.popleft()) if decisions else ComputeIdle()
        history = self._history.nodes[node]
        for instruction in self._deciders[node].handle(now, stimulus):
            match instruction:
                case RunTask():
                    self._start(now, node, instruction)
                case Waited():
                    history.waits.append(instruction)
                case StepDone():
                    history.is_done = True

    def _start(self, now: int, node: Node, run: RunTask) -> None:
        self._busy.add(node)
        end = now + self._duration(node, run.task)
        self._history.nodes[node].ran.append(Ran(now, end, run))
        self._at(end, 0, lambda now: self._finish(now, node, run.task))
        if node.member == 0:
            for member in self._members[1:]:
                follower = Node(node.rank, member)
                decided = partial(self._decision, node=follower, task=run.task)
                self._send(now, node, follower, decided)

    def _finish(self, now: int, node: Node, task: Task) -> None:
        self._busy.discard(node)
        self._ask_at(now, node)
        consumer = self._shape.receiver(task)
        if consumer is None:
            return
        receiver = Node(self._shape.rank_of(consumer.stage), node.member)
        if receiver.rank != node.rank:
            self._send(now, node, receiver, lambda now: self._input(now, receiver, consumer))
