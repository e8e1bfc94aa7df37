"""One rank's loop: handle the events that have arrived, ask the dispatcher, run its task.

Only the compute thread runs this code. Sending never blocks it, and messages arrive through the
inbox, which is emptied before each decision. A step ends only once it has consumed all its own
messages. So a message of any other step belongs to a later one (a neighbor may be ahead), and waits
until that step begins. Step numbers do not show the order: those of training rise and those of
evaluations fall (`rrfp.trace.records`).

The compute thread owns the state: the dispatcher, the agreement and the inputs. On the leader of a
group it lends them, while a task runs, to the thread that decides on the next one (`AheadThread`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median_low
from threading import Thread
from typing import Any

import torch

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.agreement import AheadThread, GroupAgreement
from rrfp.runtime.device import interface
from rrfp.runtime.device.interface import CPU, Device
from rrfp.runtime.pace import Delays, StepPace
from rrfp.runtime.protocols import (
    Clock,
    Compute,
    Event,
    Inbox,
    InputForecast,
    InputReported,
    LinkFailed,
    Links,
    Message,
    MessageArrived,
    PeerLeft,
    PeerLostError,
    StallError,
    StepSummary,
    TaskDecided,
    TaskEnded,
    monotonic,
)
from rrfp.runtime.stall import (
    GATHER_S,
    LOOK_S,
    StallBoard,
    StallRow,
    format_rows,
    make_stall_row,
    pending_messages,
)
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.policy import Bytes, format_bytes
from rrfp.schedule.punctuality import Durations, JustInTime, Punctuality, new_punctuality
from rrfp.schedule.tasks import (
    Cause,
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
from rrfp.trace.outcome import FaultOrigin, FoundBy
from rrfp.trace.records import (
    NS_PER_S,
    BegunRecord,
    Doing,
    Phase,
    PhaseRecord,
    Record,
    TaskRecord,
    WaitRecord,
    step_name,
    stimulus_record,
)

Tensors = tuple[torch.Tensor | None, ...]

_BRIEF_S = 0.05
"""The flight record of a longer wait also names the awaited task and rank."""


def task_begun(now_ns: int, step: int, task: Task) -> BegunRecord:
    """Make the flight record of a task that begins."""
    stage, kind, microbatch = task
    return BegunRecord(now_ns, now_ns, step, Doing.TASK, kind, stage, microbatch)


def explain_wait(
    wait: BegunRecord, dispatcher: Dispatcher, agreement: GroupAgreement, pp_ranks: Sequence[int]
) -> BegunRecord:
    """Return the record of a wait with the first output of another rank that a task here lacks, the
    hint's best waiting task first, and with that rank; if no task lacks one, only with the rank
    whose message of the group is awaited, or -1. Takes time linear in the tasks of the step."""
    status = dispatcher.status()
    best = () if status.best_waiting is None else (status.best_waiting,)
    for waiting in (*best, *status.tasks):
        for stage, kind, microbatch in waiting.lacks:
            pp_rank = dispatcher.shape.rank_of(stage)
            if pp_rank != dispatcher.rank:
                return wait._replace(
                    kind=kind, stage=stage, microbatch=microbatch, peer=pp_ranks[pp_rank]
                )
    return wait._replace(peer=next(iter(pending_messages(dispatcher, agreement, pp_ranks)), -1))


# Running out of memory.

_FITTING_SHARE = 0.9
"""Share of the activation bytes at the failure that is advised as `--hold`; the rest is for the
task's own temporary tensors."""
_MIB = 2**20
_ALLOCATOR_ERRORS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Texts in allocation errors without a class of their own: torch's on the CPU, and CUDA's own, as
for kernels that are loaded late."""


class OutOfMemoryError(RrfpError):
    """The device's memory was too small for a task."""


