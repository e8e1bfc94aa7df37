"""The seams of the runtime: what one rank's worker needs from the world, as small protocols.

The compute thread owns the dispatcher, and on the leader of a group lends it to the ahead thread
while a task runs. All other threads communicate with its holder only by putting an `Event` into the
`Inbox`, whose one Condition also guards what has arrived.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.schedule.dispatcher import Group
from rrfp.schedule.tasks import InputArrived, Task
from rrfp.trace.outcome import FaultOrigin

Clock = Callable[[], int]
"""Nanoseconds of a monotonic clock that all ranks of a host share."""

monotonic: Clock = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Message:
    """A finished task's output in transit; `task` is the one that consumes it. A tensor may be None
    (the gradient of an input that does not require one)."""

    step: int
    task: Task
    tensors: tuple[torch.Tensor | None, ...]
    latency_ns: int = 0
    """How long a paced run keeps it on its link before it leaves; the peer does not learn this."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A neighbour's message has arrived completely."""

    peer: int
    message: Message
    arrived_ns: int = field(default=0, compare=False)
    """When it was here, on this rank's clock."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A neighbour has begun the task whose output this task takes."""

    peer: int
    step: int
    task: Task
    heard_ns: int
    """When it said so, on this rank's clock."""
    left_ns: int
    """How much later it expects the output to be here."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A member of the group that this rank leads has the input of a task."""

    peer: int
    step: int
    task: Task


@dataclass(frozen=True, slots=True)
class Decided:
    """The group's leader has put a task at this position of the step's agreed sequence."""

    peer: int
    step: int
    position: int
    task: Task


@dataclass(frozen=True, slots=True)
class Left:
    """A peer said farewell: all its messages have arrived, and no more will come."""

    peer: int


@dataclass(frozen=True, slots=True)
class Ended:
    """This rank's device has ended a task."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A link broke, or its peer fell silent; the run cannot go on."""

    error: RrfpError


Event = Arrived | Forecast | Reported | Decided | Ended | Left | Failed


class PeerLostError(RrfpError):
    """A peer's process died, fell silent, or left while this rank still needed it."""

    def __init__(self, sentence: str, culprit: FaultOrigin | None = None) -> None:
        super().__init__(sentence)
        self.culprit = culprit


class PeerSilentError(PeerLostError):
    """A peer was silent for too long; its process may still be alive."""


class StallError(RrfpError):
    """Nothing arrived for longer than the configured time. One sentence, and below it a line per
    rank that the stall may concern: why it waits, and for what."""


class Inbox:
    """What has arrived for this rank. Any thread puts; only the thread that holds the dispatcher
    takes: the compute thread, or the ahead thread while it borrows it."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._events: deque[Event] = deque()
        self._watcher: Callable[[Event], None] | None = None

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher` with every event, those already here included, on the thread that puts it:
        for work that must not wait for the compute thread."""
        with self._condition:
            self._watcher = watcher
            events = tuple(self._events)
        for event in events:
            watcher(event)

    def put(self, event: Event) -> None:
        with self._condition:
            self._events.append(event)
            self._condition.notify()
            # Read under the lock: either this call or `watch` shows the event to a new watcher.
            watcher = self._watcher
        if watcher is not None:
            watcher(event)

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        """Everything that has arrived; waits up to `timeout_s` for the first event."""
        with self._condition:
            if not self._events and timeout_s > 0:
                self._condition.wait(timeout_s)
            events = tuple(self._events)
            self._events.clear()
            return events


class Links(Protocol):
    """A rank's links, as the worker and the agreement use them: they never block the compute
    thread.

    Links are directed and first-in-first-out. `send` does not block; an unreachable peer is
    reported through the inbox as `Failed`, never by an exception on another thread.
    """

    def send(self, peer: int, message: Message) -> None: ...

    def consumed(self, peer: int, step: int) -> None:
        """The compute thread took a message of the link peer -> here, freeing a place on it."""

    def forecast(self, peer: int, step: int, task: Task, left_ns: int) -> None:
        """Tell `peer` when to expect a task's input, which is still to be sent (`Forecast`
        there)."""

    def report(self, peer: int, step: int, task: Task) -> None:
        """Tell the group's leader `peer` that a task's input is here (`Reported` there)."""

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Tell the member `peer` the next task of the agreed sequence (`Decided` there)."""


class Transport(Links, Protocol):
    """A rank's links and their life cycle (`rrfp.runtime.net.transport`).

    Its owner opens it once, before anything else, and closes it once. A constructor contacts no
    peer and starts no thread.
    """

    def open(self) -> None:
        """Find the peers and connect every link; returns when all are connected. Raises
        PeerLostError naming a rank that did not appear, and then leaves nothing open."""

    def grant(self, num_credits: int) -> None:
        """Let every incoming link hold at least `num_credits` unconsumed messages, for a step with
        more in flight; a smaller number changes nothing. The senders need not know."""

    def close(self, *, farewell: bool = True) -> None:
        """Send what is queued, say farewell on every link and release everything, within bounded
        time; a second call does nothing. With `farewell=False`, for a rank that fails, waits for
        nothing and lets the peers know at once that this rank is lost."""


class Agreement(Protocol):
    """One rank's side of its group's agreement on the sequence of tasks. Unless noted, called by
    the thread that holds the dispatcher. `group` is None for a rank with nothing to agree on."""

    group: Group | None

    def start_step(self) -> None: ...

    def report(self, step: int, task: Task) -> None:
        """The input of a task has arrived, perhaps for a later step. Called on a link's thread, as
        the leader may decide on the next task while one runs here."""

    def reported(self, event: Reported) -> InputArrived:
        """A member's report as a stimulus for the dispatcher."""
        ...

    def decided(self, event: Decided) -> None:
        """A decision has arrived; decisions arrive in the order in which they run."""

    def next(self) -> Task | None:
        """The next agreed task that this rank has not run; None if it decides itself."""
        ...

    def dispatched(self, step: int, task: Task) -> None:
        """This rank's dispatcher has put a task at the next position of the sequence."""

    def owed(self, missing_members: int) -> dict[int, str]:
        """By other member's rank: what it owes tasks whose input is missing at these members (bit
        i: member i; bit 0: this rank)."""
        ...


class Compute(Protocol):
    """Runs tasks on a stage. Called by the compute thread, one task at a time."""

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run one task on the output of its `Shape.sender`, and return what its `Shape.receiver`
        takes. Either is empty if there is no such task."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of activations that are kept now, as measured; 0 if they are not measured."""
        ...

    @property
    def waiting_gradient_bytes(self) -> int:
        """Bytes of gradients that wait now for those of earlier microbatches."""
        ...


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What one rank's step amounted to; times on this rank's clock."""

    start_ns: int
    """The rank's entry into the schedule."""
    end_ns: int
    """The rank's return from the schedule."""
    busy_ns: int
    """Time in F, B and W."""
    peak_held: float
    """The most activations held, in microbatches of the whole rank."""
    peak_held_bytes: int | None = None
    """Likewise in bytes, as measured or else as modelled; None where neither is known."""
