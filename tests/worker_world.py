"""One rank's worker between fakes, which note down what it asks of them; arrivals are scripted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed import HashStore

from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.protocols import Arrived, Event, Inbox, Message, StepSummary
from rrfp.runtime.stall import StoreStallBoard
from rrfp.runtime.worker import Worker
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.knobs import IMPATIENT, Patience
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Task, parse_task
from rrfp.trace.records import Record, WaitRecord

TICK_NS = 10
STALL_S = 5.0
PATIENCE_S = 10.0


def task(text: str) -> Task:
    return parse_task(text)[0]


F0 = task("1F0")


def arrived(text: str, step: int = 0, peer: int = 0) -> Arrived:
    """The input of a task, which says in its tensor whose it is."""
    wanted = task(text)
    return Arrived(peer, Message(step, wanted, (torch.tensor([float(wanted.microbatch)]),)))


class ScriptedInbox(Inbox):
    """Gives one batch of the script whenever the worker waits; with none left, time runs out."""

    def __init__(self, script: list[list[Event]]) -> None:
        super().__init__()
        self._script = script
        self.waited_s = 0.0
        self.timeouts_s: list[float] = []

    def take(self, timeout_s: float = 0.0) -> Sequence[Event]:
        self.waited_s += timeout_s
        self.timeouts_s.append(timeout_s)
        if timeout_s > 0 and self._script:
            for event in self._script.pop(0):
                self.put(event)
        return super().take(0.0)

    def wait_until_taken(self) -> None:
        """Wait until another thread has taken everything."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._events:
            assert time.monotonic() < deadline_s, "nobody decides ahead"
            time.sleep(0.001)


@dataclass(slots=True)
class World:
    """One rank's worker between fakes that note down what it asks of them."""

    rank: int = 1
    num_ranks: int = 3
    script: list[list[Event]] = field(default_factory=list)
    during: dict[Task, list[Event]] = field(default_factory=dict)
    """What arrives while a task runs."""
    members: tuple[int, ...] | None = None
    calls: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    fails_at: Task | None = None
    task_ns: int = 0
    """How long a task takes on this rank's clock, after what arrives while it runs."""
    ahead_during: Task | None = None
    """A task that runs until what arrives meanwhile was taken in for a decision ahead."""
    now_ns: int = 0
    patience: Patience = IMPATIENT
    stall_s: float = STALL_S
    inbox: ScriptedInbox = field(init=False)
    agreement: StarAgreement = field(init=False)
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = ScriptedInbox(self.script)
        members = self.members or (self.rank,)
        self.agreement = StarAgreement(self.rank, members, self, self.records.append, self.clock)
        self.worker = Worker(
            range(self.num_ranks),
            self.inbox,
            self,
            self.agreement,
            self.records.append,
            StoreStallBoard(HashStore(), "test", range(self.num_ranks)),
            stall_s=self.stall_s,
            decides_ahead=self.ahead_during is not None,
            clock=self.clock,
        )
        self.worker.open()

    def clock(self) -> int:
        self.now_ns += TICK_NS
        return self.now_ns

    def run_step(self, shape: Shape, step: int = 0, limit: int | None = None) -> StepSummary:
        return self.worker.run_step(step, self.dispatcher(shape, limit), self)

    def dispatcher(self, shape: Shape, limit: int | None = None) -> Dispatcher:
        hint = HINTS["bf"]
        order = order_of(hint, replace(shape, kinds=WHOLE_BACKWARD))
        return Dispatcher(
            shape,
            self.rank,
            Policy(
                hint,
                limit=limit,
                order=order if shape.kinds == WHOLE_BACKWARD else order.forwards(),
                patience=self.patience,
            ),
            group=self.agreement.group,
        )

    def causes(self) -> list[str]:
        return [record.cause for record in self.records if isinstance(record, WaitRecord)]

    # As the worker's compute.

    held_bytes = 0
    waiting_gradient_bytes = 0

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        if task == self.fails_at:
            raise ZeroDivisionError
        values = [tensor.item() for tensor in inputs if tensor is not None]
        self.calls.append(f"run {task} on {values}")
        for event in self.during.get(task, ()):
            self.inbox.put(event)
        self.now_ns += self.task_ns
        if task == self.ahead_during:
            self.inbox.wait_until_taken()
        return (torch.tensor([100.0 * task.stage + task.microbatch]),)

    # As its transport.

    def send(self, peer: int, message: Message) -> None:
        (tensor,) = message.tensors
        assert tensor is not None
        self.calls.append(f"send {tensor.item()} to {peer} for {message.task}")

    def consumed(self, peer: int, step: int) -> None:
        self.calls.append(f"consumed from {peer} in {step}")

    def forecast(self, peer: int, step: int, task: Task, left_ns: int) -> None:
        self.calls.append(f"forecast {task} to {peer} in {left_ns}")

    def report(self, peer: int, step: int, task: Task) -> None:
        self.calls.append(f"report {task} to {peer}")

    def decide(self, peer: int, step: int, position: int, task: Task) -> None:
        self.calls.append(f"decide {position} {task} to {peer}")
