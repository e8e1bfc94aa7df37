"""One rank's loop: take in what has arrived, ask the dispatcher, run what it says.

Only the compute thread is here. Messages leave by the transport's threads and arrive through the
inbox; before each decision everything that has arrived is taken in. A message of a later step
(a neighbour may be ahead) is kept until that step begins.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rrfp.runtime.agreement import StarAgreement
from rrfp.runtime.protocols import (
    Arrived,
    Clock,
    Compute,
    Decided,
    Event,
    Failed,
    Inbox,
    Message,
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
        agreement: StarAgreement,
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
        self._early: defaultdict[int, list[Event]] = defaultdict(list)
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
        events = self._inbox.take(self._stall_s)
        if not events:
            raise StallError(self._stall(dispatcher))
        self._take_in(dispatcher, events)

    def _stall(self, dispatcher: Dispatcher) -> str:
        """What this rank waits for, and from whom."""
        rank, shape = dispatcher.rank, dispatcher.shape
        waited = (
            f"pipeline rank {rank} waited {self._stall_s:g} s in step {self._step} "
            "and nothing arrived"
        )
        for task, is_ready, num_missing in dispatcher.unfinished():
            sender = shape.sender(task)
            if num_missing and sender is not None:
                owing = self._pp_ranks[shape.rank_of(sender.stage)]
                return f"{waited}: {task} lacks the output of {sender} from rank {owing}"
            if is_ready:
                return f"{waited}: {task} is ready here and its group has not agreed on it"
        return waited
