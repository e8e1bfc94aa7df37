"""The seams of the runtime: what one rank's worker needs from the world, as small protocols.

The compute thread owns the dispatcher, and lends it to the ahead thread while a task runs on the
leader of a group. Every other thread speaks to the one that has it only by putting an `Event` into
the `Inbox`, whose one Condition also guards what has arrived.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.schedule.dispatcher import Group
from rrfp.schedule.stimuli import InputArrived
from rrfp.schedule.tasks import Task

Clock = Callable[[], int]
"""Nanoseconds on a monotonic clock that all ranks of one host share."""

monotonic: Clock = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Message:
    """A finished task's output on its way: `task` is the one that consumes it. A tensor may be
    None where a stage hands on nothing (the gradient of an input that needs none)."""

    step: int
    task: Task
    tensors: tuple[torch.Tensor | None, ...]
    latency_ns: int = 0
    """How long a paced run keeps it on its link before it leaves; not told to the peer."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A neighbour's message is here, whole."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Reported:
    """A member of this rank's group, of which this rank is the leader, has the input of a task."""

    peer: int
    step: int
    task: Task


@dataclass(frozen=True, slots=True)
class Decided:
    """The group's leader has put a task at a position of the agreed sequence of the step."""

    peer: int
    step: int
    position: int
    task: Task


@dataclass(frozen=True, slots=True)
class Left:
    """A peer said farewell: nothing more comes from it. Its messages came before this."""

    peer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A link broke, or its peer fell silent; the run cannot go on."""

    error: RrfpError


Event = Arrived | Reported | Decided | Left | Failed


class PeerLostError(RrfpError):
    """A peer's process died, fell silent, or left while this rank still needed it."""


class PeerSilentError(PeerLostError):
    """A peer was not heard for too long; its process may still be there."""


class StallError(RrfpError):
    """Nothing arrived for longer than the configured time. One sentence, and below it a line for
    each rank that the stall may concern: why it waits, and for what."""


class Inbox:
    """What has arrived for this rank. Any thread puts; the thread that has the dispatcher takes:
    the compute thread, or the ahead thread while it is lent."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._events: deque[Event] = deque()
        self._watcher: Callable[[Event], None] | None = None

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher` with every event, those that are here included: on the thread that puts
        it, for what must not wait for the compute thread."""
        with self._condition:
            self._watcher = watcher
            events = tuple(self._events)
        for event in events:
            watcher(event)

    def put(self, event: Event) -> None:
        with self._condition:
            self._events.append(event)
            self._condition.notify()
            # Read here: of an event and a new watcher, either this call or `watch` sees both.
            watcher = self._watcher
        if watcher is not None:
            watcher(event)

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        """Everything that has arrived; waits up to `timeout_s` for the first of it."""
        with self._condition:
            if not self._events and timeout_s > 0:
                self._condition.wait(timeout_s)
            events = tuple(self._events)
            self._events.clear()
            return events


class Links(Protocol):
    """A rank's links, as the worker and the agreement use them: they never make the compute thread
    wait.

    Links are directed and first-in-first-out. `send` waits for nothing; a peer that cannot be
    reached is told through the inbox as `Failed`, never by an exception on another thread.
    """

    def send(self, peer: int, message: Message) -> None: ...

    def consumed(self, peer: int, step: int) -> None:
        """The compute thread took a message of the link peer -> here, which may hold another."""

    def report(self, peer: int, step: int, task: Task) -> None:
        """Tell the group's leader `peer` that the input of a task is here (`Reported` there)."""

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Tell the member `peer` the next task of the agreed sequence (`Decided` there)."""


class Transport(Links, Protocol):
    """A rank's links with their life; `rrfp.runtime.transport.factory` makes the one that fits.

    Its owner opens it once, before anything else, and closes it once. A constructor meets nobody
    and starts nothing.
    """

    def open(self) -> None:
        """Meet the peers and connect every link; returns when all are there. Raises PeerLostError
        naming a rank that did not come; then nothing is left open."""

    def grant(self, num_credits: int) -> None:
        """Let every incoming link hold at least so many messages that were not consumed, for a step
        with more in flight; a smaller number changes nothing. Its sources need not know."""

    def close(self, *, farewell: bool = True) -> None:
        """Send what is queued, say farewell on every link and release everything, within a bounded
        time; a second call does nothing. With `farewell=False`, for a rank that fails, nothing is
        waited for, and the peers are told at once that this rank is lost."""


class Agreement(Protocol):
    """One rank's side of its group's agreement on the sequence of tasks; called by the thread that
    has the worker's books, where not said otherwise. A rank without a group has `group` None and
    nothing to agree on."""

    group: Group | None

    def start_step(self) -> None: ...

    def report(self, step: int, task: Task) -> None:
        """The input of a task is here, perhaps of a step to come. Called on a link's thread: the
        leader decides for the next task on this while one runs here."""

    def reported(self, event: Reported) -> InputArrived:
        """What a member's report is to the dispatcher."""
        ...

    def decided(self, event: Decided) -> None:
        """A decision is here; decisions come in the sequence in which they are run."""

    def next(self) -> Task | None:
        """The next agreed task that this rank has not run, where another rank decides."""
        ...

    def dispatched(self, step: int, task: Task) -> None:
        """This rank's dispatcher has put a task at the next place of the sequence."""

    def owed(self, missing_members: int) -> dict[int, str]:
        """By rank, what tasks that lack their input at these members (bit i: member i; bit 0: this
        rank) still need of the group's other members."""
        ...


class Compute(Protocol):
    """Runs tasks on a stage. Called by the compute thread, one task at a time."""

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run one task on what its `Shape.sender` sent (empty for a task without one), and give
        what its `Shape.receiver` takes (empty for a task without one)."""
        ...