@contextmanager
def explain_out_of_memory(
    rank: int, task: Task, held_bytes: int, held_microbatches: float
) -> Iterator[None]:
    """Wrap a task that begins with these activations held; `held_bytes` is 0 if not known. Raises
    OutOfMemoryError, which advises a smaller `--hold` or another remedy, in place of an allocator's
    error; other errors pass unchanged."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_allocation = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            text in str(error) for text in _ALLOCATOR_ERRORS
        )
        if not is_allocation:
            raise
        size = "" if held_bytes == 0 else f"{format_bytes(held_bytes)} of "
        raise OutOfMemoryError(
            f"rank {rank} ran out of memory in {task}, with {size}activations of "
            f"{held_microbatches:g} microbatches held; "
            f"{_advise_hold(held_bytes, held_microbatches)} ({first_line(str(error))})"
        ) from error


def _advise_hold(held_bytes: int, held_microbatches: float) -> str:
    """Advise the `--hold` that would have fitted: 90 % of the held bytes in whole MiB, or if that
    is 0 or the bytes are unknown, one microbatch fewer, at least 1. If at most one microbatch is
    held, advise other remedies."""
    fitting = int(_FITTING_SHARE * held_bytes) // _MIB * _MIB
    if held_microbatches > 1 and fitting > 0:
        return f"--hold {Bytes(fitting)} would have fitted"
    if held_microbatches > 1:
        return f"--hold {max(1, int(held_microbatches) - 1)} would have fitted"
    return "no hold is smaller: use --recompute, smaller microbatches, or more ranks"


class Worker:
    """Runs one rank's stages through steps, one task at a time."""

    def __init__(
        self,
        pp_ranks: Sequence[int],
        inbox: Inbox,
        links: Links,
        agreement: GroupAgreement,
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
        self._sleep = None if delays is None else delays.sleeper("tasks")
        self._clock = clock
        self._device = device
        self._early: defaultdict[int, list[Event]] = defaultdict(list)
        """Events of later steps, by step."""
        self._left: set[int] = set()
        self._step: int
        self._dispatcher: Dispatcher
        self._pace: StepPace | None = None
        self._inputs: dict[Task, Tensors] = {}
        self._decided_ahead: RunTask | None = None
        self._peak_held_bytes = 0
        self._ahead: AheadThread | None = None
        self._decides_ahead = decides_ahead
        self._durations = Durations()
        self._punctuality: Punctuality | None = None
        """Accuracy of the neighbors' forecasts; None if this rank never waits for a forecast."""

    def open(self) -> None:
        """Join this rank's group, if any, before the first step. A follower then reports each
        arrived input to the leader; the leader starts the thread that decides ahead, if it decides
        ahead."""
        group = self._agreement.group
        if group is None:
            return
        if not group.leads:
            self._inbox.watch(self._report_input)
        elif self._decides_ahead:
            self._ahead = AheadThread(self._decide_ahead, self._clock)
            self._ahead.start()

    def close(self) -> None:
        """End the thread that decides ahead, if any, between two steps or after a failed one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _report_input(self, event: Event) -> None:
        """Report an arrived message to the group's leader at once, and ignore other events; runs on
        the link's thread."""
        if isinstance(event, MessageArrived):
            self._agreement.report(event.message.step, event.message.task)

    def run_step(
        self,
        step: int,
        dispatcher: Dispatcher,
        compute: Compute,
        pace: StepPace | None = None,
    ) -> StepSummary:
        """Run every task of one step, paced if `pace` is given, and return the step's times and
        peak memory. Raises an exception of a task or a link, PeerLostError or StallError."""
        step_start_ns = self._clock()
        self._begin_step(step, dispatcher, pace)
        busy_ns = 0
        while True:
            self._handle_events(self._inbox.take())
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
                        self._agreement.note_dispatch(step, instruction.task)
                        busy_ns += self._run(compute, instruction)
                    case Wait(cause, int() as deadline_ns):
                        self._record_wait(cause)
                        self._wait_until(deadline_ns)
                    case Wait(cause):
                        self._wait(cause)
                    case StepDone():
                        return self._summary(step_start_ns, busy_ns)

    def _begin_step(self, step: int, dispatcher: Dispatcher, pace: StepPace | None) -> None:
        """Reset the state for a step, and handle its events that came early."""
        self._step = step
        self._dispatcher = dispatcher
        self._pace = pace
        self._start_punctuality()
        self._agreement.start_step()
        self._handle_events(self._early.pop(step, ()))
        self._peak_held_bytes = 0

    def _summary(self, step_start_ns: int, busy_ns: int) -> StepSummary:
        """Summarize the step, which ends now: its times, and the largest number of microbatches and
        of bytes of activations held. The bytes are measured, or else modeled, or else None."""
        dispatcher = self._dispatcher
        peak_held = dispatcher.peak_held / dispatcher.shape.num_chunks
        peak_bytes = self._peak_held_bytes or dispatcher.peak_held_bytes
        return StepSummary(step_start_ns, self._clock(), busy_ns, peak_held, peak_bytes or None)

    def _start_punctuality(self) -> None:
        """Set `_punctuality`, with which this rank sends and uses forecasts in this step: None if
        the policy does not ask for it, and on a follower of a group, because the leader decides.
        Measurements stay valid until the policy asks for something else."""
        dispatcher, group = self._dispatcher, self._agreement.group
        fresh = new_punctuality(dispatcher.policy, dispatcher.shape.num_chunks)
        if fresh is None or (group is not None and not group.leads):
            self._punctuality = None
        elif self._punctuality is None or self._punctuality.asked != fresh.asked:
            self._punctuality = fresh

    def _decide_ahead(self) -> None:
        """Handle the arrived events, decide on the next task if one is ready, and send the decision
        to the group; runs on the ahead thread, which borrows the state."""
        self._handle_events(self._inbox.take())
        for instruction in self._handle(DecideAhead()):
            assert isinstance(instruction, RunTask)
            self._agreement.note_dispatch(self._step, instruction.task)
            self._decided_ahead = instruction

    def _handle(self, stimulus: Stimulus) -> tuple[Instruction, ...]:
        """Record a stimulus, pass it to the dispatcher, and return the dispatcher's
        instructions."""
        now_ns = self._clock()
        self._record(stimulus_record(now_ns, self._step, stimulus))
        return self._dispatcher.handle(now_ns, stimulus)

    def _handle_events(self, events: Iterable[Event]) -> None:
        """Apply the events of this step, keep those of later ones, and note the peers that have
        left; forecasts that this rank does not use are dropped. Raises the error of a
        `LinkFailed`."""
        for event in events:
            if isinstance(event, LinkFailed):
                raise event.error
            if isinstance(event, PeerLeft):
                self._left.add(event.peer)
                continue
            if isinstance(event, TaskEnded):
                continue
            step = event.message.step if isinstance(event, MessageArrived) else event.step
            if step != self._step:
                self._early[step].append(event)
                continue
            match event:
                case MessageArrived(_, message, arrived_ns):
                    if self._punctuality is not None:
                        self._punctuality.arrived(message.task, arrived_ns)
                    self._inputs[message.task] = message.tensors
                    self._handle(InputArrived(message.task))
                case InputForecast(_, _, task, received_ns, remaining_ns):
                    if self._punctuality is not None:
                        self._handle(self._punctuality.announced(task, received_ns, remaining_ns))
                case InputReported():
                    self._handle(self._agreement.stimulus_of(event))
                case TaskDecided():
                    self._agreement.add_decision(event)

    def _run(self, compute: Compute, run: RunTask) -> int:
        """Run one task, deliver its output and record it; return the task's time in ns, with what a
        pace adds. Before it, announces to the receiving rank when to expect the output, if
        forecasts are used."""
        task = run.task
        inputs = self._pop_inputs(task)
        waiting_bytes = compute.waiting_gradient_bytes
        if self._punctuality is not None:
            self._send_forecast(task, run.chunk)
        start_ns = self._clock()
        self._record(task_begun(start_ns, self._step, task))
        ahead, pace = self._ahead, self._pace
        with (
            nullcontext() if ahead is None else ahead.while_running(task.kind, run.chunk),
            nullcontext() if pace is None else pace.task(task),
            self._explain_out_of_memory(compute, run),
        ):
            if self._sleep is not None:
                self._sleep()
            outputs = compute.run(task, inputs)
        end_ns = self._clock()
        self._durations.took(task.kind, run.chunk, end_ns - start_ns)
        held_bytes = self._measure_held_bytes(compute, run)
        self._deliver(task, outputs)
        self._record_task(run, start_ns, end_ns, held_bytes, waiting_bytes)
        return end_ns - start_ns

    def _pop_inputs(self, task: Task) -> Tensors:
        """Remove and return a task's inputs; empty for a task without a sender. Those of another
        rank free a credit of its link."""
        shape = self._dispatcher.shape
        sender = shape.sender(task)
        if sender is None:
            return ()
        inputs = self._inputs.pop(task)
        sending_rank = shape.rank_of(sender.stage)
        if sending_rank != self._dispatcher.rank:
            self._links.consumed(self._pp_ranks[sending_rank], self._step)
            self._device.use_on_compute_stream(inputs)
        return inputs

    def _explain_out_of_memory(
        self, compute: Compute, run: RunTask
    ) -> AbstractContextManager[None]:
        """Wrap a task in `explain_out_of_memory` with the activations held now."""
        dispatcher = self._dispatcher
        num_held = run.held / dispatcher.shape.num_chunks
        rank = self._pp_ranks[dispatcher.rank]
        return explain_out_of_memory(rank, run.task, compute.held_bytes, num_held)

    def _measure_held_bytes(self, compute: Compute, run: RunTask) -> int:
        """Return the activation bytes held with this task: as the decision counted them if it knew
        their sizes, or else as measured. Updates the measured peak."""
        measured_bytes = compute.held_bytes
        self._peak_held_bytes = max(self._peak_held_bytes, measured_bytes)
        return run.held_bytes or measured_bytes

    def _deliver(self, task: Task, outputs: Tensors) -> None:
        """Pass a task's outputs to the task that takes them: here, or in a message to its rank.
        Drops them if there is no such task."""
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
        """Record a task that has ended, with the state of its decision and its memory."""
        stage, kind, microbatch = run.task
        self._record(
            TaskRecord(
                start_ns,
                end_ns,
                self._step,
                kind,
                stage,
                run.chunk,
                microbatch,
                run.hint_position,
                run.ready,
                run.skipped,
                run.depth,
                run.held,
                run.ready_forwards,
                run.ready_backwards,
                held_bytes,
                waiting_bytes,
            )
        )

    def _send_forecast(self, task: Task, chunk: int) -> None:
        """Announce to the rank that takes this task's output when to expect it: by the pace or else
        by earlier durations, and in a paced run the message's time later. Does nothing if neither
        is known, or if no other rank takes the output."""
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

    # Waiting.

    def _wait_until(self, deadline_ns: int) -> None:
        """Wait until something arrives, and handle it, or until the deadline."""
        while (left_ns := deadline_ns - self._clock()) > 0:
            if events := self._inbox.take(left_ns / NS_PER_S):
                self._handle_events(events)
                return

    def _wait(self, cause: Cause) -> None:
        """Wait until something arrives, and handle it. Raises StallError after `stall_s`, and
        PeerLostError if a peer that it waits for has left before. In a long wait it publishes this
        rank's row if any rank has called for rows, and calls for them itself 1.5 s before the end.

        It adds up its timeouts instead of reading the clock: time in which this process itself was
        stopped is no stall.
        """
        self._record_wait(cause)
        if self._left:
            self._raise_if_awaited_peer_left()
        board, step = self._board, self._step
        waited_s = 0.0
        call_s = max(0.0, self._stall_s - GATHER_S)
        call: int | None = None
        timeout_s = min(LOOK_S, call_s or self._stall_s)
        events = self._take_first_events(cause, timeout_s)
        while not events:
            waited_s += timeout_s
            if call is None and waited_s >= call_s:
                call = board.call(step)
            if num_calls := board.num_calls(step):
                board.publish(step, num_calls, self._stall_row(cause, waited_s))
            if call is not None and waited_s >= self._stall_s:
                raise self._make_stall_error(self._stall_row(cause, waited_s), call)
            timeout_s = min(LOOK_S, (call_s if call is None else self._stall_s) - waited_s)
            events = self._inbox.take(timeout_s)
        self._handle_events(events)

    def _take_first_events(self, cause: Cause, timeout_s: float) -> Sequence[Event]:
        """Wait up to `timeout_s` for the first events, and return them; empty after the timeout.
        Explains the wait in the flight record after 50 ms, or if a link failed."""
        events = self._inbox.take(min(timeout_s, _BRIEF_S))
        if not events or any(isinstance(event, LinkFailed) for event in events):
            self._record_wait(cause, explain=True)
        return events or self._inbox.take(max(0.0, timeout_s - _BRIEF_S))

    def _record_wait(self, cause: Cause, *, explain: bool = False) -> None:
        """Write to the flight record, and nowhere else, that a wait begins, or continues; with
        `explain`, also the awaited task and rank."""
        now_ns = self._clock()
        wait = BegunRecord(now_ns, now_ns, self._step, cause)
        if explain:
            wait = explain_wait(wait, self._dispatcher, self._agreement, self._pp_ranks)
        self._record(wait)

    def _make_stall_error(self, own: StallRow, call: int) -> StallError:
        """Make the error that names the ranks waited for, with this rank's row and those of all
        ranks that answered the call."""
        pending = "; ".join(
            f"rank {peer} owes {what}" for peer, what in self._pending_messages().items()
        )
        others = [row for row in self._board.rows(self._step, call) if row.rank != own.rank]
        return StallError(
            f"pipeline rank {own.pp_rank} waited {self._stall_s:g} s in {step_name(self._step)} "
            f"and nothing arrived: {pending}; see what these ranks do\n"
            f"{format_rows([own, *others], self._board.ranks)}"
        )

    def _stall_row(self, cause: Cause, waited_s: float) -> StallRow:
        """Describe this rank's current wait as its row of the stall table."""
        return make_stall_row(self._dispatcher, self._agreement, self._pp_ranks, cause, waited_s)

    def _raise_if_awaited_peer_left(self) -> None:
        """Raise PeerLostError if a peer has left that this rank still waits for."""
        for peer, what in self._pending_messages().items():
            if peer in self._left:
                raise PeerLostError(
                    f"rank {peer} left while pipeline rank {self._dispatcher.rank} waited in "
                    f"{step_name(self._step)} for {what}; see rank {peer}'s own output for the "
                    "cause",
                    FaultOrigin(FoundBy.LINK, rank=peer),
                )

    def _pending_messages(self) -> dict[int, str]:
        """Describe, by the sending global rank, what this rank still waits for in this step."""
        return pending_messages(self._dispatcher, self._agreement, self._pp_ranks)


# A worker for a device that runs beside its host.
#
# A launched task is not a finished one. The host launches the next task while one runs, so that the
# device need not wait for it. At most one task is queued behind the running one, decided as late as
# its launch allows (`rrfp.schedule.punctuality`). If nothing is ready then, the decision follows
# with the next arrival, or when the device has nothing left to do.
#
# Tasks are recorded by the device's own times, and launches by the host's. A rank is idle while its
# device is.

_MAX_LAUNCHED = 2
"""The running task, and one behind it."""
_CLOSE_S = 1.0
_NUM_WORK_TIMES = 9
"""A pace uses the median of this many task times: one very long task does not change it."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A task that was launched on the device."""

    run: RunTask
    began: interface.Event
    worked: interface.Event
    """Complete when its work is done; a pace may make the task longer."""
    ended: interface.Event
    launch_start_ns: int
    expected_ns: int | None
    """Duration that the pace knew before the task ran."""
    held_bytes: int
    waiting_bytes: int


class DeviceWorker(Worker):
    """Runs one rank's stages through steps on a device that is not synchronous, with at most one
    task launched behind the running one."""

    def __init__(
        self, *arguments: Any, device: Device, in_time: JustInTime | None = None, **others: Any
    ) -> None:
        """`in_time` computes when to decide; the other arguments are those of `Worker`."""
        super().__init__(*arguments, device=device, **others)
        # This worker decides ahead by itself, and needs no thread for it.
        self._decides_ahead = False
        self._launched: deque[_Launched] = deque()
        self._in_time = in_time or JustInTime()
        self._work_times_ns: defaultdict[tuple[Kind, int], deque[int]]
        self._work_times_ns = defaultdict(partial(deque, maxlen=_NUM_WORK_TIMES))
        """Latest work times by kind and chunk, before a pace made the tasks longer, without the
        very first: that one may compile its kernels."""
        self._due_ns: int | None = None
        """Time to decide on the task after the running one; None: when that has ended."""
        self._ended_ns = 0
        """Time at which the device last ran out of work."""
        self._asked_ns = 0
        """Time since which the next decision could be made."""
        self._busy_ns = 0
        self._waited_s = 0.0
        """Time since anything arrived or a task ended."""
        self._to_watch: SimpleQueue[interface.Event | None] = SimpleQueue()
        self._watcher = Thread(target=self._watch, name="rrfp-device", daemon=True)

    def open(self) -> None:
        """Join this rank's group, if any, and start the thread that waits for launched tasks to
        end."""
        super().open()
        self._watcher.start()

    def close(self) -> None:
        """Let the thread that waits for launched tasks end, and wait for that, but at most 1 s: it
        may wait for a device that hangs."""
        if self._watcher.is_alive():
            self._to_watch.put(None)
            # A daemon: a collective of a peer that is lost may never end.
            self._watcher.join(_CLOSE_S)
        super().close()

    def _watch(self) -> None:
        """Put `TaskEnded` into the inbox, to wake the compute thread, whenever a launched task has
        ended; runs on a thread of its own until `close`."""
        with self._device.selected():
            while (event := self._to_watch.get()) is not None:
                self._device.synchronize(event)
                self._inbox.put(TaskEnded())

    def run_step(
        self,
        step: int,
        dispatcher: Dispatcher,
        compute: Compute,
        pace: StepPace | None = None,
    ) -> StepSummary:
        """Run every task of one step, launching the next one while one runs, and return the step's
        times and peak memory once the device has run the last task. Raises the errors of
        `Worker.run_step`."""
        self._device.synchronize_clocks()
        step_start_ns = self._clock()
        self._begin_step(step, dispatcher, pace)
        self._launched.clear()
        self._asked_ns = step_start_ns
        self._busy_ns = 0
        self._waited_s = 0.0
        group = self._agreement.group
        follows = group is not None and not group.leads
        while True:
            self._handle_events(self._inbox.take())
            self._retire_ended()
            if len(self._launched) == _MAX_LAUNCHED:
                self._wait_for_events(LOOK_S)
                continue
            agreed = self._agreement.next()
            stimulus: Stimulus = ComputeIdle() if agreed is None else TaskAgreed(agreed)
            if agreed is None and self._launched:
                early_s = self._time_until_due_s()
                if follows or early_s > 0:
                    self._wait_for_events(early_s if early_s > 0 else LOOK_S)
                    continue
                if self._due_ns is not None:
                    self._asked_ns = max(self._asked_ns, self._due_ns)
                stimulus = DecideAhead()
            instructions = self._handle(stimulus)
            if not instructions:
                self._wait_for_events(LOOK_S)
            for instruction in instructions:
                match instruction:
                    case Waited(cause, start_ns, end_ns):
                        # The device was idle from its last task's end on, before the host saw it.
                        start_ns = min(start_ns, max(self._ended_ns, step_start_ns))
                        self._record(WaitRecord(start_ns, end_ns, step, cause))
                        self._ended_ns = end_ns
                    case RunTask():
                        self._agreement.note_dispatch(step, instruction.task)
                        self._launch(compute, instruction)
                    case Wait(cause, int() as deadline_ns):
                        self._record_wait(cause)
                        self._wait_until(deadline_ns)
                        self._asked_ns = self._clock()
                    case Wait(cause):
                        self._wait(cause)
                        self._asked_ns = self._clock()
                    case StepDone():
                        return self._summary(step_start_ns, self._busy_ns)

    def _wait_for_events(self, timeout_s: float) -> None:
        """Wait until something arrives or a task ends, and handle it, or until the timeout. Raises
        StallError if a task runs and nothing has happened for `stall_s`, added up as in `_wait`."""
        events = self._inbox.take(timeout_s)
        self._asked_ns = self._clock()
        self._waited_s = 0.0 if events else self._waited_s + timeout_s
        if self._launched and self._waited_s >= self._stall_s:
            raise StallError(
                f"pipeline rank {self._dispatcher.rank} waited {self._stall_s:g} s in "
                f"{step_name(self._step)} for its device to end {self._launched[0].run.task}; see "
                "whether that exchanges something with a rank that is lost"
            )
        self._handle_events(events)

    def _time_until_due_s(self) -> float:
        """Return the seconds until the next decision is due, at most 0.5 s (`LOOK_S`), which is
        also the result if no time is set. Negative if it is late."""
        if self._due_ns is None:
            return LOOK_S
        return min(LOOK_S, (self._due_ns - self._clock()) / NS_PER_S)

    def _launch(self, compute: Compute, run: RunTask) -> None:
        """Launch a task, record the launch, and deliver the output, which the device has yet to
        compute; before, announce the output if forecasts are used. With a pace it also queues a
        wait behind the task, to make it as long as modeled."""
        device, task, pace = self._device, run.task, self._pace
        inputs = self._pop_inputs(task)
        waiting_bytes = compute.waiting_gradient_bytes
        if self._punctuality is not None:
            self._send_forecast(task, run.chunk)
        expected_ns = None if pace is None else pace.expected_ns(task)
        stream = device.compute_stream()
        start_ns = self._clock()
        with ExitStack() as stack:
            stack.enter_context(self._explain_out_of_memory(compute, run))
            if self._sleep is not None:
                self._sleep()
            began = device.record_timed(stream)
            outputs = compute.run(task, inputs)
            ended = worked = device.record_timed(stream)
            if pace is not None:
                # Without a measurement the work counts as 0 ns.
                times_ns = self._work_times_ns[task.kind, run.chunk] or (0,)
                device.keep_busy(stream, pace.left_ns(task, median_low(times_ns)))
                ended = device.record_timed(stream)
        end_ns = self._clock()
        self._record(PhaseRecord(start_ns, end_ns, self._step, Phase.LAUNCH))
        # A thread that wakes up late launches late.
        self._in_time.launched(task.kind, run.chunk, end_ns - min(start_ns, self._asked_ns))
        held_bytes = self._measure_held_bytes(compute, run)
        launched = _Launched(
            run, began, worked, ended, start_ns, expected_ns, held_bytes, waiting_bytes
        )
        self._launched.append(launched)
        self._to_watch.put(ended)
        self._deliver(task, outputs)
        if len(self._launched) == 1:
            self._note_running(launched, end_ns)

    def _note_running(self, launched: _Launched, start_ns: int) -> None:
        """Record the task that the device runs since `start_ns`, and set the time of the next
        decision."""
        kind, chunk = launched.run.task.kind, launched.run.chunk
        self._record(task_begun(start_ns, self._step, launched.run.task))
        self._due_ns = self._in_time.due_ns(kind, chunk, start_ns, launched.expected_ns)

    def _retire_ended(self) -> None:
        """Remove the tasks that the device has finished, and record them by the device's times.
        Updates the expected durations, and notes the start of the task behind."""
        device = self._device
        while self._launched and device.query(self._launched[0].ended):
            launched = self._launched.popleft()
            run = launched.run
            # On an idle device a task begins with its launch; behind another, with that one's end.
            start_ns = max(device.time_ns(launched.began), launched.launch_start_ns)
            worked_ns = max(device.time_ns(launched.worked) - start_ns, 0)
            end_ns = max(device.time_ns(launched.ended), start_ns)
            duration_ns = end_ns - start_ns
            self._busy_ns += duration_ns
            self._ended_ns = self._asked_ns = end_ns
            kind = run.task.kind
            if self._durations.expected_ns(kind, run.chunk) is not None:
                self._work_times_ns[kind, run.chunk].append(worked_ns)
            if self._pace is not None:
                self._pace.worked(run.task, worked_ns)
            self._in_time.ran(kind, run.chunk, duration_ns, launched.expected_ns)
            self._durations.took(kind, run.chunk, duration_ns)
            self._record_task(run, start_ns, end_ns, launched.held_bytes, launched.waiting_bytes)
            if self._launched:
                self._note_running(self._launched[0], end_ns)


def make_worker(*arguments: Any, device: Device, **others: Any) -> Worker:
    """Make the worker for tasks on this device: `Worker` for a synchronous one, or else
    `DeviceWorker`. The arguments are those of `Worker`."""
    worker_class = Worker if device.is_synchronous else DeviceWorker
    return worker_class(*arguments, device=device, **others)
