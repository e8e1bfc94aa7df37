"""The types that join one rank's worker to its links, its group and its compute function.

The compute thread owns the dispatcher. On the leader of a group it lends the dispatcher to the
ahead thread while a task runs. All other threads communicate with the holder of the dispatcher only
by putting an `Event` into the `Inbox`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Protocol

import torch

from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Task
from rrfp.trace.outcome import FaultOrigin

Clock = Callable[[], int]
"""Returns nanoseconds of a monotonic clock that all ranks of a host share."""

monotonic: Clock = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Message:
    """A finished task's output in transit; `task` is the one that consumes it. A tensor may be None
    (the gradient of an input that does not require one)."""

    step: int
    task: Task
    tensors: tuple[torch.Tensor | None, ...]
    latency_ns: int = 0
    """Time for which a paced run holds it back before it is sent; the peer does not see this."""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A neighbor's message has arrived completely."""

    peer: int
    message: Message
    arrived_ns: int = field(default=0, compare=False)
    """Time of arrival on this rank's clock."""


@dataclass(frozen=True, slots=True)
class InputForecast:
    """A neighbor has begun the task whose output is the input of `task` on this rank."""

    peer: int
    step: int
    task: Task
    received_ns: int
    """Time at which the forecast arrived, on this rank's clock."""
    remaining_ns: int
    """Time from then until the neighbor expects the input to arrive."""


@dataclass(frozen=True, slots=True)
class InputReported:
    """A member of the group that this rank leads has the input of a task."""

    peer: int
    step: int
    task: Task


@dataclass(frozen=True, slots=True)
class TaskDecided:
    """The group's leader has put a task at this position of the step's agreed sequence."""

    peer: int
    step: int
    position: int
    task: Task


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer said farewell: all its messages have arrived, and no more will come."""

    peer: int


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """This rank's device has finished a task."""


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link broke, or its peer fell silent; the run cannot continue."""

    error: RrfpError


Event = (
    MessageArrived | InputForecast | InputReported | TaskDecided | TaskEnded | PeerLeft | LinkFailed
)


class PeerLostError(RrfpError):
    """A peer's process died, fell silent, or left while this rank still needed it."""

    def __init__(self, sentence: str, culprit: FaultOrigin | None = None) -> None:
        super().__init__(sentence)
        self.culprit = culprit


class PeerSilentError(PeerLostError):
    """A peer was silent for too long; its process may still be alive."""


class StallError(RrfpError):
    """Nothing arrived for longer than the configured time. The message is one sentence; below it,
    unless this rank waits for its own device, is a table of the ranks that may be involved and of
    what they wait for."""


class Inbox:
    """The events that have arrived for this rank. Any thread may put one in. Only the thread that
    holds the dispatcher takes them: the compute thread, or the ahead thread while it borrows it."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._events: deque[Event] = deque()
        self._watcher: Callable[[Event], None] | None = None

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher` with every event that is put, on the thread that puts it, and at once with
        those already here. It replaces an earlier watcher. For work that must not wait for the
        compute thread."""
        with self._condition:
            self._watcher = watcher
            events = tuple(self._events)
        for event in events:
            watcher(event)

    def put(self, event: Event) -> None:
        """Append an event and wake a thread that waits in `take`; then call the watcher, if any, on
        this thread."""
        with self._condition:
            self._events.append(event)
            self._condition.notify()
            # Read under the lock: either this call or `watch` shows the event to a new watcher.
            watcher = self._watcher
        if watcher is not None:
            watcher(event)

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        """Remove and return all events; wait up to `timeout_s` for the first one. Empty if none has
        come."""
        with self._condition:
            if not self._events and timeout_s > 0:
                self._condition.wait(timeout_s)
            events = tuple(self._events)
            self._events.clear()
            return events


class Links(Protocol):
    """A rank's links, as the worker and the agreement use them. No call blocks.

    Links are directed and first-in-first-out. An unreachable peer is reported through the inbox as
    `LinkFailed`, never by an exception on another thread.
    """

    def send(self, peer: int, message: Message) -> None:
        """Queue a message for `peer`, which receives it as `MessageArrived`."""

    def consumed(self, peer: int, step: int) -> None:
        """Return one credit to `peer`: the compute thread took one of its messages."""

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        """Announce to `peer` when to expect a task's input (`InputForecast`)."""

    def report(self, peer: int, step: int, task: Task) -> None:
        """Report to the group's leader `peer` that a task's input is on this rank
        (`InputReported`)."""

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        """Send the member `peer` the next task of the agreed sequence (`TaskDecided`)."""


class Transport(Links, Protocol):
    """A rank's links and their life cycle (`rrfp.runtime.net.transport`).

    Its owner opens it once, before anything else, and closes it once. A constructor contacts no
    peer and starts no thread.
    """

    def open(self) -> None:
        """Find the peers and connect every link; return when all are connected. Raises
        PeerLostError naming a rank that did not appear, and then leaves nothing open."""

    def grant(self, num_credits: int) -> None:
        """Let every incoming link hold at least `num_credits` unconsumed messages, for a step with
        more in flight; a smaller number changes nothing. The senders need not know."""

    def close(self, *, farewell: bool = True) -> None:
        """Send what is queued, say farewell on every link and release everything, within bounded
        time; a second call does nothing. With `farewell=False`, for a rank that fails, wait for
        nothing: the peers learn at once that this rank is lost."""


class Compute(Protocol):
    """Runs tasks on a stage. Called by the compute thread, one task at a time."""

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run one task on the output of its `Shape.sender`, and return its output for its
        `Shape.receiver`. Either is empty if there is no such task."""
        ...

    @property
    def held_bytes(self) -> int:
        """Activation bytes held now, as measured; 0 if they are not measured."""
        ...

    @property
    def waiting_gradient_bytes(self) -> int:
        """Bytes of gradients that wait to be added after those of earlier microbatches."""
        ...


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Times and peak memory of one rank's step; times on this rank's clock."""

    start_ns: int
    """Time at which the rank entered the schedule."""
    end_ns: int
    """Time at which the rank returned from the schedule."""
    busy_ns: int
    """Time in F, B and W."""
    peak_held: float
    """Largest number of activations held, in microbatches of the whole rank."""
    peak_held_bytes: int | None = None
    """The same in bytes, as measured or else as modeled; None if neither is known."""
