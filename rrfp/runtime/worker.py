"""One rank's loop: take in what has arrived, ask the dispatcher, run what it says.

Only the compute thread is here. Messages leave by the transport's threads and arrive through the
inbox; before each decision everything that has arrived is taken in. A message of a later step
(a neighbour may be ahead) is kept until that step begins.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rrfp.runtime.protocols import (
    Agreement,
    Arrived,
    Clock,
    Compute,
    Decided,
    Event,
    Failed,
    Inbox,
    Left,
    Message,
    PeerLostError,
    Reported,
    StallError,
    Transport,
    monotonic,
)
from rrfp.schedule.dispatcher import (
    ComputeIdle,
    Dispatcher,
    InputArrived,
    Instruction,
    RunTask,
    StepDone,
    Stimulus,
    TaskAgreed,
    Wait,
    Waited,
)
from rrfp.schedule.tasks import Task
from rrfp.trace.records import Record, StimulusRecord, TaskRecord, WaitRecord


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What one rank's step came to; times on this rank's clock."""

    start_ns: int
    """Its entry into the schedule."""
    end_ns: int
    """Its return from it."""
    busy_ns: int
    """Time in F, B and W."""
    peak_held: float
    """Most activations held, in microbatches of the whole rank."""


class Worker:
    """Drives one rank's stages through steps, one task at a time."""

    def __init__(
        self,
        pp_ranks: Sequence[int],
        inbox: Inbox,
        transport: Transport,
        agreement: Agreement,
        record: Callable[[Record], None],
        *,
        stall_s: float,
        clock: Clock = monotonic,
    ) -> None:
        """`pp_ranks` are the global ranks of this pipeline, by pipeline rank. Nothing arriving for
        `stall_s` seconds while this rank waits raises StallError."""
        self._pp_ranks = pp_ranks
        self._inbox = inbox
        self._transport = transport
        self._agreement = agreement
        self._record = record
        self._stall_s = stall_s
        self._clock = clock
        self._early: defaultdict[int, list[Arrived | Reported | Decided]] = defaultdict(list)
        self._left: set[int] = set()
        self._step = -1
        self._inputs: dict[Task, tuple[torch.Tensor | None, ...]] = {}

    def run_step(self, step: int, dispatcher: Dispatcher, compute: Compute) -> StepSummary:
        """Run every task of one step. Raises what a task raises, PeerLostError or StallError."""
        step_start_ns = self._clock()
        self._step = step
        self._agreement.start_step()
        self._take_in(dispatcher, self._early.pop(step, ()))
        busy_ns = 0
        while True:
            self._take_in(dispatcher, self._inbox.take())
            agreed = self._agreement.next()
            stimulus = ComputeIdle() if agreed is None else TaskAgreed(agreed)
            for instruction in self._handle(dispatcher, stimulus):
                match instruction:
                    case Waited(cause, start_ns, end_ns):
                        self._record(WaitRecord(start_ns, end_ns, step, cause))
                    case RunTask():
                        busy_ns += self._run(dispatcher, compute, instruction)
                    case Wait():
                        self._wait(dispatcher)
                    case StepDone():
                        num_chunks = dispatcher.shape.num_chunks
                        peak_held = dispatcher.peak_held / num_chunks
                        return StepSummary(step_start_ns, self._clock(), busy_ns, peak_held)

    def _handle(self, dispatcher: Dispatcher, stimulus: Stimulus) -> tuple[Instruction, ...]:
        now_ns = self._clock()
        task = None if isinstance(stimulus, ComputeIdle) else stimulus.task
        stage, kind, microbatch = (-1, "", -1) if task is None else task
        member = stimulus.member if isinstance(stimulus, InputArrived) else 0
        name = type(stimulus).__name__
        self._record(StimulusRecord(now_ns, self._step, name, kind, stage, microbatch, member))
        return dispatcher.handle(now_ns, stimulus)

    def _take_in(self, dispatcher: Dispatcher, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Left):
                self._left.add(event.peer)
                continue
            step = event.message.step if isinstance(event, Arrived) else event.step
            if step > self._step:
                self._early[step].append(event)
                continue
            match event:
                case Arrived(_, message):
                    self._inputs[message.task] = message.tensors
                    self._agreement.report(step, message.task)
                    self._handle(dispatcher, InputArrived(message.task))
                case Reported():
                    self._handle(dispatcher, self._agreement.reported(event))
                case Decided():
                    self._agreement.decided(event)

    def _run(self, dispatcher: Dispatcher, compute: Compute, run: RunTask) -> int:
        """Run one task and pass its output on; how long the task itself took, in ns."""
        task, shape, step = run.task, dispatcher.shape, self._step
        self._agreement.dispatched(step, task)
        inputs: tuple[torch.Tensor | None, ...] = ()
        sender = shape.sender(task)
        if sender is not None:
            inputs = self._inputs.pop(task)
            sending_rank = shape.rank_of(sender.stage)
            if sending_rank != dispatcher.rank:
                self._transport.consumed(self._pp_ranks[sending_rank], step)
        start_ns = self._clock()
        outputs = compute.run(task, inputs)
        end_ns = self._clock()
        receiver = shape.receiver(task)
        if receiver is not None:
            receiving_rank = shape.rank_of(receiver.stage)
            if receiving_rank == dispatcher.rank:
                self._inputs[receiver] = outputs
            else:
                self._transport.send(
                    self._pp_ranks[receiving_rank], Message(step, receiver, outputs)
                )
        self._record(
            TaskRecord(
                start_ns, end_ns, step, task.kind, task.stage, run.chunk, task.microbatch, *run[2:]
            )
        )
        return end_ns - start_ns

    def _wait(self, dispatcher: Dispatcher) -> None:
        if self._left:
            self._check_that_nobody_left_owing(dispatcher)
        events = self._inbox.take(self._stall_s)
        if not events:
            owed = "; ".join(f"rank {p} owes {what}" for p, what in self._owed(dispatcher).items())
            raise StallError(
                f"pipeline rank {dispatcher.rank} waited {self._stall_s:g} s in step {self._step} "
                f"and nothing arrived: {owed}; see what these ranks do"
            )
        self._take_in(dispatcher, events)

    def _check_that_nobody_left_owing(self, dispatcher: Dispatcher) -> None:
        for peer, what in self._owed(dispatcher).items():
            if peer in self._left:
                raise PeerLostError(
                    f"rank {peer} left while pipeline rank {dispatcher.rank} waited in step "
                    f"{self._step} for {what}; see rank {peer}'s own output for the cause"
                )

    def _owed(self, dispatcher: Dispatcher) -> dict[int, str]:
        """By rank, what is still to come from it in this step."""
        owed = self._agreement.owed()
        for task, num_missing in dispatcher.unfinished():
            sender = dispatcher.shape.sender(task)
            # What is in the inputs is here, and lacks another member of the group only.
            if num_missing and sender is not None and task not in self._inputs:
                peer = self._pp_ranks[dispatcher.shape.rank_of(sender.stage)]
                owed.setdefault(peer, f"the output of {sender}, which {task} needs")
        return owed
