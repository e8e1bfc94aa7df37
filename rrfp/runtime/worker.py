"""One rank's loop: take in what has arrived, ask the dispatcher, run what it says.

Only the compute thread runs this code. Sending never blocks it, and messages arrive through the
inbox, which is emptied before each decision. A step ends only once it has consumed all its own
messages, so a message of any other step belongs to a later one (a neighbour may be ahead) and is
kept until that step begins. Step numbers do not show which is later: those of training rise and
those of evaluations fall (`rrfp.trace.records`).

The compute thread owns the state: the dispatcher, the agreement, what has arrived. On the leader of
a group it lends them, while a task runs, to the thread that decides on the next one
(`AheadThread`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from rrfp.runtime.agreement import AheadThread
from rrfp.runtime.device.interface import CPU, Device
from rrfp.runtime.out_of_memory import told_when_out_of_memory
from rrfp.runtime.pace import Delays, StepPace
from rrfp.runtime.protocols import (
    Agreement,
    Arrived,
    Clock,
    Compute,
    Decided,
    Ended,
    Event,
    Failed,
    Forecast,
    Inbox,
    Left,
    Links,
    Message,
    PeerLostError,
    Reported,
    StallError,
    StepSummary,
    monotonic,
)
from rrfp.runtime.stall import GATHER_S, LOOK_S, StallBoard, StallRow, grid, owed, stall_row
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.punctuality import Durations, Punctuality, punctuality_of
from rrfp.schedule.tasks import (
    Cause,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Instruction,
    RunTask,
    StepDone,
    Stimulus,
    Task,
    TaskAgreed,
    Wait,
    Waited,
)
from rrfp.trace.outcome import FaultOrigin, FoundBy
from rrfp.trace.records import (
    NS_PER_S,
    BegunRecord,
    Doing,
    Record,
    TaskRecord,
    WaitRecord,
    step_name,
    stimulus_record,
)

# What a rank begins, told to its flight record: a task, or a wait and what that is for.


def begun_task(now_ns: int, step: int, task: Task) -> BegunRecord:
    stage, kind, microbatch = task
    return BegunRecord(now_ns, now_ns, step, Doing.TASK, kind, stage, microbatch)


def begun_wait(now_ns: int, step: int, cause: Cause) -> BegunRecord:
    return BegunRecord(now_ns, now_ns, step, cause)


def explained(
    wait: BegunRecord, dispatcher: Dispatcher, agreement: Agreement, pp_ranks: Sequence[int]
) -> BegunRecord:
    """The wait with the task whose output it is for, and the rank that owes it. Takes time linear
    in the tasks of the step."""
    story = dispatcher.story()
    best = () if story.best_waiting is None else (story.best_waiting,)
    for waiting in (*best, *story.tasks):
        for stage, kind, microbatch in waiting.lacks:
            pp_rank = dispatcher.shape.rank_of(stage)
            if pp_rank != dispatcher.rank:
                return wait._replace(
                    kind=kind, stage=stage, microbatch=microbatch, peer=pp_ranks[pp_rank]
                )
    return wait._replace(peer=next(iter(owed(dispatcher, agreement, pp_ranks)), -1))


_BRIEF_S = 0.05
"""A wait that lasts longer is told in full."""


class Worker:
    """Drives one rank's stages through steps, one task at a time."""

    def __init__(
        self,
        pp_ranks: Sequence[int],
        inbox: Inbox,
        links: Links,
        agreement: Agreement,
        record: Callable[[Record], None],
        board: StallBoard,
        *,
        stall_s: float,
        decides_ahead: bool = True,
        delays: Delays | None = None,
        clock: Clock = monotonic,
        device: Device = CPU,
    ) -> None:
        """`pp_ranks` are the global ranks of this pipeline, by pipeline rank. If nothing arrives
        for `stall_s` seconds of waiting, StallError is raised, with the rows of `board`'s ranks.
        `decides_ahead` lets the leader of a group decide on the next task while one runs. Tasks run
        on `device`."""
        self._pp_ranks = pp_ranks
        self._inbox = inbox
        self._links = links
        self._agreement = agreement
        self._record = record
        self._board = board
        self._stall_s = stall_s
        self._delay = None if delays is None else delays.stream("tasks")
        self._clock = clock
        self._device = device
        self._early: defaultdict[int, list[Event]] = defaultdict(list)
        self._left: set[int] = set()
        self._step: int
        self._dispatcher: Dispatcher
        self._pace: StepPace | None = None
        self._inputs: dict[Task, tuple[torch.Tensor | None, ...]] = {}
        self._decided_ahead: RunTask | None = None
        self._peak_held_bytes = 0
        self._ahead: AheadThread | None = None
        self._decides_ahead = decides_ahead
        self._durations = Durations()
        self._punctuality: Punctuality | None = None
        """Of what neighbours announce; None where this rank never waits for it."""

    def open(self) -> None:
        """Join this rank's group, before the first step. On the leader this starts the thread that
        decides ahead."""
        group = self._agreement.group
        if group is None:
            return
        if not group.leads:
            self._inbox.watch(self._report)
        elif self._decides_ahead:
            self._ahead = AheadThread(self._decide_ahead, self._clock)
            self._ahead.start()

    def close(self) -> None:
        """End the worker's own thread, between two steps or after a failed one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _report(self, event: Event) -> None:
        """Report an arrived input to the group's leader at once; runs on the link's thread."""
        if isinstance(event, Arrived):
            self._agreement.report(event.message.step, event.message.task)

    def run_step(
        self,
        step: int,
        dispatcher: Dispatcher,
        compute: Compute,
        pace: StepPace | None = None,
    ) -> StepSummary:
        """Run every task of one step, paced if `pace` is given. Raises what a task raises,
        PeerLostError or StallError."""
        step_start_ns = self._clock()
        self._begin_step(step, dispatcher, pace)
        busy_ns = 0
        while True:
            self._take_in(self._inbox.take())
            if self._decided_ahead is not None:
                run, self._decided_ahead = self._decided_ahead, None
                busy_ns += self._run(compute, run)
                continue
            agreed = self._agreement.next()
            stimulus = ComputeIdle() if agreed is None else TaskAgreed(agreed)
            for instruction in self._handle(stimulus):
                match instruction:
                    case Waited(cause, start_ns, end_ns):
                        self._record(WaitRecord(start_ns, end_ns, step, cause))
                    case RunTask():
                        self._agreement.dispatched(step, instruction.task)
                        busy_ns += self._run(compute, instruction)
                    case Wait(cause, int() as deadline_ns):
                        self._tell_wait(cause)
                        self._wait_until(deadline_ns)
                    case Wait(cause):
                        self._wait(cause)
                    case StepDone():
                        return self._summary(step_start_ns, busy_ns)

    def _begin_step(self, step: int, dispatcher: Dispatcher, pace: StepPace | None) -> None:
        self._step = step
        self._dispatcher = dispatcher
        self._pace = pace
        self._start_punctuality()
        self._agreement.start_step()
        self._take_in(self._early.pop(step, ()))
        self._peak_held_bytes = 0

    def _summary(self, step_start_ns: int, busy_ns: int) -> StepSummary:
        dispatcher = self._dispatcher
        peak_held = dispatcher.peak_held / dispatcher.shape.num_chunks
        peak_bytes = self._peak_held_bytes or dispatcher.peak_held_bytes
        return StepSummary(step_start_ns, self._clock(), busy_ns, peak_held, peak_bytes or None)

    def _start_punctuality(self) -> None:
        """Begin to announce tasks, and to take in what is announced, if the policy asks for it; in
        a group the leaders do, as they decide. What was learnt holds for later steps."""
        dispatcher, group = self._dispatcher, self._agreement.group
        fresh = punctuality_of(dispatcher.policy, dispatcher.shape.num_chunks)
        if fresh is None or (group is not None and not group.leads):
            self._punctuality = None
        elif self._punctuality is None or self._punctuality.asked != fresh.asked:
            self._punctuality = fresh

    def _decide_ahead(self) -> None:
        """Decide on the next task; runs on the ahead thread, which holds the state now."""
        self._take_in(self._inbox.take())
        for instruction in self._handle(DecideAhead()):
            assert isinstance(instruction, RunTask)
            self._agreement.dispatched(self._step, instruction.task)
            self._decided_ahead = instruction

    def _handle(self, stimulus: Stimulus) -> tuple[Instruction, ...]:
        now_ns = self._clock()
        self._record(stimulus_record(now_ns, self._step, stimulus))
        return self._dispatcher.handle(now_ns, stimulus)

    def _take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Left):
                self._left.add(event.peer)
                continue
            if isinstance(event, Ended):
                continue
            step = event.message.step if isinstance(event, Arrived) else event.step
            if step != self._step:
                self._early[step].append(event)
                continue
            match event:
                case Arrived(_, message, arrived_ns):
                    if self._punctuality is not None:
                        self._punctuality.arrived(message.task, arrived_ns)
                    self._inputs[message.task] = message.tensors
                    self._handle(InputArrived(message.task))
                case Forecast(_, _, task, heard_ns, left_ns):
                    if self._punctuality is not None:
                        self._handle(self._punctuality.announced(task, heard_ns, left_ns))
                case Reported():
                    self._handle(self._agreement.reported(event))
                case Decided():
                    self._agreement.decided(event)

    def _run(self, compute: Compute, run: RunTask) -> int:
        """Run one task and pass on its output; returns how long the task itself took, in ns."""
        task = run.task
        inputs = self._take_inputs(task)
        waiting_bytes = compute.waiting_gradient_bytes
        if self._punctuality is not None:
            self._announce(task, run.chunk)
        start_ns = self._clock()
        self._record(begun_task(start_ns, self._step, task))
        ahead, pace = self._ahead, self._pace
        with (
            nullcontext() if ahead is None else ahead.while_running(task.kind, run.chunk),
            nullcontext() if pace is None else pace.task(task),
            self._told_when_out_of_memory(compute, run),
        ):
            if self._delay is not None:
                self._delay()
            outputs = compute.run(task, inputs)
        end_ns = self._clock()
        self._durations.took(task.kind, run.chunk, end_ns - start_ns)
        held_bytes = self._measured_bytes(compute, run)
        self._pass_on(task, outputs)
        self._record_task(run, start_ns, end_ns, held_bytes, waiting_bytes)
        return end_ns - start_ns

    def _take_inputs(self, task: Task) -> tuple[torch.Tensor | None, ...]:
        """What a task takes of other tasks."""
        shape = self._dispatcher.shape
        sender = shape.sender(task)
        if sender is None:
            return ()
        inputs = self._inputs.pop(task)
        sending_rank = shape.rank_of(sender.stage)
        if sending_rank != self._dispatcher.rank:
            self._links.consumed(self._pp_ranks[sending_rank], self._step)
            self._device.take_over(inputs)
        return inputs

    def _told_when_out_of_memory(
        self, compute: Compute, run: RunTask
    ) -> AbstractContextManager[None]:
        dispatcher = self._dispatcher
        num_held = run.held / dispatcher.shape.num_chunks
        rank = self._pp_ranks[dispatcher.rank]
        return told_when_out_of_memory(rank, run.task, compute.held_bytes, num_held)

    def _measured_bytes(self, compute: Compute, run: RunTask) -> int:
        """What is held with this task, in bytes: what the decision was made by, where that was
        bytes, or else as measured."""
        measured_bytes = compute.held_bytes
        self._peak_held_bytes = max(self._peak_held_bytes, measured_bytes)
        return run.held_bytes or measured_bytes

    def _pass_on(self, task: Task, outputs: tuple[torch.Tensor | None, ...]) -> None:
        """Give a task's outputs to the task that takes them."""
        shape, pace = self._dispatcher.shape, self._pace
        receiver = shape.receiver(task)
        if receiver is None:
            return
        receiving_rank = shape.rank_of(receiver.stage)
        if receiving_rank == self._dispatcher.rank:
            self._inputs[receiver] = outputs
            return
        latency_ns = 0 if pace is None else pace.message_ns(receiver)
        message = Message(self._step, receiver, outputs, latency_ns)
        self._links.send(self._pp_ranks[receiving_rank], message)

    def _record_task(
        self, run: RunTask, start_ns: int, end_ns: int, held_bytes: int, waiting_bytes: int
    ) -> None:
        stage, kind, microbatch = run.task
        self._record(
            TaskRecord(
                *(start_ns, end_ns, self._step, kind, stage, run.chunk, microbatch),
                *run[2:-1],
                held_bytes=held_bytes,
                waiting_bytes=waiting_bytes,
            )
        )

    def _announce(self, task: Task, chunk: int) -> None:
        """Tell the rank that takes this task's output when to expect it."""
        shape, pace = self._dispatcher.shape, self._pace
        receiver = shape.receiver(task)
        if receiver is None or (to_rank := shape.rank_of(receiver.stage)) == self._dispatcher.rank:
            return
        expected_ns = None if pace is None else pace.expected_ns(task)
        if expected_ns is None:
            mean_ns = self._durations.expected_ns(task.kind, chunk)
            if mean_ns is None:
                return
            expected_ns = int(mean_ns)
        if pace is not None:
            expected_ns += pace.message_ns(receiver)
        self._links.forecast(self._pp_ranks[to_rank], self._step, receiver, expected_ns)

    def _wait_until(self, deadline_ns: int) -> None:
        """Wait until something arrives, or until the wait ends."""
        while (left_ns := deadline_ns - self._clock()) > 0:
            if events := self._inbox.take(left_ns / NS_PER_S):
                self._take_in(events)
                return

    def _wait(self, cause: Cause) -> None:
        """Wait until something arrives. Adds up its time-outs instead of reading the clock, because
        a process that was itself stopped did not see a stall."""
        self._tell_wait(cause)
        if self._left:
            self._check_that_nobody_left_owing()
        board, step = self._board, self._step
        waited_s = 0.0
        call_s = max(0.0, self._stall_s - GATHER_S)
        call: int | None = None
        timeout_s = min(LOOK_S, call_s or self._stall_s)
        events = self._first_events(cause, timeout_s)
        while not events:
            waited_s += timeout_s
            if call is None and waited_s >= call_s:
                call = board.call(step)
            if num_calls := board.num_calls(step):
                board.publish(step, num_calls, self._row(cause, waited_s))
            if call is not None and waited_s >= self._stall_s:
                raise self._stall(self._row(cause, waited_s), call)
            timeout_s = min(LOOK_S, (call_s if call is None else self._stall_s) - waited_s)
            events = self._inbox.take(timeout_s)
        self._take_in(events)

    def _first_events(self, cause: Cause, timeout_s: float) -> Sequence[Event]:
        """What arrives first in a wait. One that is not brief is told in full meanwhile."""
        events = self._inbox.take(min(timeout_s, _BRIEF_S))
        if not events or any(isinstance(event, Failed) for event in events):
            self._tell_wait(cause, in_full=True)
        return events or self._inbox.take(max(0.0, timeout_s - _BRIEF_S))

    def _tell_wait(self, cause: Cause, *, in_full: bool = False) -> None:
        """Tell the flight record that a wait of this cause begins, or goes on; in full, with what
        it is for."""
        wait = begun_wait(self._clock(), self._step, cause)
        if in_full:
            wait = explained(wait, self._dispatcher, self._agreement, self._pp_ranks)
        self._record(wait)

    def _stall(self, own: StallRow, call: int) -> StallError:
        owed = "; ".join(f"rank {peer} owes {what}" for peer, what in self._owed().items())
        others = [row for row in self._board.rows(self._step, call) if row.rank != own.rank]
        return StallError(
            f"pipeline rank {own.pp_rank} waited {self._stall_s:g} s in {step_name(self._step)} "
            f"and nothing arrived: {owed}; see what these ranks do\n"
            f"{grid([own, *others], self._board.ranks)}"
        )

    def _row(self, cause: Cause, waited_s: float) -> StallRow:
        return stall_row(self._dispatcher, self._agreement, self._pp_ranks, cause, waited_s)

    def _check_that_nobody_left_owing(self) -> None:
        for peer, what in self._owed().items():
            if peer in self._left:
                raise PeerLostError(
                    f"rank {peer} left while pipeline rank {self._dispatcher.rank} waited in "
                    f"{step_name(self._step)} for {what}; see rank {peer}'s own output for the "
                    "cause",
                    FaultOrigin(FoundBy.LINK, rank=peer),
                )

    def _owed(self) -> dict[int, str]:
        return owed(self._dispatcher, self._agreement, self._pp_ranks)
