"""Runs Megatron-Core's own schedule function unchanged and records it.

During a call, its `forward_step` and `backward_step`, its blocking transfers and its gradient
finalization are replaced by timed versions where the schedule looks them up, and restored
afterwards. The task is derived from the arguments of each call.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from rrfp.interchange.range_names import task_range, wait_range
from rrfp.megatron.adapters.groups import pipeline_size
from rrfp.megatron.adapters.models import chunks_of, config_of
from rrfp.megatron.adapters.native_schedule import megatron_schedule_for, patched_parts
from rrfp.megatron.step_report import StepReport
from rrfp.runtime.pace import Pace, StepPace, sleep_until
from rrfp.runtime.protocols import Clock, StepSummary, monotonic
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import (
    BegunRecord,
    Doing,
    FixedScheduleCounts,
    Phase,
    PhaseRecord,
    Record,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    step_name,
)

# Timers. On CUDA the host only launches a task, so events on the current stream measure when the
# GPU runs it. No timer waits for the GPU while a step runs.

_MAX_COMPARE_NS = 100_000


class Timer(Protocol):
    """Marks points in the issued work and later returns their times on the host's clock, in ns."""

    knows_at_once: bool
    """True if the time of a mark is known when it is made."""

    def mark(self) -> Any:
        """Mark the end of the work issued so far, without waiting for it."""

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        """Return the times of marks, which must be in the order of their creation. Without `wait`,
        None if a time is not known yet."""


class HostTimer:
    """Times work that is done when its call returns."""

    knows_at_once = True

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock

    def mark(self) -> int:
        """Return the time now in ns: all work is done when its call returns."""
        return self._clock()

    def times_ns(self, marks: Sequence[int], *, wait: bool) -> list[int]:
        """Return the marks, which are times themselves."""
        return list(marks)


class CudaTimer:
    """Times work on the current CUDA stream with events.

    An event's time is the host time of a reference event plus the time between the two events. The
    last mark read becomes the next reference. `compare_clocks` makes a new reference, because the
    two clocks drift.
    """

    knows_at_once = False

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._spare: list[Any] = []
        torch.cuda.synchronize()
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = clock()

    def compare_clocks(self) -> None:
        """Make a new reference: an event on the current stream, with its host time. Keep the old
        one if the stream is busy, or if the event takes more than 0.1 ms."""
        if not torch.cuda.current_stream().query():
            return
        event = self.mark()
        began_ns = self._clock()
        while not event.query():
            if self._clock() - began_ns > _MAX_COMPARE_NS:
                return
        self._reference, self._reference_ns = event, (began_ns + self._clock()) // 2

    def mark(self) -> Any:
        """Record an event on the current stream and return it. Events whose times were read are
        used again."""
        event = self._spare.pop() if self._spare else _new_event()
        event.record()
        return event

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        """Return the host times of events in ns; None while one is pending, unless `wait`. The last
        event becomes the reference; the others and the old reference are used again, so read each
        mark once."""
        if marks and wait:
            marks[-1].synchronize()
        if not all(mark.query() for mark in marks):
            return None
        times = [
            self._reference_ns + round(self._reference.elapsed_time(mark) * 1_000_000)
            for mark in marks
        ]
        if marks:
            # The time between two events has single precision: a close reference is more exact.
            self._spare += [self._reference, *marks[:-1]]
            self._reference, self._reference_ns = marks[-1], times[-1]
        return times


def _new_event() -> Any:
    """Create a CUDA event that can be timed."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# Pacing. Megatron's `_communicate` has no argument that names the microbatches. But in each
# direction a rank sends and receives in the order of its tasks, so the calls are counted.


class NativePace:
    """Paces one rank's tasks and transfers in one step of Megatron's own schedule."""

    def __init__(self, pace: StepPace, shape: Shape, pp_rank: int) -> None:
        self._pace = pace
        self._messages = _messages(shape, pp_rank)

    def task(self, stage: int, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        """Wrap a task's work, so that it ends no earlier than its modeled time after its start."""
        return self._pace.task(Task(stage, kind, microbatch))

    def transfer(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `_communicate`: after the real transfer, sleep for the modeled time of
        its messages, that of the longest if there are several."""

        def paced(*args: Any, **kwargs: Any) -> Any:
            result = communicate(*args, **kwargs)
            now_ns = time.monotonic_ns()
            exchanged = [
                next(messages)
                for name, messages in self._messages.items()
                # An argument is a tensor to send, or True to receive one.
                if kwargs[name] is not None and kwargs[name] is not False
            ]
            sleep_until(now_ns + max(map(self._pace.message_ns, exchanged), default=0))
            return result

        return paced


def _messages(shape: Shape, pp_rank: int) -> dict[str, Iterator[Task]]:
    """By argument of `_communicate`: the tasks that consume the messages passed in it, in transfer
    order. The order is that of 1F1B, or of the interleaved schedule with several chunks. Empty with
    one rank."""
    if shape.num_ranks == 1:
        return {}
    name = "1f1b" if shape.num_chunks == 1 else "interleaved"
    row = order_of(hint_named(name).for_shape(shape), shape).rows[pp_rank]
    forwards = [task for task in row if task.kind is Kind.F]
    backwards = [task for task in row if task.kind is Kind.B]
    return {
        "tensor_send_next": _sent(shape, forwards),
        "tensor_send_prev": _sent(shape, backwards),
        "recv_prev": _received(shape, forwards),
        "recv_next": _received(shape, backwards),
    }


def _sent(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks on neighboring stages that consume the outputs of these tasks, if any."""
    return (receiver for task in tasks if (receiver := shape.receiver(task)) is not None)


def _received(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks among these that consume the output of a neighboring stage."""
    return (task for task in tasks if shape.sender(task) is not None)


OpenRange = Callable[[str], AbstractContextManager[Any]]
"""Opens a named range in a profile, as `torch.profiler.record_function` does."""


class NativeSchedule:
    """Runs Megatron's schedule function, once per step, and records it."""

    def __init__(
        self,
        pp_rank: int,
        record: Callable[[Record], None],
        timer: Timer | None = None,
        open_range: OpenRange = nullcontext,
        name_of_step: Callable[[int], str] = step_name,
        pace: Pace | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """`timer` defaults to a HostTimer. `open_range` opens a profiler range around each task,
        wait and step; `name_of_step` returns a step's range name. `record` gets each record once
        its times are known, with a HostTimer immediately. Training steps and evaluations are
        numbered separately (`rrfp.trace.records`). `pace` delays tasks and transfers of training
        steps to modeled times; it requires work on the host. `num_ranks` defaults to the pipeline
        size of Megatron's parallel state."""
        self._pp_rank = pp_rank
        self._record = record
        self._timer = timer or HostTimer()
        self._open_range = open_range
        self._name_of_step = name_of_step
        self._pace = pace
        self._num_ranks = num_ranks or pipeline_size()
        self._steps: deque[_StepRecorder] = deque()
        self._num_trained = 0
        self._num_evaluations = 0
        self.report: StepReport | None = None
        """The report of the last step whose times are known."""

    def start_at(self, step: int) -> None:
        """Set the number of the next training step, for a run resumed from a checkpoint."""
        self._num_trained = step

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step with Megatron's own schedule, and record the finished steps whose times are
        known. Takes Megatron's arguments and returns its result."""
        forward_only = bool(arguments.get("forward_only", False))
        step = evaluation_step(self._num_evaluations) if forward_only else self._num_trained
        self._num_evaluations += forward_only
        self._num_trained += not forward_only
        schedule = megatron_schedule_for(len(chunks_of(arguments["model"])))
        data = self.run(partial(schedule, **arguments), step, arguments)
        self.settle()
        return data

    def run(
        self, schedule: Callable[[], list[Any]], step: int, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Run step number `step` by calling `schedule`, one of Megatron's schedule functions bound
        to `arguments`, and return its result. Tasks and waits are timed, and in training paced.
        `settle` must follow: it records a step whose times are not known at once."""
        chunks = chunks_of(arguments["model"])
        forward_only = bool(arguments.get("forward_only", False))
        kinds = FORWARD_ONLY if forward_only else WHOLE_BACKWARD
        shape = Shape(self._num_ranks, arguments["num_microbatches"], len(chunks), kinds=kinds)
        pace = None
        if self._pace is not None and not forward_only:
            pace = NativePace(self._pace.start_step(step, shape), shape, self._pp_rank)
        recorder = _StepRecorder(
            step,
            chunks,
            shape,
            self._pp_rank,
            self._timer,
            self._open_range,
            pace,
            self._record,
        )
        with (
            recorder.recording(config_of(chunks[0])),
            self._open_range(self._name_of_step(step)),
        ):
            # The marks are inside the ranges, so that they exclude the profiler's own cost.
            start = self._timer.mark()
            data = schedule()
            end = self._timer.mark()
        recorder.add(start, end, PhaseRecord, step, Phase.SCHEDULE)
        self._steps.append(recorder)
        return data

    def close(self) -> None:
        """Wait for the times of the remaining steps and record them."""
        self.settle(wait=True)

    def settle(self, *, wait: bool = False) -> None:
        """Record the finished steps whose times are known, in order, and set `report`; with `wait`,
        wait for the times of all. With a HostTimer, records are already written, and only `report`
        is set."""
        while self._steps and (records := self._steps[0].records(wait=wait)) is not None:
            if not self._timer.knows_at_once:
                for record in records:
                    self._record(record)
            self.report = StepReport(self._steps.popleft().summary(records))


class _StepRecorder:
    """Times the tasks and waits of one step and makes their records."""

    def __init__(
        self,
        step: int,
        chunks: list[Any],
        shape: Shape,
        pp_rank: int,
        timer: Timer,
        open_range: OpenRange,
        pace: NativePace | None,
        record: Callable[[Record], None],
    ) -> None:
        """`record` immediately gets the records of begins, and with a HostTimer all others."""
        self._step = step
        self._chunks = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._shape = shape
        self._pp_rank = pp_rank
        self._timer = timer
        self._open_range = open_range
        self._pace = pace
        self._record = record
        self._num_forwards = [0] * len(chunks)
        self._forwarded: dict[int, tuple[int, int]] = {}
        """Chunk and microbatch by the id of the forward's output, which the schedule keeps
        alive."""
        self._counts = FixedScheduleCounts(releases=Kind.B)
        self._num_waits = 0
        self._marks: list[Any] = []
        self._rows: list[tuple[type[Any], int, int, tuple[Any, ...]]] = []
        """For each record: its type, the indices of its two marks, and its other fields."""

    def recording(self, config: Any) -> AbstractContextManager[None]:
        """Replace, for the block, the functions that Megatron's schedule calls by recorded
        versions: forward, backward, transfers, and gradient finalization in `config`."""
        return patched_parts(
            forward=self.forward,
            backward=self.backward,
            communicate=self.communicate,
            config=config,
            finalize=partial(self.wait, Cause.GRADIENT_SYNC),
        )

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `forward_step` to record each call as a task F. A call with another model
        than the step's chunks, such as a teacher, runs unrecorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            chunk = self._chunks.get(id(kwargs["model"] if "model" in kwargs else args[2]))
            if chunk is None:  # another model that a task runs, such as a teacher
                return function(*args, **kwargs)
            count = self._num_forwards[chunk]
            self._num_forwards[chunk] += 1
            microbatch = kwargs.get("current_microbatch")
            microbatch = count if microbatch is None else microbatch
            result = self._run(Kind.F, chunk, microbatch, partial(function, *args, **kwargs))
            self._forwarded[id(result[0])] = chunk, microbatch
            return result

        return recorded

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `backward_step` to record each call as a task B of the chunk and
        microbatch whose forward made the output. A call with another output runs unrecorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[1]
            place = self._forwarded.pop(id(output), None)
            if place is None:  # no forward of this call made the output, so it is not a task
                return function(*args, **kwargs)
            return self._run(Kind.B, *place, partial(function, *args, **kwargs))

        return recorded

    def communicate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `_communicate` to record each call as a wait, and later waits for
        transfers in flight. With a pace, transfers are paced, too."""
        if self._pace is not None:
            function = self._pace.transfer(function)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            peer = _peer_of(next(iter(args), None), kwargs)
            *received, in_flight = self._transfer(function, peer)(*args, **kwargs)
            if isinstance(in_flight, dict):  # with overlap_p2p_comm; otherwise all is done
                in_flight = {
                    name: _InFlightTransfer(handle, self._transfer(handle.wait, peer))
                    for name, handle in in_flight.items()
                }
            return *received, in_flight

        return recorded

    def _transfer(self, function: Callable[..., Any], peer: int) -> Callable[..., Any]:
        """Wrap a function to record it as a wait for a transfer with rank `peer`. The cause of the
        wait follows from the number of tasks that have run."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            cause = self._counts.cause_of_transfer(self._shape.num_tasks_of_a_rank)
            return self.wait(cause, function, peer)(*args, **kwargs)

        return recorded

    def wait(
        self, cause: Cause, function: Callable[..., Any], peer: int = -1
    ) -> Callable[..., Any]:
        """Wrap a function to record each call as a wait with this cause, with a range in the
        profile."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._begin(cause, peer=peer)
            with self._open_range(wait_range(cause, self._num_waits, self._step)):
                start = self._timer.mark()
                result = function(*args, **kwargs)
                end = self._timer.mark()
            self.add(start, end, WaitRecord, self._step, cause)
            self._num_waits += 1
            return result

        return recorded

    def _begin(
        self, doing: str, kind: str = "", stage: int = -1, microbatch: int = -1, peer: int = -1
    ) -> None:
        """Record immediately that a task, or a wait with the cause `doing`, begins now."""
        now_ns = monotonic()
        task = kind, stage, microbatch
        self._record(BegunRecord(now_ns, now_ns, self._step, doing, *task, peer))

    def add(self, start: Any, end: Any, record: type[Any], *fields: Any) -> None:
        """Add a record of type `record` for the time between two marks. With a HostTimer, also
        write it immediately."""
        if self._timer.knows_at_once:
            times_ns = self._timer.times_ns((start, end), wait=False)
            assert times_ns is not None
            self._record(record(*times_ns, *fields))
        self._rows.append((record, len(self._marks), len(self._marks) + 1, fields))
        self._marks += (start, end)

    def records(self, *, wait: bool) -> list[Any] | None:
        """The step's records; None while a time is unknown, unless `wait` waits for it."""
        times_ns = self._timer.times_ns(self._marks, wait=wait)
        if times_ns is None:
            return None
        return [
            record(times_ns[start], times_ns[end], *fields)
            for record, start, end, fields in self._rows
        ]

    def summary(self, records: list[Any]) -> StepSummary:
        """The summary of the step, from its records, of which the last is the whole schedule's.
        `peak_held` is in microbatches: the peak number of held chunk activations divided by the
        number of chunks."""
        schedule = records[-1]
        busy_ns = sum(r.end_ns - r.start_ns for r in records if isinstance(r, TaskRecord))
        peak_held = self._counts.peak_held / len(self._chunks)
        return StepSummary(schedule.start_ns, schedule.end_ns, busy_ns, peak_held)

    def _run(self, kind: Kind, chunk: int, microbatch: int, function: Callable[[], Any]) -> Any:
        """Run a task's function and return its result. Records the task, opens its profiler range,
        and delays it to the pace."""
        stage = self._shape.stage_of(self._pp_rank, chunk)
        self._begin(Doing.TASK, kind, stage, microbatch)
        with self._open_range(task_range(kind, stage, chunk, microbatch, self._step)):
            start = self._timer.mark()
            with nullcontext() if self._pace is None else self._pace.task(stage, kind, microbatch):
                result = function()
            end = self._timer.mark()
        task = kind, stage, chunk, microbatch
        self.add(start, end, TaskRecord, self._step, *task, *self._counts.ran(kind))
        return result


class _InFlightTransfer:
    """A transfer's handle with a recorded `wait`."""

    def __init__(self, handle: Any, wait: Callable[..., Any]) -> None:
        self._handle = handle
        self.wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _peer_of(communicator: Any, transfer: Mapping[str, Any]) -> int:
    """The peer of a transfer of Megatron's, -1 if unknown: the communicator's next or previous
    rank. If the transfer both sends and receives, the rank that it receives from."""
    is_next = transfer.get("recv_next") or (
        not transfer.get("recv_prev") and transfer.get("tensor_send_next") is not None
    )
    peer = getattr(communicator, "next_rank" if is_next else "prev_rank", None)
    return -1 if peer is None else int(peer)
